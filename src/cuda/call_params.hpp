// What the host hands to the kernels of every CUDA backend, by value. Plain data.
#pragma once

#include <cstdint>

#include <vector_types.h>

#include "core/visibility.hpp"

namespace mla::cuda {

/// Division by a number that is known on the host: n / divisor for 0 <= n < 2^31.
struct FastDivisor {
  std::uint32_t divisor = 1;
  std::uint32_t multiplier = 0;
  std::uint32_t shift = 0;

  FastDivisor() = default;
  explicit FastDivisor(std::uint32_t d) : divisor(d) {
    while (shift < 31 && (1U << shift) < d) ++shift;
    const std::uint64_t excess = (std::uint64_t{1} << shift) - d;
    multiplier = static_cast<std::uint32_t>((excess << 32) / d + 1);
  }
#if defined(__CUDACC__) || defined(MLA_WARP_ON_HOST)
  __device__ int divide(int n) const {
    const auto value = static_cast<std::uint32_t>(n);
    return static_cast<int>((__umulhi(value, multiplier) + value) >> shift);
  }
#endif
};

/// Rows of one operand, in elements.
struct RowStrides {
  std::int64_t token = 0;
  std::int64_t head = 0;
};

/// Tokens of the cache, in elements.
struct CacheStrides {
  std::int64_t page = 0;
  std::int64_t token = 0;
};

/// How the query rows of a block reach shared memory.
enum class QueryLoad : std::int32_t {
  kFlatBox,   ///< one box a chunk: (token, head) pairs lie at one stride
  kTokenBox,  ///< one box a chunk: a block's rows are heads of one token
  kRows,      ///< row by row
};

struct CallParams {
  // Lengths and table, in device memory.
  const std::int32_t* seq_lens;         ///< null: max_seq_len everywhere (sparse)
  const std::int32_t* query_start_loc;  ///< null: uniform
  const std::int32_t* token_end;        ///< tokens from *this on are padding; null: none are
  const std::int32_t* global_lens;      ///< null: G_b = S_b
  const std::int32_t* block_table;
  std::int64_t block_table_stride;
  std::int32_t num_requests;
  std::int32_t num_tokens;
  std::int32_t num_heads;
  std::int32_t page_size;
  std::int32_t latent;  ///< L
  FastDivisor heads_divisor;
  FastDivisor page_divisor;
  FastDivisor group_divisor;
  std::int32_t uniform_query_len;  ///< when query_start_loc is null
  std::int32_t max_seq_len;        ///< lengths are clamped to it

  // Cache.
  const void* kv;
  CacheStrides kv_stride;

  // Query.
  const void* q_nope;
  const void* q_pe;
  RowStrides q_nope_stride, q_pe_stride;
  QueryLoad query_load;

  // Modes.
  bool causal;
  std::int32_t sliding_window;
  float logits_soft_cap;
  const float* sinks;
  const float* alibi_slopes;
  CpLayout cp;
  float bmm1_scale, bmm2_scale;
  const float* bmm1_scale_pointer;
  const float* bmm2_scale_pointer;

  // Output.
  void* out;
  RowStrides out_stride;
  std::int32_t out_dtype;  ///< mla::DType
  bool out_vector_stores;  ///< 16-bit rows, 16-byte aligned
  float* lse;              ///< null: not wanted
  RowStrides lse_stride;
  float lse_factor;  ///< natural log -> the wanted base

  // Work division.
  std::int32_t num_workers;     ///< groups of `group` adjacent CTAs
  std::int32_t group;           ///< CTAs that read the same keys for different row blocks
  std::int32_t piece_overhead;  ///< cost of a result, in tiles
  std::int32_t min_share_log2;  ///< smallest share of a worker, in tiles: 2^this
  std::int32_t min_piece;       ///< smallest cut piece, in tiles; INT32_MAX: never cut
  std::int32_t even_slack;  ///< how much longer than a share an even part may be, of 64; < 0: no
                            ///< even parts

  // Workspace.
  std::uint32_t* progress;  ///< [CTAs], zero between launches: arrivals, then departures
  float* partial_out;       ///< [2 * CTAs][rows][L] f32: sum of exp2(s - maximum) * v
  float2* partial_stats;    ///< [2 * CTAs][rows]: maximum (log2 units) and sum of exp2(s - maximum)
};

}  // namespace mla::cuda
