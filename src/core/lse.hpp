// The merge of normalised partial results: the only LSE arithmetic of the library.
//
//   m = max lse_r;  w_r = exp(lse_r - m);  out = sum w_r out_r / sum w_r;  lse = m + ln sum w_r
//
// A partial without keys is (0, -inf), the identity. NaN and +-inf lse count as -inf, and a weight of
// 0 kills even a NaN out_r.
#pragma once

#include <cmath>
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

}  // namespace mla
