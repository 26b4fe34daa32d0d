// Sharded decode against the unsharded formula.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/rows.hpp"
#include "support/sharded.hpp"
#include "testkit/rng.hpp"

namespace mla::test {
namespace {

constexpr CpStrategy kStrategies[] = {CpStrategy::kAllToAll, CpStrategy::kGatherReduce};

/// Every rank succeeds and the heads together are right.
void expect_sharded_right(const Scene& scene, const ShardedOptions& options) {
  const ShardedOutput found = decode_sharded(scene, options);
  for (const Status& status : found.statuses) ASSERT_TRUE(status.ok()) << status.message();
  expect_right(scene, found.output);
}

ShardedOptions sharded(int world, std::int64_t interleave, CpStrategy strategy) {
  ShardedOptions options;
  options.world = world;
  options.interleave = interleave;
  options.plan.strategy = strategy;
  options.plan.local.num_threads = 1;
  return options;
}

TEST(ContextParallel, ownsEveryHeadOnce) {
  for (std::int64_t heads = 1; heads < 40; ++heads) {
    for (std::int64_t world = 1; world < 50; ++world) {
      std::int64_t next = 0;
      for (std::int64_t r = 0; r < world; ++r) {
        const HeadRange range = rank_heads(heads, world, r);
        EXPECT_EQ(range.begin, std::min(next, heads));
        EXPECT_LE(range.count, rank_heads(heads, world, 0).count);
        next += range.count;
      }
      EXPECT_EQ(next, heads);
    }
  }
}

TEST(ContextParallel, equalsTheWholeForEveryWorld) {
  // Requests shorter than the world leave ranks without keys; 5 heads leave ranks without heads.
  Scene scene = random_scene(shape(5, 4), {0, 1, 3, 65, 200}, {1, 2, 5, 1, 3}, 3);
  scene.padding = 2;
  for (const int world : {1, 2, 3, 4, 7, 8, 16}) {
    for (const CpStrategy strategy : kStrategies) {
      SCOPED_TRACE(testing::Message() << "world " << world << " " << to_string(strategy));
      expect_sharded_right(scene, sharded(world, 1, strategy));
      expect_sharded_right(scene, sharded(world, 6, strategy));
    }
  }
}

TEST(ContextParallel, servesEveryModeOnEveryRow) {
  struct Mode {
    const char* name;
    std::function<void(Scene&)> set;
  };
  const Mode modes[] = {
      {"causal", [](Scene&) {}},
      {"non-causal", [](Scene& scene) { scene.problem.causal = false; }},
      {"window", [](Scene& scene) { scene.problem.sliding_window = 9; }},
      {"sinks",
       [](Scene& scene) {
         scene.sinks = {0.5F, -3.0F, 4.0F};
       }},
      {"alibi",
       [](Scene& scene) {
         scene.alibi_slopes = {0.01F, 0.1F, 0.5F};
       }},
      {"soft cap, base 2",
       [](Scene& scene) {
         scene.problem.logits_soft_cap = 5.0F;
         scene.problem.lse_base = LseBase::kTwo;
       }},
      {"f32 out", [](Scene& scene) { scene.problem.out_dtype = DType::kF32; }},
  };
  for (const KvFormat kv : {KvFormat::kBF16, KvFormat::kE4M3, KvFormat::kFp8DsMla}) {
    for (const Mode& mode : modes) {
      Scene scene = random_scene(shape(3, 5, kv), {40, 2, 0, 77}, {4, 3, 1, 1}, 11);
      mode.set(scene);
      for_each_row(scene, [&](const std::string& row) {
        SCOPED_TRACE(testing::Message() << mode.name << " " << to_string(kv) << " " << row);
        for (const CpStrategy strategy : kStrategies) {
          ShardedOptions options = sharded(4, 3, strategy);
          options.plan.local = forced(row, options.plan.local);
          expect_sharded_right(scene, options);
          options.plan.queries_gathered = true;
          expect_sharded_right(scene, options);
        }
      });
    }
  }
}

TEST(ContextParallel, randomScenes) {
  testkit::Rng rng(2024);
  for (int i = 0; i < 60; ++i) {
    DecodeProblem problem = shape(rng.between(1, 20), rng.between(1, 9));
    problem.causal = rng.one_in(2);
    if (rng.one_in(3)) problem.sliding_window = rng.between(1, 50);
    if (rng.one_in(3)) problem.lse_base = LseBase::kTwo;
    std::vector<std::int64_t> lens, tokens;
    for (std::int64_t b = rng.between(1, 4); b > 0; --b) {
      lens.push_back(rng.between(0, 90));
      tokens.push_back(rng.between(0, 5));
    }
    Scene scene = random_scene(problem, lens, tokens, static_cast<std::uint64_t>(i));
    if (rng.one_in(2)) scene.sinks.assign(static_cast<std::size_t>(problem.num_heads), 1.5F);
    scene.padding = rng.between(0, 2);
    const auto world = static_cast<int>(rng.between(1, 9));
    SCOPED_TRACE(testing::Message() << "scene " << i << " world " << world);
    ShardedOptions options = sharded(world, rng.between(1, 33), kStrategies[i % 2]);
    options.plan.queries_gathered = rng.one_in(2);
    options.plan.agree_each_call = rng.one_in(2);
    expect_sharded_right(scene, options);
  }
}

/// All ranks failed, with this sentence, and nobody wrote.
void expect_all_refused(const ShardedOutput& found, StatusCode code, const std::string& sentence) {
  for (const Status& status : found.statuses) EXPECT_TRUE(refused(status, code, sentence));
  for (const float lse : found.output.lse) EXPECT_TRUE(std::isnan(lse));
}

TEST(ContextParallel, oneRanksBadArgumentIsEveryRanksError) {
  const Scene scene = random_scene(shape(4), {30, 50}, {1}, 5);
  for (const CpStrategy strategy : kStrategies) {
    for (const bool agree_each_call : {true, false}) {
      ShardedOptions options = sharded(4, 1, strategy);
      options.plan.agree_each_call = agree_each_call;
      options.spoil = [](int rank, DecodeTensors& tensors) {
        if (rank == 2) tensors.seq_lens.shape[0] = 3;
      };
      expect_all_refused(decode_sharded(scene, options), StatusCode::kInvalidArgument,
                         "rank 2: run: seq_lens shape: found [3], needed [2]");
    }
  }
}

TEST(ContextParallel, aBadLengthInsideATensorIsFoundBeforePayloadMoves) {
  const Scene scene = random_scene(shape(4), {30, 50}, {1}, 5);
  ShardedOptions options = sharded(3, 1, CpStrategy::kAllToAll);
  options.spoil = [](int rank, DecodeTensors& tensors) {
    if (rank == 1) static_cast<std::int32_t*>(tensors.seq_lens.data)[1] = -7;
  };
  const ShardedOutput found = decode_sharded(scene, options);
  EXPECT_NE(found.statuses[0].message().find("rank 1: run: seq_lens"), std::string::npos)
      << found.statuses[0].message();
  expect_all_refused(found, StatusCode::kInvalidArgument, found.statuses[0].message());
}

TEST(ContextParallel, aRankThatIsAStepAheadIsFound) {
  const Scene scene = random_scene(shape(4), {30, 50}, {1, 2}, 5);
  for (const bool starts : {true, false}) {
    ShardedOptions options = sharded(3, 1, CpStrategy::kAllToAll);
    options.spoil = [&](int rank, DecodeTensors& tensors) {
      const TensorView& array = starts ? tensors.query_start_loc : tensors.causal_seqlens_kv_global;
      if (rank == 2) ++static_cast<std::int32_t*>(array.data)[1];
    };
    const ShardedOutput found = decode_sharded(scene, options);
    const std::string name = starts ? "query_start_loc" : "causal_seqlens_kv_global";
    const std::string begin = "decode_context_parallel: rank 2 " + name + " (checksum): found ";
    EXPECT_EQ(found.statuses[0].message().substr(0, begin.size()), begin);
    expect_all_refused(found, StatusCode::kInvalidArgument, found.statuses[0].message());
  }
}

TEST(ContextParallel, ranksThatDifferAreRefusedByEveryRank) {
  on_ranks(3, [](Communicator& ranks) {
    DecodeProblem problem = shape(8);
    problem.num_requests = problem.num_tokens = 2;
    problem.max_seq_len = 100;
    problem.cp_world = 3;
    problem.cp_rank = ranks.rank();
    ContextParallelOptions options;
    if (ranks.rank() == 1) problem.num_tokens = 4;
    EXPECT_TRUE(refused(
        plan_context_parallel(problem, ranks, options).status(), StatusCode::kInvalidArgument,
        "plan_context_parallel: rank 1 num_tokens: found 4, needed 2 as on rank 0"));
    problem.num_tokens = 2;
    if (ranks.rank() == 2) problem.cp_rank = 0;
    EXPECT_TRUE(refused(plan_context_parallel(problem, ranks, options).status(),
                        StatusCode::kInvalidArgument,
                        "rank 2: plan_context_parallel: cp_rank: found 0, needed 2, the group's"));
    problem.cp_rank = ranks.rank();
    if (ranks.rank() == 0) problem.cp_world = 4;
    EXPECT_TRUE(refused(plan_context_parallel(problem, ranks, options).status(),
                        StatusCode::kInvalidArgument,
                        "rank 0: plan_context_parallel: cp_world: found 4, needed 3, the group's"));
    problem.cp_world = 3;
    EXPECT_TRUE(plan_context_parallel(problem, ranks, options).ok());
  });
}

TEST(ContextParallel, aRankThatStaysAwayEndsInAnErrorInTime) {
  on_ranks(
      3,
      [](Communicator& ranks) {
        if (ranks.rank() == 1) return;
        DecodeProblem problem = shape(8);
        problem.num_requests = problem.num_tokens = 1;
        problem.cp_world = 3;
        problem.cp_rank = ranks.rank();
        EXPECT_TRUE(
            refused(plan_context_parallel(problem, ranks).status(), StatusCode::kPeer,
                    "exchange: rank 1: found no arrival within 200 ms, needed all 3 ranks"));
      },
      std::chrono::milliseconds(200));
}

}  // namespace
}  // namespace mla::test
