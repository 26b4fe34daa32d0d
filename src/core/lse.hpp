// The merge of normalised partial results: the only LSE arithmetic of the library.
//
//   m = max lse_r;  w_r = exp(lse_r - m);  out = sum w_r out_r / sum w_r;  lse = m + ln sum w_r
//
// A partial without keys is (0, -inf), the identity. NaN and +-inf lse count as -inf, and a weight
// of 0 kills even a NaN out_r.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/portability.hpp"

namespace mla {

template <class Float>
MLA_HOST_DEVICE inline Float empty_lse() noexcept {
  return -std::numeric_limits<Float>::infinity();
}

/// -inf for every lse that is not a finite number.
template <class Float>
MLA_HOST_DEVICE inline Float clean_lse(Float lse) noexcept {
  const Float largest = std::numeric_limits<Float>::max();
  return (lse >= -largest && lse <= largest) ? lse : empty_lse<Float>();
}

/// Weights of two states: out = weight_a * out_a + weight_b * out_b, each term left out when its
/// weight is 0. Both weights are 0 when both states are empty.
template <class Float>
struct MergeWeights {
  Float weight_a;
  Float weight_b;
  Float lse;
};

template <class Float>
MLA_HOST_DEVICE inline MergeWeights<Float> merge_weights(Float lse_a, Float lse_b) noexcept {
  lse_a = clean_lse(lse_a);
  lse_b = clean_lse(lse_b);
  const Float none = empty_lse<Float>();
  // Empty states are passed through untouched, so that merging one changes no bit of the other.
  if (lse_a == none && lse_b == none) return {Float(0), Float(0), none};
  if (lse_b == none) return {Float(1), Float(0), lse_a};
  if (lse_a == none) return {Float(0), Float(1), lse_b};
  const Float m = lse_a > lse_b ? lse_a : lse_b;
  const Float exp_a = std::exp(lse_a - m);
  const Float exp_b = std::exp(lse_b - m);
  const Float sum = exp_a + exp_b;
  return {exp_a / sum, exp_b / sum, m + std::log(sum)};
}

/// What `count` states merge to: out = sum of weight_s * out_s over the weights that are not 0,
/// divided by `sum`.
template <class Float>
struct MergedLse {
  Float sum;               ///< of the weights; 0 when every state is empty
  Float lse;               ///< natural; -inf when every state is empty
  std::int64_t only_real;  ///< the index of the one state with keys, or -1
};

/// Writes the unnormalised weight exp(lse_s - m) of each state, `lses` being natural.
template <class Float>
inline MergedLse<Float> merge_weights(const Float* lses, std::int64_t count,
                                      Float* weights) noexcept {
  Float m = empty_lse<Float>();
  for (std::int64_t s = 0; s < count; ++s) m = std::fmax(m, clean_lse(lses[s]));
  MergedLse<Float> merged{0, empty_lse<Float>(), -1};
  std::int64_t num_real = 0;
  for (std::int64_t s = 0; s < count; ++s) {
    const Float lse = clean_lse(lses[s]);
    weights[s] = lse == empty_lse<Float>() ? Float(0) : std::exp(lse - m);
    merged.sum += weights[s];
    if (lse == empty_lse<Float>()) continue;
    merged.only_real = num_real++ == 0 ? s : -1;
  }
  if (num_real > 0) merged.lse = m + std::log(merged.sum);
  return merged;
}

}  // namespace mla
