// Setup, parameters and launch of a call.
#include "cuda/portable/launch.hpp"

#include <algorithm>

#include "core/diagnostics.hpp"
#include "cuda/cuda.hpp"

namespace mla::portable {
namespace {

constexpr int kDeepStages = 3;  // from here on the tile after the running one waits in the ring
constexpr std::int64_t kVectorBytes = 16;

/// f16 queries against bf16 elements: their rest needs registers that only the smallest block has.
bool splits_query(const DecodeProblem& problem) {
  return problem.q_dtype == DType::kF16 && problem.kv_format != KvFormat::kF16 &&
         problem.kv_format != KvFormat::kE4M3;
}

/// bf16 queries against f16 elements.
bool scales_query(const DecodeProblem& problem) {
  return problem.q_dtype == DType::kBF16 &&
         (problem.kv_format == KvFormat::kF16 || problem.kv_format == KvFormat::kE4M3);
}

Kernel find_kernel(const DecodeProblem& problem, int rows) {
  switch (problem.kv_format) {
    case KvFormat::kF16: return kernel_f16(rows);
    case KvFormat::kE4M3: return kernel_e4m3(rows);
    case KvFormat::kFp8DsMla: return kernel_fp8_ds_mla(rows);
    default: return kernel_bf16(rows);
  }
}

int stages_of(const Kernel& kernel, int shared_limit) {
  int stages = 0;
  while (stages < kMaxStages && kernel.shared_bytes(stages + 1) <= shared_limit) ++stages;
  return stages;
}

/// The smallest block that holds the rows of a request, as far as it leaves room for a ring.
int choose_block_rows(const DecodeProblem& problem, std::int64_t rows, int shared_limit) {
  if (rows <= 16 || splits_query(problem)) return 16;
  if (rows <= 32 || stages_of(find_kernel(problem, 64), shared_limit) < kDeepStages) return 32;
  return 64;
}

bool aligned_tokens(const TensorView& cache) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  return reinterpret_cast<std::uintptr_t>(cache.data) % kVectorBytes == 0 &&
         cache.stride[0] * bytes % kVectorBytes == 0 && cache.stride[1] * bytes % kVectorBytes == 0;
}

KernelParams make_params(const PlanState& state, const DecodeTensors& tensors, const Setup& setup,
                         std::byte* workspace) {
  const DecodeProblem& problem = state.problem;
  KernelParams p{};
  fill_call_params(state, tensors, setup.geometry, workspace, p);
  const TensorView& cache = tensors.kv_cache;
  p.rope = static_cast<std::int32_t>(problem.qk_rope_head_dim);
  p.num_stages = setup.num_stages;
  p.deep = setup.num_stages >= kDeepStages;
  p.row_vectors = static_cast<std::int32_t>(
      kv_row_elements(problem) *
      static_cast<std::int64_t>(dtype_bytes(kv_dtype(problem.kv_format))) / kVectorBytes);
  p.kv_vector_loads = aligned_tokens(cache);
  if (problem.sparse()) {  // every token is a request, and its index row the table
    p.sparse = true;
    p.pool_tokens = clamp_to_int32(cache.shape[0] * cache.shape[1]);
    p.seq_lens = nullptr;
    p.query_start_loc = nullptr;
    p.global_lens = nullptr;
    p.block_table = static_cast<const std::int32_t*>(tensors.indices.data);
    p.block_table_stride = tensors.indices.stride[0];
    p.num_requests = p.num_tokens;
    p.uniform_query_len = 1;
    p.max_seq_len = static_cast<std::int32_t>(problem.num_indices);
    p.causal = false;
    p.sliding_window = 0;
    p.cp = {};
  }
  TensorView nope, pe;
  query_views(problem, tensors, nope, pe);
  const bool wide = problem.q_dtype != DType::kE4M3;
  p.q_dtype = static_cast<std::int32_t>(problem.q_dtype);
  p.q_pair_loads = wide && rows_aligned(nope, 4) && (!pe.given() || rows_aligned(pe, 4));
  p.scale_query = scales_query(problem);
  p.split_query = splits_query(problem);
  return p;
}

}  // namespace

Setup make_setup(const PlanState& state, int num_multiprocessors, int shared_limit) noexcept {
  const DecodeProblem& problem = state.problem;
  // In fixed_split mode a row's bits must not depend on how many tokens the batch has: the query
  // bound alone decides.
  constexpr std::int64_t kManyTokens = 64;
  const std::int64_t tokens = problem.sparse() ? 1
                              : state.options.fixed_split > 0
                                  ? kManyTokens
                                  : std::max<std::int64_t>(problem.num_tokens, 1);
  const std::int64_t rows = row_bound(problem, tokens);
  Setup setup;
  const int block_rows = choose_block_rows(problem, rows, shared_limit);
  setup.geometry = cuda::make_geometry(rows, block_rows, num_multiprocessors, kMaxLatent);
  setup.kernel = find_kernel(problem, block_rows);
  setup.num_stages = stages_of(setup.kernel, shared_limit);
  setup.shared_bytes = setup.kernel.shared_bytes(setup.num_stages);
  return setup;
}

Status configure(PlanState& state, int shared_cap) {
  const Result<cuda::DeviceProperties> device = cuda::device_properties(state.options.device_index);
  if (!device.ok()) return device.status();
  const Setup setup = make_setup(state, device->num_multiprocessors,
                                 std::min(device->shared_bytes_per_block, shared_cap));
  state.num_workers = setup.geometry.num_ctas;
  state.max_rows = setup.geometry.block_rows;
  state.key_tile = kTileKeys;
  state.workspace_bytes = setup.geometry.total;
  return {};
}

Status launch(const PlanState& state, const DecodeTensors& tensors, std::byte* workspace,
              void* stream, int shared_cap) {
  if (state.problem.num_tokens == 0) return {};
  MLA_RETURN_IF_ERROR(check_workspace(workspace));
  const Result<cuda::DeviceProperties> device = cuda::device_properties(state.options.device_index);
  if (!device.ok()) return device.status();
  const Setup setup = make_setup(state, device->num_multiprocessors,
                                 std::min(device->shared_bytes_per_block, shared_cap));
  const KernelParams params = make_params(state, tensors, setup, workspace);
  const cudaError_t error = setup.kernel.launch(params, setup.geometry.num_ctas, setup.shared_bytes,
                                                static_cast<cudaStream_t>(stream));
  return cuda::to_status("run", "kernel launch", error);
}

}  // namespace mla::portable
