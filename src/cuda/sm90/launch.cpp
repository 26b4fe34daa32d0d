// Geometry, parameters and tensor map of a call, and its launch.
#include "cuda/sm90/launch.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "core/diagnostics.hpp"
#include "cuda/cuda.hpp"

namespace mla::sm90 {
namespace {

constexpr int kMaxGroup = 8;  // CTAs that may share a worker's keys
constexpr std::size_t kAlignment = 256;
constexpr std::int64_t kTmaAlignment = 16;
constexpr std::int64_t kElementBytes = 2;
constexpr int kChunkValues = 64;
constexpr int kPieceOverhead = 1;  // tiles; docs/kernel-sm90.md
constexpr int kMinPiece = 1;
constexpr int kEvenSlack = 20;  // of 64
constexpr int kCopiesInFlight = 4;

/// Microseconds of a call: a fixed part, one for every key tile and row block of a multiprocessor,
/// and kPieceUs for every further piece of work (docs/kernel-sm90.md). However few the blocks, a
/// tile comes from memory no faster than kTileReadUs.
struct BlockCost {
  int rows;
  double fixed_us;
  double tile_us;
};
constexpr BlockCost kBlockCosts[] = {{16, 9.3, 1.2}, {32, 11.3, 1.53}, {64, 16.5, 2.1}};
constexpr double kTileReadUs = 2.29;
constexpr double kPieceUs = 2.0;

std::size_t round_up(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::int32_t clamp_to_int32(std::int64_t value) {
  return static_cast<std::int32_t>(
      std::min<std::int64_t>(value, std::numeric_limits<std::int32_t>::max()));
}

const std::int32_t* int32_pointer(const TensorView& view) {
  return view.given() ? static_cast<const std::int32_t*>(view.data) : nullptr;
}

RowStrides strides(const TensorView& view) {
  return {view.stride[0], view.stride[1]};
}

bool rows_aligned(const TensorView& view) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(view.dtype));
  return reinterpret_cast<std::uintptr_t>(view.data) % kTmaAlignment == 0 &&
         view.stride[0] * bytes % kTmaAlignment == 0 && view.stride[1] * bytes % kTmaAlignment == 0;
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// The driver's encoder, found once; the library does not link the driver.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
    constexpr unsigned kVersion = 12000;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &entry, kVersion, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<EncodeTiled>(entry)
               : nullptr;
  }();
  return function;
}

bool misaligned(std::int64_t bytes) {
  return bytes <= 0 || bytes % kTmaAlignment != 0;
}

bool misaligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kTmaAlignment != 0;
}

