#include "testkit/check.hpp"

#include <algorithm>
#include <cstring>

#include "core/diagnostics.hpp"
#include "testkit/runner.hpp"

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

/// Runs twice and looks at everything but the inputs. out and lse are the memory of tensors.out and
/// tensors.lse.
Result<CheckResult> check_runs(const DecodePlan& plan, const DecodeTensors& tensors, Buffer& out,
                               Buffer& lse) {
  const DecodeProblem& problem = plan.problem();
  Result<std::unique_ptr<Runner>> runner = Runner::make(plan, tensors, Buffer::kGuardBytes);
  if (!runner.ok()) return runner.status();
  CheckResult result;
  result.backend = plan.backend_name();
  MLA_RETURN_IF_ERROR((*runner)->run());
  const Result<Oracle> oracle = full_oracle(problem, tensors);
  if (!oracle.ok()) return oracle.status();
  result.comparison = compare(problem, tensors, *oracle);
  result.problem = result.comparison.problem;
  if (result.problem.empty()) result.problem = guard_damage(out, lse);
  if (result.problem.empty() && !(*runner)->workspace_intact()) {
    result.problem = "workspace: memory next to it was written";
  }
  if (!result.problem.empty()) return result;

  const std::vector<std::byte> first_out = copy_of(out);
  const std::vector<std::byte> first_lse = copy_of(lse);
  out.fill(0xFF);
  lse.fill(0xFF);
  MLA_RETURN_IF_ERROR((*runner)->run());
  result.problem = first_difference(out, first_out, "out");
  if (result.problem.empty()) result.problem = first_difference(lse, first_lse, "lse");
  return result;
}

Status no_memory(const std::string& problem) {
  return {StatusCode::kOutOfMemory, text("check: no memory for ", problem)};
}

}  // namespace

Buffer make_workspace(const DecodePlan& plan) { return Buffer(plan.workspace_bytes(), 0); }

Result<CheckResult> check_batch(Batch& batch, const PlanOptions& options) {
  const Result<DecodePlan> made = plan(batch.problem, plan_options(batch.source, options));
  if (!made.ok()) return made.status();
  try {
    const std::uint64_t inputs = batch.input_fingerprint();
    Result<CheckResult> result = check_runs(*made, batch.tensors, batch.out, batch.lse);
    if (!result.ok()) return result;
    result->repro = repro_line(batch.source, result->backend, options.num_threads);
    if (result->passed() && batch.input_fingerprint() != inputs) {
      result->problem = "inputs: an input tensor was written";
    }
    return result;
  } catch (const std::bad_alloc&) {
    return no_memory(to_string(batch.source));
  }
}

Result<CheckResult> check_case(const Case& problem, const PlanOptions& options) {
  // A problem that no row serves needs no tensors.
  const CaseLengths lengths = case_lengths(problem);
  const Result<DecodePlan> made =
      plan(decode_problem(problem, lengths), plan_options(problem, options));
  if (!made.ok()) return made.status();
  Result<std::unique_ptr<Batch>> batch = make_batch(problem);
  if (!batch.ok()) return batch.status();
  return check_batch(**batch, options);
}

Result<CheckResult> check_tensors(const DecodeProblem& problem, const DecodeTensors& tensors,
                                  const PlanOptions& options) {
  const Result<DecodePlan> made = plan(problem, options);
  if (!made.ok()) return made.status();
  try {
    Outputs outputs(problem);
    DecodeTensors all = tensors;
    all.out = outputs.out_view;
    all.lse = outputs.lse_view;
    return check_runs(*made, all, outputs.out, outputs.lse);
  } catch (const std::bad_alloc&) {
    return no_memory(to_string(problem));
  }
}

}  // namespace mla::testkit
