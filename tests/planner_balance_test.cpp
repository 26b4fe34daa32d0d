// How evenly work is dealt, and what plans cost: workspace sizes from bounds alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/split.hpp"
#include "mla/decode.hpp"
#include "support/rows.hpp"
#include "testkit/rng.hpp"

namespace mla {
namespace {

DecodeProblem batch(std::int64_t requests, std::int64_t heads, std::int64_t max_seq_len) {
  DecodeProblem problem;
  problem.num_requests = problem.num_tokens = requests;
  problem.num_heads = heads;
  problem.max_seq_len = max_seq_len;
  return problem;
}

/// Row-keys of each worker for lengths, as the splits of a plan give them.
std::vector<std::int64_t> worker_cost(const DecodeProblem& problem,
                                      const std::vector<std::int32_t>& lens, int workers) {
  PlanOptions options = test::forced("cpu_reference");
  options.num_threads = workers;
  const Result<DecodePlan> made = plan(problem, options);
  EXPECT_TRUE(made.ok());
  const Result<std::vector<Split>> dealt = splits(*made, lens.data());
  EXPECT_TRUE(dealt.ok());
  std::vector<std::int64_t> cost(static_cast<std::size_t>(workers));
  for (const Split& split : *dealt) {
    const std::int64_t rows = split.row_end - split.row_begin;
    const std::int64_t padded = rows < 8 ? rows : (rows + 7) / 8 * 8;
    cost[static_cast<std::size_t>(split.worker)] +=
        (split.key_end - split.key_begin) * (padded + 4);
  }
  return cost;
}

void expect_balanced(const DecodeProblem& problem, const std::vector<std::int32_t>& lens,
                     int workers) {
  const std::vector<std::int64_t> cost = worker_cost(problem, lens, workers);
  std::int64_t total = 0;
  for (const std::int64_t c : cost) total += c;
  const std::int64_t rows = std::min<std::int64_t>(problem.num_heads, 128);
  const std::int64_t tile_cost = 48 * ((rows < 8 ? rows : (rows + 7) / 8 * 8) + 4);
  // A cut is made at a tile and leaves no piece below four tiles, on either side.
  const std::int64_t share = total / workers;
  for (int worker = 0; worker < workers; ++worker) {
    EXPECT_LE(cost[static_cast<std::size_t>(worker)], share + 7 * tile_cost) << "worker " << worker;
    EXPECT_GE(cost[static_cast<std::size_t>(worker)], share - 7 * tile_cost) << "worker " << worker;
  }
}

TEST(Planner, WorkIsEqualUpToATileForUnevenBatches) {
  expect_balanced(batch(1, 16, 100000), {100000}, 8);
  expect_balanced(batch(1, 128, 100000), {100000}, 7);
  expect_balanced(batch(8, 16, 262144), {262144, 131072, 65536, 32768, 16384, 8192, 4096, 2048},
                  16);
  expect_balanced(batch(5, 1, 90000), {90000, 1, 0, 44000, 7}, 6);
  testkit::Rng rng(9);
  for (int i = 0; i < 100; ++i) {
    std::vector<std::int32_t> lens;
    for (int b = 0; b < 20; ++b) {
      lens.push_back(
          static_cast<std::int32_t>(rng.one_in(3) ? rng.between(0, 90) : rng.between(0, 50000)));
    }
    expect_balanced(batch(20, rng.between(1, 128), 50000), lens,
                    static_cast<int>(rng.between(1, 16)));
  }
}

TEST(Planner, SmallBatchesAreNotCut) {
  const DecodeProblem problem = batch(4, 16, 64);
  PlanOptions options;
  options.num_threads = 16;
  for (const std::string& row : test::runnable_rows()) {
    const Result<DecodePlan> made = plan(problem, test::forced(row, options));
    ASSERT_TRUE(made.ok());
    const std::int32_t lens[] = {5, 9, 17, 0};
    const Result<std::vector<Split>> dealt = splits(*made, lens);
    ASSERT_TRUE(dealt.ok());
    EXPECT_EQ(dealt->size(), 4U);
    for (const Split& split : *dealt) EXPECT_EQ(split.partial, -1);
  }
}

TEST(Planner, OverEstimatedLengthsCostNoWorkspace) {
  for (const std::string& row : test::runnable_rows()) {
    SCOPED_TRACE(row);
    const std::size_t tight = *workspace_size(batch(4, 16, 1000), test::forced(row));
    EXPECT_EQ(*workspace_size(batch(4, 16, std::int64_t{1} << 62), test::forced(row)), tight);
    EXPECT_EQ(
        *workspace_size(batch(4, 16, std::numeric_limits<std::int64_t>::max()), test::forced(row)),
        tight);
    EXPECT_LT(tight, std::size_t{64} << 20);
    PlanOptions fixed = test::forced(row);
    fixed.fixed_split = 512;
    EXPECT_LT(*workspace_size(batch(4, 16, std::int64_t{1} << 62), fixed), std::size_t{256} << 20);
    PlanOptions forced = test::forced(row);
    forced.num_splits = 4;
    EXPECT_LT(*workspace_size(batch(4, 16, std::int64_t{1} << 62), forced), std::size_t{64} << 20);
  }
}

TEST(Planner, OverEstimatedQueryLengthsCostNoMoreThanTheTokens) {
  for (const std::string& row : test::runnable_rows()) {
    DecodeProblem problem = batch(4, 16, 1000);
    problem.num_tokens = 8;
    problem.max_query_len = 8;
    const std::size_t tight = *workspace_size(problem, test::forced(row));
    problem.max_query_len = std::numeric_limits<std::int64_t>::max();
    EXPECT_EQ(*workspace_size(problem, test::forced(row)), tight) << row;
  }
}

TEST(Planner, SizesBeyondTheAddressSpaceAreOutOfMemory) {
  DecodeProblem problem = batch(std::numeric_limits<std::int32_t>::max(), 1, std::int64_t{1} << 62);
  problem.kv_lora_rank = 65536;
  for (const std::string& row : test::runnable_rows()) {
    SCOPED_TRACE(row);
    PlanOptions options = test::forced(row);
    options.num_threads = 4096;
    options.num_splits = std::numeric_limits<std::int32_t>::max();
    const Result<DecodePlan> made = plan(problem, options);
    if (row == "cpu_reference") {
      ASSERT_TRUE(made.ok());
      EXPECT_EQ(made->workspace_bytes(), 0U);
      continue;
    }
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.status().code(), StatusCode::kOutOfMemory);
    EXPECT_NE(made.status().message().find("plan: workspace: found more than the address space"),
              std::string::npos);
  }
}

TEST(Planner, AListOfSplitsIsAsLongAsTheBatchNeeds) {
  // Bounds without limit must not become memory: these would be hundreds of gigabytes of splits.
  for (const std::string& row : {std::string("cpu_reference"), test::runnable_rows().front()}) {
    PlanOptions options = test::forced(row);
    options.num_splits = row == "cpu_reference" ? std::numeric_limits<std::int32_t>::max() : 1000;
    const Result<DecodePlan> made = plan(batch(100, 16, std::int64_t{1} << 62), options);
    ASSERT_TRUE(made.ok()) << made.status().message();
    const std::vector<std::int32_t> lens(100, 5);
    const Result<std::vector<Split>> dealt = splits(*made, lens.data());
    ASSERT_TRUE(dealt.ok()) << dealt.status().message();
    EXPECT_EQ(dealt->size(), 100U);
  }
}

TEST(Planner, SplitsRefusesWhatRunRefuses) {
  DecodeProblem problem = batch(3, 16, 100);
  Result<DecodePlan> made = plan(problem);
  ASSERT_TRUE(made.ok());
  const std::int32_t long_lens[] = {5, 101, 5};
  EXPECT_TRUE(test::refused(splits(*made, long_lens).status(), StatusCode::kInvalidArgument,
                            "splits: seq_lens[1]: found 101, needed 0 to max_seq_len = 100"));
  EXPECT_TRUE(test::refused(splits(*made, nullptr).status(), StatusCode::kInvalidArgument,
                            "splits: seq_lens: found a null pointer, needed 3 lengths"));
  problem.num_tokens = 4;
  problem.max_query_len = 2;
  made = plan(problem);
  const std::int32_t lens[] = {5, 100, 0};
  EXPECT_TRUE(test::refused(splits(*made, lens).status(), StatusCode::kInvalidArgument,
                            "splits: query_start_loc: found none, needed it, because 4 tokens do "
                            "not divide among 3 requests"));
  const std::int32_t starts[] = {0, 2, 2, 5};
  EXPECT_TRUE(test::refused(splits(*made, lens, starts).status(), StatusCode::kInvalidArgument,
                            "splits: query_start_loc[3]: found 5, needed at most num_tokens = 4"));
  problem = batch(3, 16, 100);
  problem.cp_world = 4;
  made = plan(problem);
  EXPECT_TRUE(test::refused(
      splits(*made, lens).status(), StatusCode::kInvalidArgument,
      "splits: causal_seqlens_kv_global: found none, needed 3 global lengths, because "
      "cp_world is 4"));
  EXPECT_TRUE(splits(*made, lens, nullptr, lens).ok());
}

}  // namespace
}  // namespace mla