/// A map of 16-bit elements in 128-byte-swizzled boxes. Strides are those of the second axis on.
template <std::size_t kRank>
Status encode_map(const DecodeProblem& problem, void* base, const std::int64_t (&extent)[kRank],
                  const std::int64_t (&stride_bytes)[kRank - 1], const int (&box)[kRank],
                  CUtensorMap& map) {
  const EncodeTiled encode = encode_tiled();
  if (encode == nullptr) {
    return {StatusCode::kDevice,
            "run: cuTensorMapEncodeTiled: found none, needed a CUDA 12 driver"};
  }
  cuuint64_t extents[kRank], strides[kRank - 1];
  cuuint32_t boxes[kRank], steps[kRank];
  for (std::size_t i = 0; i < kRank; ++i) {
    extents[i] = static_cast<cuuint64_t>(extent[i]);
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(stride_bytes[i - 1]);
  }
  const CUresult result =
      encode(&map,
             problem.kv_format == KvFormat::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             kRank, base, extents, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {StatusCode::kDevice, text("run: cuTensorMapEncodeTiled: found error ",
                                    static_cast<int>(result), ", needed success")};
}

/// The cache as [pages][chunks][page_size][64]: a box holds whole chunks one after the other.
Status make_kv_map(const DecodeProblem& problem, const DecodeTensors& tensors, int box_keys,
                   void* fallback, CUtensorMap& map) {
  const TensorView& cache = tensors.kv_cache;
  const bool empty = cache.shape[0] == 0;
  // A stride along an axis of extent 1 means nothing, but the encoder looks at it.
  const std::int64_t token_stride =
      (cache.shape[1] > 1 ? cache.stride[1] : cache.shape[2]) * kElementBytes;
  const std::int64_t page_stride =
      cache.shape[0] > 1 ? cache.stride[0] * kElementBytes : token_stride * cache.shape[1];
  if (misaligned(token_stride) || misaligned(page_stride) || misaligned(cache.data)) {
    return bad_argument(
        "run", "kv_cache layout",
        text("strides of ", token_stride, " and ", page_stride, " bytes at ", cache.data),
        text("positive multiples of ", kTmaAlignment, " bytes for backend sm90"));
  }
  const auto chunks = static_cast<int>(cache.shape[2] / kChunkValues);
  return encode_map<4>(
      problem, empty ? fallback : cache.data,
      {kChunkValues, cache.shape[1], chunks, empty ? 1 : cache.shape[0]},
      {token_stride, kChunkValues * kElementBytes, page_stride},
      {kChunkValues, box_keys, box_keys == kTileKeys ? chunks_per_group(chunks) : 1, 1}, map);
}

/// Whether the rows of any block can be copied as one box, and how.
QueryLoad query_load_of(const DecodeProblem& problem, const TensorView& q, int block_rows) {
  const std::int64_t head_stride = q.stride[1] * kElementBytes;
  const std::int64_t token_stride = q.stride[0] * kElementBytes;
  if (misaligned(q.data)) return QueryLoad::kRows;
  const bool one_head = problem.num_heads == 1;
  const bool one_token = problem.num_tokens == 1;
  if (one_head || one_token || token_stride == head_stride * problem.num_heads) {
    return misaligned(one_head ? token_stride : head_stride) ? QueryLoad::kRows
                                                             : QueryLoad::kFlatBox;
  }
  const bool one_token_blocks = problem.max_query_len == 1 || problem.num_heads % block_rows == 0;
  if (!one_token_blocks || misaligned(head_stride) || misaligned(token_stride))
    return QueryLoad::kRows;
  return QueryLoad::kTokenBox;
}

/// Rows of one query operand as [tokens][heads][width], or flat.
Status make_query_map(const DecodeProblem& problem, const TensorView& q, QueryLoad load,
                      int block_rows, CUtensorMap& map) {
  const std::int64_t head_stride = q.stride[1] * kElementBytes;
  const std::int64_t token_stride = q.stride[0] * kElementBytes;
  if (load == QueryLoad::kTokenBox) {
    return encode_map<3>(problem, q.data, {q.shape[2], q.shape[1], q.shape[0]},
                         {head_stride, token_stride}, {kChunkValues, block_rows, 1}, map);
  }
  const std::int64_t row_stride = problem.num_heads == 1 ? token_stride : head_stride;
  const std::int64_t rows = q.shape[0] * q.shape[1];
  return encode_map<3>(problem, q.data, {q.shape[2], rows, 1}, {row_stride, row_stride * rows},
                       {kChunkValues, block_rows, 1}, map);
}

/// The two query operands as views: the parts of q, or q_nope and q_pe.
void query_views(const DecodeProblem& problem, const DecodeTensors& tensors, TensorView& nope,
                 TensorView& pe) {
  nope = tensors.q_nope;
  pe = tensors.q_pe;
  if (!tensors.q.given()) return;
  nope = pe = tensors.q;
  nope.shape[2] = problem.kv_lora_rank;
  pe.shape[2] = problem.qk_rope_head_dim;
  pe.data = static_cast<std::byte*>(tensors.q.data) + problem.kv_lora_rank * kElementBytes;
}

Status make_maps(const DecodeProblem& problem, const DecodeTensors& tensors,
                 const Geometry& geometry, std::byte* workspace, KernelParams& p,
                 TensorMaps& maps) {
  MLA_RETURN_IF_ERROR(make_kv_map(problem, tensors, p.box_keys, workspace, maps.kv));
  TensorView nope, pe;
  query_views(problem, tensors, nope, pe);
  const bool has_pe = problem.qk_rope_head_dim > 0;
  p.query_load = query_load_of(problem, nope, geometry.block_rows);
  if (has_pe && query_load_of(problem, pe, geometry.block_rows) != p.query_load) {
    p.query_load = QueryLoad::kRows;
  }
  if (p.query_load == QueryLoad::kRows) return {};
  MLA_RETURN_IF_ERROR(
      make_query_map(problem, nope, p.query_load, geometry.block_rows, maps.q_nope));
  if (!has_pe) return {};
  return make_query_map(problem, pe, p.query_load, geometry.block_rows, maps.q_pe);
}

KernelParams make_params(const PlanState& state, const DecodeTensors& tensors,
                         const Geometry& geometry, std::byte* workspace) {
  const DecodeProblem& problem = state.problem;
  KernelParams p{};
  p.seq_lens = int32_pointer(tensors.seq_lens);
  p.query_start_loc = int32_pointer(tensors.query_start_loc);
  p.global_lens = problem.cp_world > 1 ? int32_pointer(tensors.causal_seqlens_kv_global) : nullptr;
  p.block_table = int32_pointer(tensors.block_table);
  p.block_table_stride = tensors.block_table.stride[0];
  p.num_requests = static_cast<std::int32_t>(problem.num_requests);
  p.num_tokens = static_cast<std::int32_t>(problem.num_tokens);
  p.num_heads = static_cast<std::int32_t>(problem.num_heads);
  p.page_size = static_cast<std::int32_t>(problem.page_size);
  p.heads_divisor = FastDivisor(static_cast<std::uint32_t>(p.num_heads));
  p.page_divisor = FastDivisor(static_cast<std::uint32_t>(p.page_size));
  p.group_divisor = FastDivisor(static_cast<std::uint32_t>(geometry.group));
  p.uniform_query_len = p.num_requests > 0 ? p.num_tokens / p.num_requests : 0;
  p.box_keys = static_cast<std::int32_t>(std::gcd<std::int64_t>(problem.page_size, kTileKeys));
  p.max_seq_len = clamp_to_int32(problem.max_seq_len);

  p.kv = tensors.kv_cache.data;
  p.kv_stride = {tensors.kv_cache.stride[0], tensors.kv_cache.stride[1]};

  TensorView nope, pe;
  query_views(problem, tensors, nope, pe);
  p.q_nope = nope.data;
  p.q_pe = pe.data;
  p.q_nope_stride = strides(nope);
  p.q_pe_stride = strides(pe);
  p.q_vector_loads = rows_aligned(nope) && (!pe.given() || rows_aligned(pe));

  p.causal = problem.causal;
  p.sliding_window = clamp_to_int32(problem.sliding_window);
  p.logits_soft_cap = problem.logits_soft_cap;
  p.sinks = tensors.sinks.given() ? static_cast<const float*>(tensors.sinks.data) : nullptr;
  p.alibi_slopes =
      tensors.alibi_slopes.given() ? static_cast<const float*>(tensors.alibi_slopes.data) : nullptr;
  p.cp = cp_layout(problem);
  p.bmm1_scale = tensors.bmm1_scale.value;
  p.bmm2_scale = tensors.bmm2_scale.value;
  p.bmm1_scale_pointer = tensors.bmm1_scale.pointer;
  p.bmm2_scale_pointer = tensors.bmm2_scale.pointer;

  p.out = tensors.out.data;
  p.out_stride = strides(tensors.out);
  p.out_dtype = static_cast<std::int32_t>(problem.resolved_out_dtype());
  p.out_vector_stores = problem.resolved_out_dtype() != DType::kF32 && rows_aligned(tensors.out);
  if (tensors.lse.given()) {
    p.lse = static_cast<float*>(tensors.lse.data);
    p.lse_stride = strides(tensors.lse);
  }
  constexpr float kLog2E = 1.44269504088896340736F;
  p.lse_factor = problem.lse_base == LseBase::kTwo ? kLog2E : 1.0F;

  p.num_workers = geometry.num_workers;
  p.group = geometry.group;
  p.piece_overhead = kPieceOverhead;
  p.min_share_log2 = geometry.block_rows == 64 ? 1 : 0;
  // In fixed_split mode no result is cut: a row's bits then depend on that row alone.
  p.min_piece =
      state.options.fixed_split > 0 ? std::numeric_limits<std::int32_t>::max() / 2 : kMinPiece;
  p.even_slack = state.options.fixed_split > 0 ? -1 : kEvenSlack;
  p.defer_values =
      geometry.group > 1;  // else reading is the bottleneck, and slots must come free early
  p.max_copies_in_flight = kCopiesInFlight;
  p.progress = reinterpret_cast<std::uint32_t*>(workspace + geometry.progress);
  p.partial_stats = reinterpret_cast<float2*>(workspace + geometry.partial_stats);
  p.partial_out = reinterpret_cast<float*>(workspace + geometry.partial_out);
  return p;
}

/// Whether the kernels without the rare paths serve this call.
bool is_plain(const KernelParams& p) {
  return p.out_vector_stores && p.query_load != QueryLoad::kRows && p.sliding_window == 0 &&
         p.cp.world == 1 && p.logits_soft_cap <= 0 && p.alibi_slopes == nullptr &&
         p.bmm1_scale_pointer == nullptr && p.bmm1_scale > 0;
}

LaunchKernel find_kernel(const DecodeProblem& problem, int rows, bool plain) {
  const bool bf16 = problem.kv_format == KvFormat::kBF16;
  if (problem.kv_lora_rank == 256)
    return bf16 ? kernel_bf16_256_64(rows, plain) : kernel_f16_256_64(rows, plain);
  if (problem.qk_rope_head_dim == 0)
    return bf16 ? kernel_bf16_512_0(rows, plain) : kernel_f16_512_0(rows, plain);
  return bf16 ? kernel_bf16_512_64(rows, plain) : kernel_f16_512_64(rows, plain);
}

/// Rows of a block. Small blocks start, multiply and merge sooner, but a key tile is read from L2
/// and multiplied once for each of them: they pay while there is little to read.
int choose_block_rows(const DecodeProblem& problem, std::int64_t rows, int num_multiprocessors) {
  const double tiles_of_request =
      std::ceil(static_cast<double>(clamp_to_int32(problem.max_seq_len)) / kTileKeys);
  const double tiles =
      static_cast<double>(problem.num_requests) * tiles_of_request / num_multiprocessors;
  int best_rows = 0;
  double best_us = std::numeric_limits<double>::infinity();
  for (const BlockCost& cost : kBlockCosts) {
    const auto blocks = static_cast<double>((rows + cost.rows - 1) / cost.rows);
    const double pieces =
        std::ceil(static_cast<double>(problem.num_requests) * blocks / num_multiprocessors);
    const double us = cost.fixed_us + tiles * std::max(blocks * cost.tile_us, kTileReadUs) +
                      (pieces - 1) * kPieceUs;
    if (us < best_us) {
      best_us = us;
      best_rows = cost.rows;
    }
  }
  return best_rows;
}

}  // namespace

