// The oracle: SPEC section 2 in double and plain loops, sharing no arithmetic with any fast path.
#pragma once

#include <cstdint>

#include "mla/problem.hpp"
#include "mla/status.hpp"

namespace mla {

/// One row: out[L] and the lse (natural log, or base 2 when the problem asks for it) of query token
/// `token`, head `head`. The tensors must have passed validation.
void reference_row(const DecodeProblem& problem, const DecodeTensors& tensors, std::int64_t token,
                   std::int64_t head, double* out, double* lse);

/// Every row: out [T,H,L] and lse [T,H], contiguous. Validates the tensors and their contents first;
/// `tensors.out` and `tensors.lse` are neither needed nor touched.
Status reference_decode(const DecodeProblem& problem, const DecodeTensors& tensors, double* out,
                        double* lse);

}  // namespace mla
