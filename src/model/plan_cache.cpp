#include "model/plan_cache.hpp"

#include <bit>
#include <new>

namespace mla::model {
namespace {

constexpr std::size_t kWorkspaceAlignment = 256;
constexpr std::size_t kMaxEntries = 32;
constexpr std::int64_t kSmallestSeqLenBound = 256;

std::int64_t power_of_two_at_least(std::int64_t value) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(value)));
}

bool serves(const DecodePlan& plan, const DecodeProblem& problem) {
  const DecodeProblem& made = plan.problem();
  return made.num_requests == problem.num_requests && made.num_tokens == problem.num_tokens &&
         made.max_seq_len == problem.max_seq_len && made.max_query_len == problem.max_query_len &&
         made.kv_format == problem.kv_format && made.page_size == problem.page_size;
}

}  // namespace

Result<const PlanCache::Entry*> PlanCache::get(DecodeProblem problem) {
  problem.max_seq_len = power_of_two_at_least(std::max(problem.max_seq_len, kSmallestSeqLenBound));
  problem.max_query_len = power_of_two_at_least(problem.max_query_len);
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    if (!serves(entry->plan, problem)) continue;
    entries_.splice(entries_.begin(), entries_, entry);
    return &entries_.front();
  }
  Result<DecodePlan> made = plan(problem, options_);
  if (!made.ok()) return made.status();
  const std::size_t bytes = made->workspace_bytes();
  Entry entry{*std::move(made), nullptr, nullptr};
  entry.storage.reset(new (std::nothrow) std::byte[bytes + kWorkspaceAlignment]());
  if (entry.storage == nullptr) {
    return Status(StatusCode::kOutOfMemory, "generate: workspace: found no memory, needed " +
                                                std::to_string(bytes) + " bytes");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(entry.storage.get());
  entry.workspace = entry.storage.get() +
                    (kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment;
  if (entries_.size() == kMaxEntries) entries_.pop_back();
  entries_.push_front(std::move(entry));
  ++num_plans_made_;
  return &entries_.front();
}

}  // namespace mla::model