Geometry make_geometry(const PlanState& state, int num_multiprocessors) noexcept {
  const DecodeProblem& problem = state.problem;
  const auto rows_of = [&problem](std::int64_t most_tokens) {
    return std::clamp<std::int64_t>(problem.max_query_len, 1, most_tokens) * problem.num_heads;
  };
  const std::int64_t rows = rows_of(std::max<std::int64_t>(problem.num_tokens, 1));
  Geometry g;
  if (state.options.fixed_split > 0) {
    // The kernels of different row blocks sum in different orders. A row's bits must not depend on
    // how many tokens or keys the batch has: the query bound alone decides.
    constexpr std::int64_t kManyTokens = 64;
    const std::int64_t row_bound = rows_of(kManyTokens);
    g.block_rows = row_bound <= 16 ? 16 : (row_bound <= 32 ? 32 : 64);
  } else {
    g.block_rows = choose_block_rows(problem, rows, num_multiprocessors);
  }
  const std::int64_t blocks = (rows + g.block_rows - 1) / g.block_rows;
  g.group = static_cast<int>(std::min<std::int64_t>({blocks, kMaxGroup, num_multiprocessors}));
  g.num_workers = num_multiprocessors / g.group;
  g.num_ctas = g.num_workers * g.group;

  const auto ctas = static_cast<std::size_t>(g.num_ctas);
  // Two slots a CTA for pieces of cut results.
  const std::size_t partials = 2 * ctas * static_cast<std::size_t>(g.block_rows);
  g.partial_stats = round_up(ctas * sizeof(std::uint32_t));
  g.partial_out = g.partial_stats + round_up(partials * sizeof(float2));
  g.total = g.partial_out +
            round_up(partials * static_cast<std::size_t>(problem.kv_lora_rank) * sizeof(float));
  return g;
}

