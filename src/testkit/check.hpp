// One case from its string to a verdict: generate, plan, run twice, compare with the oracle.
#pragma once

#include <string>

#include "mla/decode.hpp"
#include "mla/status.hpp"
#include "testkit/compare.hpp"

namespace mla::testkit {

/// A workspace of the size that a plan asks for, zeroed.
Buffer make_workspace(const DecodePlan& plan);

/// The verdict on one case and backend row.
struct CheckResult {
  std::string backend;     ///< the row that ran
  Comparison comparison;   ///< of the first run
  std::string problem;     ///< what is wrong, one sentence; empty: everything is right
  std::string repro;       ///< the line that repeats it

  bool passed() const noexcept { return problem.empty(); }
};

/// Looks at everything a run promises: values and empty rows against the oracle, guard bands, untouched
/// inputs, and the same bits from a second run over NaN outputs in the same workspace.
/// An error Status (no verdict): the case is not valid (kInvalidArgument), no memory, or no row serves
/// it (kUnsupported).
Result<CheckResult> check_case(const Case& problem, const PlanOptions& options = {});

/// The same for a batch that exists already.
Result<CheckResult> check_batch(Batch& batch, const PlanOptions& options = {});

/// The same for tensors from elsewhere, whose own out and lse are not used. `CheckResult::repro` stays
/// empty, and writes to the inputs are not looked for.
Result<CheckResult> check_tensors(const DecodeProblem& problem, const DecodeTensors& tensors,
                                  const PlanOptions& options = {});

}  // namespace mla::testkit
