// What the host hands to the sm90 kernels beside the call, by value. Plain data.
#pragma once

#include "cuda/call_params.hpp"

namespace mla::sm90 {

using namespace mla::cuda;  // NOLINT(google-build-using-namespace): the shared half of the kernels

inline constexpr int kTileKeys = 64;  ///< keys of one tile

/// A tile is 64 keys x `chunks` chunks of 64 values. Copies, ring slots and barriers handle groups
/// of so many neighbouring chunks.
constexpr int chunks_per_group(int chunks) {
  return chunks % 3 == 0 ? 3 : (chunks % 4 == 0 ? 4 : chunks);
}

struct KernelParams : CallParams {
  std::int32_t box_keys;  ///< keys of one copy: gcd(page_size, 64)
  bool q_vector_loads;    ///< query rows are 16-byte aligned
  bool defer_values;      ///< 64 rows: PV of a tile after QK of the next
  std::int32_t max_copies_in_flight;  ///< groups
};

}  // namespace mla::sm90