Status configure(PlanState& state) {
  const Result<cuda::DeviceProperties> device = cuda::device_properties(state.options.device_index);
  if (!device.ok()) return device.status();
  const Geometry geometry = make_geometry(state, device->num_multiprocessors);
  state.num_workers = geometry.num_ctas;
  state.max_rows = geometry.block_rows;
  state.key_tile = kTileKeys;
  state.workspace_bytes = geometry.total;
  return {};
}

Status launch(const PlanState& state, const DecodeTensors& tensors, std::byte* workspace,
              void* stream) {
  if (state.problem.num_tokens == 0) return {};
  if (reinterpret_cast<std::uintptr_t>(workspace) % kAlignment != 0) {
    return bad_argument("run", "workspace", static_cast<void*>(workspace),
                        text("device memory aligned to ", kAlignment));
  }
  const Result<cuda::DeviceProperties> device = cuda::device_properties(state.options.device_index);
  if (!device.ok()) return device.status();
  const Geometry geometry = make_geometry(state, device->num_multiprocessors);
  KernelParams params = make_params(state, tensors, geometry, workspace);
  TensorMaps maps{};
  MLA_RETURN_IF_ERROR(make_maps(state.problem, tensors, geometry, workspace, params, maps));
  const LaunchKernel kernel = find_kernel(state.problem, geometry.block_rows, is_plain(params));
  const cudaError_t error =
      kernel(maps, params, geometry.num_ctas, static_cast<cudaStream_t>(stream));
  return cuda::to_status("run", "kernel launch", error);
}

}  // namespace mla::sm90
