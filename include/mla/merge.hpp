// Merging partial attention states.
#pragma once

#include <cstdint>

#include "mla/export.hpp"
#include "mla/problem.hpp"
#include "mla/status.hpp"

namespace mla {

/// One partial result over some of the keys: locally normalised.
struct AttentionState {
  TensorView out;  ///< [T,H,L] bf16, f16 or f32
  TensorView lse;  ///< [T,H] f32
};

/// Merges `count` states (host memory) into `merged`:
///
///   m = max lse_r;  w_r = exp(lse_r - m);  out = sum w_r out_r / sum w_r;  lse = m + ln sum w_r
///
/// NaN and +-inf lse count as -inf; a weight of 0 kills even a NaN out; all empty gives (0, -inf). All
/// lse are in `lse_base`, in and out. `merged` may be one of the states. Sums are f32 in the order of
/// the states.
MLA_API Status merge(const AttentionState* states, std::int64_t count, const AttentionState& merged,
                     LseBase lse_base = LseBase::kE);

}  // namespace mla
