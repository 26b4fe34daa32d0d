#include "model/plan_cache.hpp"

#include <bit>
#include <cstring>
#include <new>

#include "core/diagnostics.hpp"
#include "core/element.hpp"

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

Status PlanCache::Entry::run(const DecodeTensors& tensors) const {
  if (!sharded) return mla::run(plan, tensors, workspace, plan.workspace_bytes());
  const DecodeProblem& problem = sharded->problem();
  const std::int64_t block = rank_heads(problem.num_heads, problem.cp_world, 0).count;
  const std::int64_t width = problem.kv_lora_rank;
  DecodeTensors mine = tensors;
  mine.out = TensorView::contiguous(own_heads, DType::kF32, {problem.num_tokens, block, width});
  mine.out.shape[1] = sharded->heads().count;
  MLA_RETURN_IF_ERROR(
      decode_context_parallel(*sharded, *ranks, mine, workspace, sharded->workspace_bytes()));
  const std::int64_t block_values = problem.num_tokens * block * width;
  MLA_RETURN_IF_ERROR(ranks->all_gather(
      own_heads, all_heads, static_cast<std::size_t>(block_values) * sizeof(float), nullptr));
  for (std::int64_t r = 0; r < problem.cp_world; ++r) {
    const HeadRange heads = rank_heads(problem.num_heads, problem.cp_world, r);
    for (std::int64_t token = 0; token < problem.num_tokens && heads.count > 0; ++token) {
      std::memcpy(row_address(tensors.out, token, heads.begin),
                  all_heads + r * block_values + token * block * width,
                  static_cast<std::size_t>(heads.count * width) * sizeof(float));
    }
  }
  return {};
}

Result<PlanCache::Entry> PlanCache::make(const DecodeProblem& problem) const {
  std::optional<ContextParallelPlan> sharded;
  std::size_t head_values = 0;
  DecodeProblem whole = problem;
  if (group_.ranks != nullptr) {
    whole.cp_world = group_.ranks->world();
    whole.cp_rank = group_.ranks->rank();
    whole.cp_interleave = group_.interleave;
    ContextParallelOptions options;
    options.local = options_;
    options.queries_gathered = true;
    Result<ContextParallelPlan> made = plan_context_parallel(whole, *group_.ranks, options);
    if (!made.ok()) return made.status();
    sharded = *std::move(made);
    head_values = static_cast<std::size_t>(whole.num_tokens *
                                           rank_heads(whole.num_heads, whole.cp_world, 0).count *
                                           whole.kv_lora_rank);
  }
  Result<DecodePlan> local = sharded ? sharded->local() : plan(problem, options_);
  if (!local.ok()) return local.status();
  const std::size_t workspace_bytes =
      sharded ? sharded->workspace_bytes() : local->workspace_bytes();
  const std::size_t own_begin =
      (workspace_bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  const std::size_t bytes = own_begin + head_values * sizeof(float) *
                                            (1 + static_cast<std::size_t>(group_.sharding().world));
  Entry entry{*std::move(local),  nullptr, nullptr, group_.ranks,
              std::move(sharded), nullptr, nullptr};
  entry.storage.reset(new (std::nothrow) std::byte[bytes + kWorkspaceAlignment]());
  if (entry.storage == nullptr) {
    return Status(StatusCode::kOutOfMemory, "generate: workspace: found no memory, needed " +
                                                std::to_string(bytes) + " bytes");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(entry.storage.get());
  std::byte* begin = entry.storage.get() +
                     (kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment;
  entry.workspace = begin;
  entry.own_heads = reinterpret_cast<float*>(begin + own_begin);
  entry.all_heads = entry.own_heads + head_values;
  return Result<Entry>(std::move(entry));
}

Result<const PlanCache::Entry*> PlanCache::get(DecodeProblem problem) {
  problem.max_seq_len = power_of_two_at_least(std::max(problem.max_seq_len, kSmallestSeqLenBound));
  problem.max_query_len = power_of_two_at_least(problem.max_query_len);
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    if (!serves(entry->plan, problem)) continue;
    entries_.splice(entries_.begin(), entries_, entry);
    return &entries_.front();
  }
  Result<Entry> made = make(problem);
  if (!made.ok()) return made.status();
  if (entries_.size() == kMaxEntries) entries_.pop_back();
  entries_.push_front(std::move(made).value());
  ++num_plans_made_;
  return &entries_.front();
}

}  // namespace mla::model
