#include "testkit/check.hpp"

#include <algorithm>
#include <cstring>

#include "core/diagnostics.hpp"

namespace mla::testkit {
namespace {

std::string first_difference(const Buffer& first, const std::vector<std::byte>& second,
                             const char* name) {
  const auto* begin = first.data();
  const auto mismatch = std::mismatch(second.begin(), second.end(), begin);
  if (mismatch.first == second.end()) return {};
  return text(name, ": a second run gave other bits, first at byte ",
              mismatch.first - second.begin());
}

std::vector<std::byte> copy_of(const Buffer& buffer) {
  if (buffer.size() == 0) return {};
  return {buffer.data(), buffer.data() + buffer.size()};
}

}  // namespace

Buffer make_workspace(const DecodePlan& plan) { return Buffer(plan.workspace_bytes(), 0); }

Result<CheckResult> check_batch(Batch& batch, const PlanOptions& options) {
  const PlanOptions all_options = plan_options(batch.source, options);
  Result<DecodePlan> made = plan(batch.problem, all_options);
  if (!made.ok()) return made.status();
  try {
    const Buffer workspace = make_workspace(*made);
    const std::uint64_t inputs = batch.input_fingerprint();
    CheckResult result;
    result.backend = made->backend_name();
    result.repro = repro_line(batch.source, result.backend, options.num_threads);
    MLA_RETURN_IF_ERROR(run(*made, batch.tensors, workspace.data(), workspace.size()));
    Result<Oracle> oracle = full_oracle(batch.problem, batch.tensors);
    if (!oracle.ok()) return oracle.status();
    result.comparison = compare(batch.problem, batch.tensors, *oracle);
    result.problem = result.comparison.problem;
    if (result.problem.empty()) result.problem = guard_damage(batch);
    if (result.problem.empty() && !workspace.intact()) {
      result.problem = "workspace: memory next to it was written";
    }
    if (result.problem.empty() && batch.input_fingerprint() != inputs) {
      result.problem = "inputs: an input tensor was written";
    }
    if (!result.problem.empty()) return result;

    const std::vector<std::byte> out = copy_of(batch.out);
    const std::vector<std::byte> lse = copy_of(batch.lse);
    batch.poison_outputs();
    MLA_RETURN_IF_ERROR(run(*made, batch.tensors, workspace.data(), workspace.size()));
    result.problem = first_difference(batch.out, out, "out");
    if (result.problem.empty()) result.problem = first_difference(batch.lse, lse, "lse");
    return result;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, text("check: no memory for ", to_string(batch.source)));
  }
}

Result<CheckResult> check_case(const Case& problem, const PlanOptions& options) {
  // A problem that no row serves needs no tensors.
  const CaseLengths lengths = case_lengths(problem);
  Result<DecodePlan> made = plan(decode_problem(problem, lengths), plan_options(problem, options));
  if (!made.ok()) return made.status();
  Result<std::unique_ptr<Batch>> batch = make_batch(problem);
  if (!batch.ok()) return batch.status();
  return check_batch(**batch, options);
}

}  // namespace mla::testkit
