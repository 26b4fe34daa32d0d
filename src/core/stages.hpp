// The stages of a call in data-flow order: problem -> validate -> plan -> backend -> combine -> output.
// decode.cpp calls them in this order; combine and output belong to the backend that launched.
#pragma once

#include "core/backend.hpp"
#include "core/split.hpp"
#include "mla/decode.hpp"

namespace mla {

/// [validate] The problem and options against themselves.
Status validate_problem(const DecodeProblem& problem, const PlanOptions& options);

/// [validate] Shapes, types, strides, alignment and pointers of the tensors against the problem.
Status validate_tensors(const DecodeProblem& problem, const DecodeTensors& tensors);

/// [validate] The same without out and lse.
Status validate_inputs(const DecodeProblem& problem, const DecodeTensors& tensors);

/// [validate] Contents of seq_lens, query_start_loc, causal_seqlens_kv_global and block_table, all in
/// host memory.
Status validate_contents(const DecodeProblem& problem, const DecodeTensors& tensors);
Status validate_lengths(const char* operation, const DecodeProblem& problem,
                        const BatchLengths& lengths);

}  // namespace mla
