// The one ordered table of backends, and the choice of a row.
#include "core/backend.hpp"
#include "core/diagnostics.hpp"
#include "core/stages.hpp"

namespace mla {
namespace {

std::string reject_reason(const KernelEntry& entry, const DecodeProblem& problem,
                          const PlanOptions& options) {
  std::string reason = entry.missing(options.device_index);
  if (reason.empty()) reason = entry.rejects(problem, options);
  return reason;
}

}  // namespace

const std::vector<const KernelEntry*>& backend_table() {
  // Fastest first; the last row of a device serves everything.
  static const std::vector<const KernelEntry*> table = [] {
    std::vector<const KernelEntry*> rows;
#if MLA_HAS_CUDA
    for (const KernelEntry* entry : sm90::backend_rows()) rows.push_back(entry);
    for (const KernelEntry* entry : portable::backend_rows()) rows.push_back(entry);
#endif
    for (const KernelEntry* entry : cpu::backend_rows()) rows.push_back(entry);
    return rows;
  }();
  return table;
}

std::string absent_reason(const std::string& name) {
#if MLA_HAS_CUDA
  constexpr bool kHasCuda = true;
#else
  constexpr bool kHasCuda = false;
#endif
  const bool is_cuda = name == "sm90" || name == "cuda" || name == "cuda_163k" || name == "cuda_99k";
  return !kHasCuda && is_cuda ? "this build has no CUDA" : "";
}

Result<const KernelEntry*> select_backend(const DecodeProblem& problem,
                                          const PlanOptions& options) {
  std::string known;
  // A row of another build is unsupported here, not a misspelling.
  std::string reasons = absent_reason(options.backend);
  if (!reasons.empty()) reasons = text(options.backend, ": ", reasons);
  for (const KernelEntry* entry : backend_table()) {
    known += known.empty() ? entry->name : text(", ", entry->name);
    if (!options.backend.empty() && options.backend != entry->name) continue;
    if (entry->device != options.device) {
      if (options.backend.empty()) continue;
      return bad_argument("plan", "backend", options.backend,
                          text("a row of device ", device_name(options.device)));
    }
    const std::string reason = reject_reason(*entry, problem, options);
    if (reason.empty()) return entry;
    reasons += text(reasons.empty() ? "" : "; ", entry->name, ": ", reason);
  }
  if (reasons.empty() && !options.backend.empty()) {
    return bad_argument("plan", "backend", options.backend, text("one of ", known));
  }
  if (reasons.empty()) reasons = text("this build has no row for device ", device_name(options.device));
  return Status(StatusCode::kUnsupported,
                text("plan: backend: found none that serves ", to_string(problem), ", needed one (",
                     reasons, ")"));
}

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> rows;
  for (const KernelEntry* entry : backend_table()) {
    rows.push_back({entry->name, entry->description, entry->device, entry->missing(0)});
  }
  return rows;
}

std::vector<BackendInfo> backends(const DecodeProblem& problem, const PlanOptions& options) {
  const Status invalid = validate_problem(problem, options);
  std::vector<BackendInfo> rows;
  for (const KernelEntry* entry : backend_table()) {
    rows.push_back({entry->name, entry->description, entry->device,
                    invalid.ok() ? reject_reason(*entry, problem, options) : invalid.message()});
  }
  return rows;
}

}  // namespace mla
