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

constexpr std::int64_t kTmaAlignment = 16;
constexpr std::int64_t kElementBytes = 2;
constexpr int kChunkValues = 64;
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
  fill_call_params(state, tensors, geometry, workspace, p);
  p.box_keys = static_cast<std::int32_t>(std::gcd<std::int64_t>(problem.page_size, kTileKeys));
  TensorView nope, pe;
  query_views(problem, tensors, nope, pe);
  p.q_vector_loads =
      rows_aligned(nope, kTmaAlignment) && (!pe.given() || rows_aligned(pe, kTmaAlignment));
  p.min_share_log2 = geometry.block_rows == 64 ? 1 : 0;
  p.defer_values =
      geometry.group > 1;  // else reading is the bottleneck, and slots must come free early
  p.max_copies_in_flight = kCopiesInFlight;
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
  const std::int64_t rows = row_bound(problem, std::max<std::int64_t>(problem.num_tokens, 1));
  int block_rows = 0;
  if (state.options.fixed_split > 0) {
    // The kernels of different row blocks sum in different orders. A row's bits must not depend on
    // how many tokens or keys the batch has: the query bound alone decides.
    constexpr std::int64_t kManyTokens = 64;
    const std::int64_t bound = row_bound(problem, kManyTokens);
    block_rows = bound <= 16 ? 16 : (bound <= 32 ? 32 : 64);
  } else {
    block_rows = choose_block_rows(problem, rows, num_multiprocessors);
  }
  return cuda::make_geometry(rows, block_rows, num_multiprocessors, problem.kv_lora_rank);
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
  MLA_RETURN_IF_ERROR(check_workspace(workspace));
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
