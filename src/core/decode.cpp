// The whole call: problem -> validate -> plan -> backend (-> combine -> output).
#include "mla/decode.hpp"

#include <algorithm>
#include <new>

#include "core/backend.hpp"
#include "core/diagnostics.hpp"
#include "core/stages.hpp"

#ifndef MLA_VERSION
#error "the build defines MLA_VERSION"
#endif

namespace mla {
namespace {

/// The library's own allocations are small; running out of memory is still a Status.
template <class Value, class Function>
Result<Value> guarded(const char* operation, Function&& function) noexcept {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, std::string(operation) + ": out of host memory");
  } catch (const std::exception& error) {
    return Status(StatusCode::kInternal, std::string(operation) + ": " + error.what());
  }
}

Result<DecodePlan> make_plan(const DecodeProblem& problem, const PlanOptions& options) {
  MLA_RETURN_IF_ERROR(validate_problem(problem, options));
  Result<const KernelEntry*> entry = select_backend(problem, options);
  if (!entry.ok()) return entry.status();
  auto state = std::make_shared<PlanState>();
  state->problem = problem;
  state->options = options;
  state->entry = *entry;
  MLA_RETURN_IF_ERROR((*entry)->configure(*state));
  return DecodePlan(std::move(state));
}

Status check_workspace(const DecodePlan& plan, const void* workspace, std::size_t bytes) {
  const std::size_t needed = plan.workspace_bytes();
  if (bytes < needed) return bad_argument("run", "workspace_bytes", bytes, text("at least ", needed));
  if (needed > 0 && workspace == nullptr) {
    return bad_argument("run", "workspace", "a null pointer", text(needed, " bytes"));
  }
  return {};
}

}  // namespace

const DecodeProblem& DecodePlan::problem() const noexcept { return state_->problem; }
const PlanOptions& DecodePlan::options() const noexcept { return state_->options; }
const char* DecodePlan::backend_name() const noexcept { return state_->entry->name; }
int DecodePlan::num_workers() const noexcept { return state_->num_workers; }
std::size_t DecodePlan::workspace_bytes() const noexcept { return state_->workspace_bytes; }

std::string DecodePlan::to_string() const {
  std::string line = text("backend=", backend_name(), " workers=", num_workers(),
                          " workspace_bytes=", workspace_bytes());
  if (options().num_splits > 0) line += text(" num_splits=", options().num_splits);
  if (options().fixed_split > 0) line += text(" fixed_split=", options().fixed_split);
  return line + " problem=" + mla::to_string(problem());
}

Result<DecodePlan> plan(const DecodeProblem& problem, const PlanOptions& options) {
  return guarded<DecodePlan>("plan", [&] { return make_plan(problem, options); });
}

Result<std::size_t> workspace_size(const DecodeProblem& problem, const PlanOptions& options) {
  Result<DecodePlan> made = plan(problem, options);
  if (!made.ok()) return made.status();
  return made->workspace_bytes();
}

Status run(const DecodePlan& plan, const DecodeTensors& tensors, void* workspace,
           std::size_t workspace_bytes, void* stream) {
  const Result<bool> done = guarded<bool>("run", [&]() -> Result<bool> {
    const PlanState& state = plan.state();
    MLA_RETURN_IF_ERROR(validate_tensors(state.problem, tensors));
    if (state.entry->host_readable) MLA_RETURN_IF_ERROR(validate_contents(state.problem, tensors));
    MLA_RETURN_IF_ERROR(check_workspace(plan, workspace, workspace_bytes));
    if (reinterpret_cast<std::uintptr_t>(workspace) % alignof(std::max_align_t) != 0) {
      return bad_argument("run", "workspace", workspace,
                          text("an address aligned to ", alignof(std::max_align_t)));
    }
    MLA_RETURN_IF_ERROR(
        state.entry->launch(state, tensors, static_cast<std::byte*>(workspace), stream));
    return true;
  });
  return done.ok() ? Status() : done.status();
}

Result<std::vector<Split>> splits(const DecodePlan& plan, const std::int32_t* seq_lens,
                                  const std::int32_t* query_start_loc,
                                  const std::int32_t* causal_seqlens_kv_global) {
  return guarded<std::vector<Split>>("splits", [&]() -> Result<std::vector<Split>> {
    const PlanState& state = plan.state();
    const BatchLengths lengths{seq_lens, query_start_loc, causal_seqlens_kv_global};
    if (seq_lens == nullptr && !state.problem.sparse() && state.problem.num_requests > 0) {
      return bad_argument("splits", "seq_lens", "a null pointer",
                          text(state.problem.num_requests, " lengths"));
    }
    MLA_RETURN_IF_ERROR(validate_lengths("splits", state.problem, lengths));
    // The list is as long as this batch needs, not as the longest that the plan could serve.
    PlanState batch = state;
    batch.problem.max_seq_len = 0;
    for (std::int64_t b = 0; b < state.problem.num_requests && seq_lens != nullptr; ++b) {
      batch.problem.max_seq_len = std::max<std::int64_t>(batch.problem.max_seq_len, seq_lens[b]);
    }
    const ScheduleBounds bounds = schedule_bounds(batch);
    std::vector<Split> made(static_cast<std::size_t>(bounds.num_splits));
    std::vector<MergeTask> merges(static_cast<std::size_t>(bounds.num_merges));
    std::vector<std::int32_t> worker_begin(static_cast<std::size_t>(state.num_workers) + 1);
    Schedule schedule{made.data(), worker_begin.data(), merges.data(), 0, 0};
    make_schedule(state, lengths, schedule);
    made.resize(static_cast<std::size_t>(schedule.num_splits));
    return made;
  });
}

const char* version() noexcept { return MLA_VERSION; }

}  // namespace mla
