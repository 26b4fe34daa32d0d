// What the host hands to the portable kernels beside the call, and the sizes both sides know.
#pragma once

#include "cuda/call_params.hpp"

namespace mla::portable {

using namespace mla::cuda;  // NOLINT(google-build-using-namespace): the shared half of the kernels

inline constexpr int kTileKeys = 32;
inline constexpr int kThreads = 256;
inline constexpr int kMaxLatent = 512;
inline constexpr int kMaxRope = 64;
inline constexpr int kMaxStages = 10;

/// How the cache's bytes become 16-bit elements.
enum class CacheKind { k16Bit, kE4M3, kFp8DsMla };

/// Parts of the width that different warps multiply.
constexpr int width_parts(int rows) {
  return rows == 64 ? 2 : 4;
}

/// Bytes of the widest token of a cache.
constexpr int max_row_bytes(CacheKind cache) {
  return cache == CacheKind::k16Bit ? (kMaxLatent + kMaxRope) * 2
                                    : (cache == CacheKind::kE4M3 ? kMaxLatent + kMaxRope : 656);
}

/// Bytes between keys in shared memory: an odd number of 16-byte vectors, so that eight keys'
/// vectors lie in different banks.
constexpr int row_pitch(CacheKind cache) {
  return max_row_bytes(cache) / 16 % 2 == 1 ? max_row_bytes(cache) : max_row_bytes(cache) + 16;
}

/// fp8_ds_mla: where a token's scales and rotary values begin.
inline constexpr int kDsScaleOffset = 512;
inline constexpr int kDsRopeOffset = 528;

struct KernelParams : CallParams {
  std::int32_t rope;        ///< R
  std::int32_t num_stages;  ///< tiles in the ring
  bool deep;  ///< the tile after the running one is complete before the running one's PV
  std::int32_t row_vectors;  ///< 16-byte vectors of a token
  bool kv_vector_loads;      ///< tokens are 16-byte aligned
  bool sparse;               ///< block_table holds token slots
  std::int32_t pool_tokens;  ///< sparse: slots from here on are no keys
  std::int32_t q_dtype;      ///< mla::DType
  bool q_pair_loads;         ///< query rows are aligned to two elements
  bool scale_query;  ///< bf16 queries become f16: each row times a power of two
  bool split_query;  ///< f16 queries become two bf16 each (16 rows only)
};

}  // namespace mla::portable
