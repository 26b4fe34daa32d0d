// Which local keys a row sees. Local positions grow strictly with the local index, so the visible keys
// of a row are one contiguous range, whatever the rank, interleave, causality and window.
#pragma once

#include <cstdint>

#include "core/portability.hpp"

namespace mla {

/// How tokens of one sequence are dealt to context-parallel ranks.
struct CpLayout {
  std::int64_t world = 1;
  std::int64_t rank = 0;
  std::int64_t interleave = 1;
};

/// Global position of local key j: ((j div I)*W + r)*I + j mod I.
MLA_HOST_DEVICE inline std::int64_t global_position(const CpLayout& cp, std::int64_t j) noexcept {
  return ((j / cp.interleave) * cp.world + cp.rank) * cp.interleave + j % cp.interleave;
}

/// How many local keys have a global position below x; 0 for x <= 0.
MLA_HOST_DEVICE inline std::int64_t local_keys_below(const CpLayout& cp, std::int64_t x) noexcept {
  if (x <= 0) return 0;
  if (cp.world == 1) return x;
  // Whole rounds of the deal are counted without forming world * interleave * rounds.
  const std::int64_t chunk = x / cp.interleave;  // whole chunks of I tokens below x
  const std::int64_t round = chunk / cp.world;
  const std::int64_t rank_in_round = chunk % cp.world;
  if (cp.rank < rank_in_round) return (round + 1) * cp.interleave;
  if (cp.rank > rank_in_round) return round * cp.interleave;
  return round * cp.interleave + x % cp.interleave;
}

/// A half-open range of local key indices.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  MLA_HOST_DEVICE bool empty() const noexcept { return begin >= end; }
};

/// The keys that a row at global position `position` (G_b - n_b + i) sees of `seq_len` local keys.
MLA_HOST_DEVICE inline KeyRange visible_keys(const CpLayout& cp, std::int64_t seq_len,
                                             std::int64_t position, bool causal,
                                             std::int64_t sliding_window) noexcept {
  KeyRange range{0, seq_len};
  if (causal) {
    const std::int64_t end = local_keys_below(cp, position + 1);
    range.end = end < range.end ? end : range.end;
  }
  if (sliding_window > 0) range.begin = local_keys_below(cp, position - sliding_window + 1);
  if (range.begin >= range.end) return KeyRange{0, 0};
  return range;
}

}  // namespace mla
