// Grid, workspace and parameters of a call, as every CUDA backend needs them.
#include "cuda/call.hpp"

#include <algorithm>
#include <limits>

#include "core/diagnostics.hpp"

namespace mla::cuda {
namespace {

constexpr int kMaxGroup = 8;       // CTAs that may share a worker's keys
constexpr int kPieceOverhead = 1;  // tiles; docs/kernel-sm90.md
constexpr int kMinPiece = 1;
constexpr int kEvenSlack = 20;  // of 64
constexpr std::int64_t kVectorBytes = 16;

std::size_t round_up(std::size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

const std::int32_t* int32_pointer(const TensorView& view) {
  return view.given() ? static_cast<const std::int32_t*>(view.data) : nullptr;
}

const float* float_pointer(const TensorView& view) {
  return view.given() ? static_cast<const float*>(view.data) : nullptr;
}

RowStrides strides(const TensorView& view) {
  return {view.stride[0], view.stride[1]};
}

}  // namespace

std::int32_t clamp_to_int32(std::int64_t value) noexcept {
  return static_cast<std::int32_t>(
      std::min<std::int64_t>(value, std::numeric_limits<std::int32_t>::max()));
}

bool rows_aligned(const TensorView& view, std::int64_t bytes) noexcept {
  const auto element = static_cast<std::int64_t>(dtype_bytes(view.dtype));
  return reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(bytes) == 0 &&
         view.stride[0] * element % bytes == 0 && view.stride[1] * element % bytes == 0;
}

std::int64_t row_bound(const DecodeProblem& problem, std::int64_t most_tokens) noexcept {
  return std::clamp<std::int64_t>(problem.max_query_len, 1, most_tokens) * problem.num_heads;
}

void query_views(const DecodeProblem& problem, const DecodeTensors& tensors, TensorView& nope,
                 TensorView& pe) noexcept {
  nope = tensors.q_nope;
  pe = tensors.q_pe;
  if (!tensors.q.given()) return;
  nope = pe = tensors.q;
  nope.shape[2] = problem.kv_lora_rank;
  pe.shape[2] = problem.qk_rope_head_dim;
  pe.data = static_cast<std::byte*>(tensors.q.data) +
            problem.kv_lora_rank * static_cast<std::int64_t>(dtype_bytes(tensors.q.dtype));
}

Geometry make_geometry(std::int64_t rows, int block_rows, int max_ctas,
                       std::int64_t latent) noexcept {
  Geometry g;
  g.block_rows = block_rows;
  const std::int64_t blocks = (rows + block_rows - 1) / block_rows;
  g.group = static_cast<int>(std::min<std::int64_t>({blocks, kMaxGroup, max_ctas}));
  g.num_workers = max_ctas / g.group;
  g.num_ctas = g.num_workers * g.group;

  const auto ctas = static_cast<std::size_t>(g.num_ctas);
  // Two slots a CTA for pieces of cut results.
  const std::size_t partials = 2 * ctas * static_cast<std::size_t>(block_rows);
  g.partial_stats = round_up(ctas * sizeof(std::uint32_t));
  g.partial_out = g.partial_stats + round_up(partials * sizeof(float2));
  g.total =
      g.partial_out + round_up(partials * static_cast<std::size_t>(latent) * sizeof(float));
  return g;
}

Status check_workspace(const std::byte* workspace) {
  if (reinterpret_cast<std::uintptr_t>(workspace) % kWorkspaceAlignment == 0) return {};
  return bad_argument("run", "workspace", static_cast<const void*>(workspace),
                      text("device memory aligned to ", kWorkspaceAlignment));
}

void fill_call_params(const PlanState& state, const DecodeTensors& tensors,
                      const Geometry& geometry, std::byte* workspace, CallParams& p) noexcept {
  const DecodeProblem& problem = state.problem;
  p.seq_lens = int32_pointer(tensors.seq_lens);
  p.query_start_loc = int32_pointer(tensors.query_start_loc);
  p.token_end = p.query_start_loc != nullptr ? p.query_start_loc + problem.num_requests : nullptr;
  p.global_lens = problem.cp_world > 1 ? int32_pointer(tensors.causal_seqlens_kv_global) : nullptr;
  p.block_table = int32_pointer(tensors.block_table);
  p.block_table_stride = tensors.block_table.stride[0];
  p.num_requests = static_cast<std::int32_t>(problem.num_requests);
  p.num_tokens = static_cast<std::int32_t>(problem.num_tokens);
  p.num_heads = static_cast<std::int32_t>(problem.num_heads);
  p.page_size = static_cast<std::int32_t>(problem.page_size);
  p.latent = static_cast<std::int32_t>(problem.kv_lora_rank);
  p.heads_divisor = FastDivisor(static_cast<std::uint32_t>(p.num_heads));
  p.page_divisor = FastDivisor(static_cast<std::uint32_t>(p.page_size));
  p.group_divisor = FastDivisor(static_cast<std::uint32_t>(geometry.group));
  p.uniform_query_len = p.num_requests > 0 ? p.num_tokens / p.num_requests : 0;
  p.max_seq_len = clamp_to_int32(problem.max_seq_len);

  p.kv = tensors.kv_cache.data;
  p.kv_stride = {tensors.kv_cache.stride[0], tensors.kv_cache.stride[1]};

  TensorView nope, pe;
  query_views(problem, tensors, nope, pe);
  p.q_nope = nope.data;
  p.q_pe = pe.data;
  p.q_nope_stride = strides(nope);
  p.q_pe_stride = strides(pe);
  p.query_load = QueryLoad::kRows;

  p.causal = problem.causal;
  p.sliding_window = clamp_to_int32(problem.sliding_window);
  p.logits_soft_cap = problem.logits_soft_cap;
  p.sinks = float_pointer(tensors.sinks);
  p.alibi_slopes = float_pointer(tensors.alibi_slopes);
  p.cp = cp_layout(problem);
  p.bmm1_scale = tensors.bmm1_scale.value;
  p.bmm2_scale = tensors.bmm2_scale.value;
  p.bmm1_scale_pointer = tensors.bmm1_scale.pointer;
  p.bmm2_scale_pointer = tensors.bmm2_scale.pointer;

  p.out = tensors.out.data;
  p.out_stride = strides(tensors.out);
  p.out_dtype = static_cast<std::int32_t>(problem.resolved_out_dtype());
  p.out_vector_stores =
      problem.resolved_out_dtype() != DType::kF32 && rows_aligned(tensors.out, kVectorBytes);
  if (tensors.lse.given()) {
    p.lse = static_cast<float*>(tensors.lse.data);
    p.lse_stride = strides(tensors.lse);
  }
  constexpr float kLog2E = 1.44269504088896340736F;
  p.lse_factor = problem.lse_base == LseBase::kTwo ? kLog2E : 1.0F;

  p.num_workers = geometry.num_workers;
  p.group = geometry.group;
  p.piece_overhead = kPieceOverhead;
  p.min_share_log2 = 0;
  // In fixed_split mode no result is cut: a row's bits then depend on that row alone.
  p.min_piece =
      state.options.fixed_split > 0 ? std::numeric_limits<std::int32_t>::max() / 2 : kMinPiece;
  p.even_slack = state.options.fixed_split > 0 ? -1 : kEvenSlack;
  p.progress = reinterpret_cast<std::uint32_t*>(workspace + geometry.progress);
  p.partial_stats = reinterpret_cast<float2*>(workspace + geometry.partial_stats);
  p.partial_out = reinterpret_cast<float*>(workspace + geometry.partial_out);
}

}  // namespace mla::cuda
