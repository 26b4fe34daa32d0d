// The planner's promises over random batches: every key of every row once, splits sorted and
// bounded, merges that fit them, and the same schedule every time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "core/split.hpp"
#include "testkit/rng.hpp"

namespace mla {
namespace {

/// A batch and a plan for it, with the memory a schedule needs and nothing more.
struct Planned {
  PlanState state;
  std::vector<std::int32_t> seq_lens, starts, globals;
  ScheduleBounds bounds;
  std::vector<Split> splits;
  std::vector<MergeTask> merges;
  std::vector<std::int32_t> worker_begin;

  void make() {
    bounds = schedule_bounds(state);
    splits.assign(static_cast<std::size_t>(bounds.num_splits), Split{-1, -1, -1, -1, -1, -1, -9});
    merges.assign(static_cast<std::size_t>(bounds.num_merges), MergeTask{});
    worker_begin.assign(static_cast<std::size_t>(state.num_workers) + 1, -1);
    Schedule schedule{splits.data(), worker_begin.data(), merges.data(), 0, 0};
    make_schedule(state, lengths(), schedule);
    ASSERT_LE(schedule.num_splits, bounds.num_splits);
    ASSERT_LE(schedule.num_merges, bounds.num_merges);
    splits.resize(static_cast<std::size_t>(schedule.num_splits));
    merges.resize(static_cast<std::size_t>(schedule.num_merges));
  }
  BatchLengths lengths() const { return {seq_lens.data(), starts.data(), globals.data()}; }
};

Planned random_plan(testkit::Rng& rng) {
  Planned planned;
  DecodeProblem& problem = planned.state.problem;
  constexpr std::int64_t kHeads[] = {1, 3, 5, 8, 16, 20, 65, 128};
  problem.num_heads = kHeads[rng.below(8)];
  problem.num_requests = rng.between(0, 12);
  problem.causal = !rng.one_in(4);
  if (rng.one_in(4)) problem.sliding_window = rng.between(1, 400);
  if (rng.one_in(4)) {
    problem.cp_world = rng.between(2, 4);
    problem.cp_rank = rng.below(problem.cp_world);
    problem.cp_interleave = rng.between(1, 64);
  }
  const std::int64_t longest = rng.one_in(3) ? 20 : rng.one_in(2) ? 3000 : 100000;
  planned.starts.push_back(0);
  for (std::int64_t b = 0; b < problem.num_requests; ++b) {
    const std::int64_t tokens = rng.one_in(5)   ? 0
                                : rng.one_in(8) ? rng.between(1, 90)
                                                : rng.between(1, 4);
    const std::int64_t keys = rng.one_in(6) ? 0 : rng.between(1, longest);
    planned.starts.push_back(planned.starts.back() + static_cast<std::int32_t>(tokens));
    planned.seq_lens.push_back(static_cast<std::int32_t>(keys));
    planned.globals.push_back(static_cast<std::int32_t>(keys * problem.cp_world));
    problem.max_seq_len = std::max(problem.max_seq_len, keys);
    problem.max_query_len = std::max(problem.max_query_len, tokens);
  }
  problem.num_tokens = planned.starts.back() + rng.below(3);
  if (rng.one_in(3)) problem.max_seq_len += rng.below(1000000);
  planned.state.num_workers = static_cast<int>(rng.between(1, 24));
  planned.state.max_rows = 16 * rng.between(1, 8);
  planned.state.key_tile = rng.one_in(2) ? 48 : 64;
  if (rng.one_in(3))
    planned.state.options.num_splits = rng.between(1, 40);
  else if (rng.one_in(3))
    planned.state.options.fixed_split = rng.between(1, 2000);
  return planned;
}

/// Every visible key of every row lies in exactly one split of its row block; rows without keys
/// too.
void expect_every_key_once(const Planned& planned) {
  const DecodeProblem& problem = planned.state.problem;
  using Block = std::tuple<std::int32_t, std::int32_t, std::int32_t>;
  std::map<Block, std::vector<KeyRange>> blocks;
  for (const Split& split : planned.splits) {
    ASSERT_LT(split.row_begin, split.row_end);
    ASSERT_LE(split.row_end - split.row_begin, planned.state.max_rows);
    blocks[{split.request, split.row_begin, split.row_end}].push_back(
        {split.key_begin, split.key_end});
  }
  for (std::int64_t b = 0; b < num_planned_requests(problem); ++b) {
    const RequestShape shape = request_shape(problem, planned.lengths(), b);
    std::int64_t next_row = 0;
    for (const auto& [block, keys] : blocks) {
      if (std::get<0>(block) != b) continue;
      ASSERT_EQ(std::get<1>(block), next_row) << "a row is left out or twice in request " << b;
      next_row = std::get<2>(block);
      // Splits of one block lie end to end, in the order of the schedule.
      for (std::size_t i = 1; i < keys.size(); ++i) ASSERT_EQ(keys[i].begin, keys[i - 1].end);
      for (std::int64_t row = std::get<1>(block); row < std::get<2>(block); ++row) {
        const KeyRange seen = token_keys(problem, shape, row / problem.num_heads);
        if (seen.empty()) continue;
        ASSERT_LE(keys.front().begin, seen.begin);
        ASSERT_GE(keys.back().end, seen.end);
      }
      ASSERT_GE(keys.front().begin, 0);
      ASSERT_LE(keys.back().end, shape.seq_len);
    }
    ASSERT_EQ(next_row, shape.num_tokens * problem.num_heads) << "rows of request " << b;
  }
}

void expect_sorted_by_worker(const Planned& planned) {
  ASSERT_EQ(planned.worker_begin.front(), 0);
  ASSERT_EQ(planned.worker_begin.back(), static_cast<std::int32_t>(planned.splits.size()));
  for (int worker = 0; worker < planned.state.num_workers; ++worker) {
    const auto at = static_cast<std::size_t>(worker);
    ASSERT_LE(planned.worker_begin[at], planned.worker_begin[at + 1]);
    for (std::int32_t s = planned.worker_begin[at]; s < planned.worker_begin[at + 1]; ++s) {
      ASSERT_EQ(planned.splits[static_cast<std::size_t>(s)].worker, worker);
    }
  }
}

/// Splits that write partials have slots of their own, and exactly one merge reads them in key
/// order.
void expect_merges_fit(const Planned& planned) {
  std::vector<int> owner(static_cast<std::size_t>(planned.bounds.num_partials), 0);
  std::map<std::int32_t, const Split*> by_slot;
  std::map<std::tuple<std::int32_t, std::int32_t>, int> writes;
  for (const Split& split : planned.splits) {
    ++writes[{split.request, split.row_begin}];
    if (split.partial < 0) {
      ASSERT_EQ(split.partial, -1);
      continue;
    }
    by_slot[split.partial] = &split;
    for (std::int32_t slot = split.partial; slot < split.partial + split.row_end - split.row_begin;
         ++slot) {
      ASSERT_LT(slot, planned.bounds.num_partials);
      ASSERT_EQ(owner[static_cast<std::size_t>(slot)]++, 0)
          << "slot " << slot << " is written twice";
    }
  }
  std::size_t merged = 0;
  for (const MergeTask& task : planned.merges) {
    ASSERT_GE(task.num_splits, 2);
    std::int64_t end = -1;
    for (std::int32_t s = 0; s < task.num_splits; ++s) {
      const auto found = by_slot.find(task.partial + s * (task.row_end - task.row_begin));
      ASSERT_NE(found, by_slot.end());
      const Split& split = *found->second;
      ASSERT_EQ(split.request, task.request);
      ASSERT_EQ(split.row_begin, task.row_begin);
      ASSERT_EQ(split.row_end, task.row_end);
      ASSERT_LT(split.key_begin, split.key_end);
      if (s > 0) {
        ASSERT_EQ(split.key_begin, end);
      }
      end = split.key_end;
      ++merged;
    }
    ASSERT_EQ((writes[{task.request, task.row_begin}]), task.num_splits);
  }
  ASSERT_EQ(merged, by_slot.size()) << "a partial that no merge reads";
  for (const Split& split : planned.splits) {
    if (split.partial >= 0) continue;
    ASSERT_EQ((writes[{split.request, split.row_begin}]), 1) << "two splits write one row";
  }
}

void expect_cuts_where_promised(const Planned& planned) {
  const PlanOptions& options = planned.state.options;
  std::map<std::tuple<std::int32_t, std::int32_t>, std::int64_t> parts;
  for (const Split& split : planned.splits) {
    ++parts[{split.request, split.row_begin}];
    if (split.partial < 0) continue;
    const bool inner =
        std::any_of(planned.splits.begin(), planned.splits.end(), [&](const Split& other) {
          return other.request == split.request && other.row_begin == split.row_begin &&
                 other.key_end == split.key_begin;
        });
    if (!inner) continue;
    const std::int64_t unit =
        options.fixed_split > 0 ? options.fixed_split : planned.state.key_tile;
    ASSERT_EQ(split.key_begin % unit, 0) << "cut at " << split.key_begin;
    if (options.fixed_split > 0) {
      ASSERT_EQ((split.key_end - 1) / unit, split.key_begin / unit);
    }
  }
  if (options.num_splits > 0) {
    for (const auto& entry : parts) ASSERT_LE(entry.second, options.num_splits);
  }
}

TEST(Planner, RandomPlansKeepEveryPromise) {
  testkit::Rng rng(2024);
  for (int i = 0; i < 3000; ++i) {
    Planned planned = random_plan(rng);
    planned.make();
    if (HasFatalFailure()) FAIL() << "plan " << i;
    expect_every_key_once(planned);
    expect_sorted_by_worker(planned);
    expect_merges_fit(planned);
    expect_cuts_where_promised(planned);
    if (HasFatalFailure()) FAIL() << "plan " << i << ": " << to_string(planned.state.problem);
  }
}

TEST(Planner, SparseRowsAreRequestsOfTheirOwn) {
  testkit::Rng rng(7);
  for (int i = 0; i < 300; ++i) {
    Planned planned = random_plan(rng);
    planned.state.problem.num_indices = rng.between(1, 3000);
    planned.state.problem.sliding_window = 0;
    planned.make();
    expect_every_key_once(planned);
    expect_sorted_by_worker(planned);
    expect_merges_fit(planned);
    if (HasFatalFailure()) FAIL() << "plan " << i;
  }
}

TEST(Planner, TheScheduleIsAFunctionOfItsInputs) {
  testkit::Rng rng(5);
  for (int i = 0; i < 200; ++i) {
    Planned first = random_plan(rng);
    Planned second = first;
    first.make();
    second.make();
    ASSERT_EQ(first.splits.size(), second.splits.size());
    for (std::size_t s = 0; s < first.splits.size(); ++s) {
      ASSERT_EQ(first.splits[s].key_begin, second.splits[s].key_begin);
      ASSERT_EQ(first.splits[s].key_end, second.splits[s].key_end);
      ASSERT_EQ(first.splits[s].worker, second.splits[s].worker);
      ASSERT_EQ(first.splits[s].partial, second.splits[s].partial);
    }
    ASSERT_EQ(first.worker_begin, second.worker_begin);
  }
}

TEST(Planner, BoundsDoNotDependOnLengthsAndLengthsNotOnBounds) {
  // Over-estimating max_seq_len moves no split: work follows the real lengths.
  testkit::Rng rng(6);
  for (int i = 0; i < 200; ++i) {
    Planned exact = random_plan(rng);
    Planned loose = exact;
    loose.state.problem.max_seq_len = std::int64_t{1} << 62;
    if (exact.state.options.num_splits + exact.state.options.fixed_split > 0) continue;
    exact.make();
    loose.make();
    ASSERT_EQ(exact.splits.size(), loose.splits.size());
    for (std::size_t s = 0; s < exact.splits.size(); ++s) {
      ASSERT_EQ(exact.splits[s].key_begin, loose.splits[s].key_begin);
      ASSERT_EQ(exact.splits[s].key_end, loose.splits[s].key_end);
      ASSERT_EQ(exact.splits[s].worker, loose.splits[s].worker);
    }
  }
}

}  // namespace
}  // namespace mla
