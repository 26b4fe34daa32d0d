// Faults that users met: results that depend on batch-mates, hints, threads or the call; races;
// partials.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/rows.hpp"
#include "support/scene.hpp"
#include "testkit/rng.hpp"

namespace mla {
namespace {

using namespace test;

PlanOptions fixed(std::int64_t length, int threads = 0) {
  PlanOptions options;
  options.fixed_split = length;
  options.num_threads = threads;
  return options;
}

PlanOptions forced_splits(std::int64_t splits, int threads = 0) {
  PlanOptions options;
  options.num_splits = splits;
  options.num_threads = threads;
  return options;
}

TEST(Faults, B23_LseDoesNotDependOnTheNumberOfSplits) {
  const Scene scene = random_scene(shape(16), {1000, 37});
  const Exact right = exact(scene);
  for_each_row(scene, [&](const std::string& row) {
    const Output one = decode(scene, row, forced_splits(1));
    for (const std::int64_t splits : {1, 2, 4}) {
      const Output output = decode(scene, row, forced_splits(splits));
      expect_right(scene, output, right);
      for (std::size_t i = 0; i < output.lse.size(); ++i)
        EXPECT_NEAR(output.lse[i], one.lse[i], 1e-5);
    }
  });
}

TEST(Faults, B29_PartialsOfManySplitsLoseNoPrecision) {
  DecodeProblem problem = shape(1);
  problem.kv_lora_rank = 64;
  problem.qk_rope_head_dim = 0;
  problem.out_dtype = DType::kF32;
  Scene scene = with_zero_queries(random_scene(problem, {131072}));
  std::vector<float>& keys = scene.requests[0].keys;
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] += i / 64 % 2 == 0 ? 1000.0F : -1000.0F;
  const Exact right = exact(scene);
  for_each_row(scene, [&](const std::string& row) {
    const auto error = [&](const Output& output) {
      double sum = 0;
      for (std::int64_t d = 0; d < 64; ++d) {
        sum += std::pow(output.at(0, 0, d) - right.out[static_cast<std::size_t>(d)], 2);
      }
      return std::sqrt(sum / 64);
    };
    const double unsplit = error(decode(scene, row, forced_splits(1)));
    const double split = error(decode(scene, row, forced_splits(64)));
    EXPECT_LE(split, 2 * unsplit + 1e-4) << "unsplit " << unsplit;
  });
}

TEST(Faults, B68_FixedSplitBatchesEqualSingleRuns) {
  testkit::Rng rng(1);
  std::vector<std::int64_t> lens;
  for (int b = 0; b < 256; ++b) lens.push_back(rng.between(4, 68));
  for (const std::int64_t heads : {1, 8}) {
    const Scene scene = random_scene(shape(heads, 16), lens);
    for_each_row(scene, [&](const std::string& row) {
      const Output batch = decode(scene, row, fixed(32, 3));
      for (std::size_t b = 0; b < lens.size(); b += 11) {
        EXPECT_TRUE(same_bits(batch, static_cast<std::int64_t>(b),
                              decode(solo(scene, b), row, fixed(32, 2)), 0));
      }
    });
  }
}

TEST(Faults, B75_B76_RepeatedCallsGiveTheSameBits) {
  testkit::Rng rng(4);
  std::vector<std::int64_t> lens;
  for (int b = 0; b < 16; ++b) lens.push_back(rng.between(1, 1500));
  DecodeProblem sparse = shape(16);
  sparse.num_indices = 1024;
  Scene list = random_scene(sparse, {1500});
  list.requests[0].indices.resize(1);
  for (std::int64_t i = 0; i < 1024; ++i) list.requests[0].indices[0].push_back(i * 1499 % 1500);
  const Scene dense = random_scene(shape(16, 64, KvFormat::kE4M3), lens);
  for (const Scene& scene : {dense, list}) {
    for_each_kernel_row(scene, [&](const std::string& row) {
      for (const std::int64_t splits : {0, 1, 2, 4, 8, 16, 32}) {
        Laid laid = lay_out(scene);
        const Output first = run_laid(laid, row, forced_splits(splits, 4));
        EXPECT_TRUE(first.finite());
        for (int repeat = 0; repeat < 10; ++repeat) {
          ASSERT_TRUE(same_bits(run_laid(laid, row, forced_splits(splits, 4)), first))
              << "splits " << splits;
        }
      }
    });
  }
}

TEST(Faults, B74_RowsWithoutWorkDoNotUpsetTheOthers) {
  const Scene scene = random_scene(shape(128), {1, 130});
  for_each_kernel_row(scene, [&](const std::string& row) {
    Laid laid = lay_out(scene);
    const Output first = run_laid(laid, row);
    expect_right(scene, first);
    for (int launch = 0; launch < 40; ++launch) ASSERT_TRUE(same_bits(run_laid(laid, row), first));
  });
}

TEST(Faults, B77_TheNarrowLatentIsExactAndRepeatable) {
  testkit::Rng rng(8);
  for (int i = 0; i < 49; ++i) {
    DecodeProblem problem = shape(rng.between(1, 20), rng.between(1, 64));
    problem.kv_lora_rank = 256;
    const Scene scene = random_scene(problem, {rng.between(1, 200), rng.between(0, 90)},
                                     {rng.between(1, 3)}, static_cast<std::uint64_t>(i + 1));
    const Exact right = exact(scene);
    for_each_row(scene, [&](const std::string& row) {
      const Output first = decode(scene, row);
      expect_right(scene, first, right);
      EXPECT_TRUE(same_bits(decode(scene, row), first));
    });
  }
}

TEST(Faults, B78_TheErrorDoesNotDependOnTheNumberOfTasks) {
  for (const std::size_t requests :
       {std::size_t{1}, std::size_t{2}, std::size_t{3}, std::size_t{5}}) {
    const Scene scene =
        random_scene(shape(128, 64, KvFormat::kE4M3), std::vector<std::int64_t>(requests, 120));
    const Exact right = exact(scene);
    for (const int threads : {1, 2, 3}) {
      for_each_kernel_row(scene, [&](const std::string& row) {
        expect_right(scene, decode(scene, row, forced_splits(0, threads)), right);
      });
    }
  }
}

TEST(Faults, B79_EveryLengthReturns) {
  for (std::int64_t len = 1; len <= 1000; len += 37) {
    const Scene scene = random_scene(shape(128, 64, KvFormat::kE4M3), {len});
    for_each_kernel_row(scene,
                        [&](const std::string& row) { EXPECT_TRUE(decode(scene, row).finite()); });
  }
}

TEST(Faults, B113_BatchMatesChangeNoBit) {
  for (const std::int64_t width : {0, 512}) {  // dense, and a list of 512 keys
    DecodeProblem problem = shape(5);
    problem.num_indices = width;
    std::vector<std::int64_t> lens{3000};
    for (std::int64_t b = 1; b < 32; ++b) lens.push_back(b * 23);
    Scene scene = random_scene(problem, lens);
    testkit::Rng rng(2);
    for (std::size_t b = 0; b < lens.size() && width > 0; ++b) {
      scene.requests[b].indices.resize(1);
      for (std::int64_t i = 0; i < width; ++i)
        scene.requests[b].indices[0].push_back(rng.below(lens[b]));
    }
    for_each_kernel_row(scene, [&](const std::string& row) {
      for (const std::int64_t length : {64, 200}) {
        const Output alone = decode(solo(scene, 0), row, fixed(length));
        expect_right(solo(scene, 0), alone);
        Scene pair = scene;
        pair.requests.resize(2);
        EXPECT_TRUE(same_bits(decode(pair, row, fixed(length)), 0, alone, 0));
        EXPECT_TRUE(same_bits(decode(scene, row, fixed(length)), 0, alone, 0));
      }
    });
  }
}

TEST(Faults, B114_CopiesOfOneRowAndCallsOfOneTokenGiveOneResult) {
  for (const std::int64_t heads : {2, 16}) {
    const Scene one = random_scene(shape(heads), {1200}, {4});
    for_each_kernel_row(one, [&](const std::string& row) {
      for (const std::int64_t length : {100, 512}) {
        const Output four = decode(one, row, fixed(length));
        expect_right(one, four);
        // Four calls of one token each, on growing lengths.
        for (std::int64_t t = 0; t < 4; ++t) {
          Scene step = one;
          step.requests[0].num_tokens = 1;
          step.requests[0].keys.resize(static_cast<std::size_t>((1200 - 3 + t) * 576));
          const auto query = one.requests[0].query.begin() + t * heads * 576;
          step.requests[0].query.assign(query, query + heads * 576);
          EXPECT_TRUE(same_bits(decode(step, row, fixed(length)), 0, four, t)) << "token " << t;
        }
        // 12 copies of the request in one batch, and several thread counts.
        Scene copies = one;
        copies.requests.assign(12, one.requests[0]);
        const Output batch = decode(copies, row, fixed(length));
        for (std::int64_t b = 0; b < 12; ++b) EXPECT_TRUE(same_bits(batch, 4 * b, four, 0, 4));
        for (const int threads : {1, 2, 3, 7}) {
          EXPECT_TRUE(same_bits(decode(one, row, fixed(length, threads)), four))
              << threads << " threads";
        }
      }
    });
  }
}

TEST(Faults, B115_TheLengthHintChangesNoBit) {
  const Scene scene = random_scene(shape(16), {900, 900, 900, 900});
  for_each_row(scene, [&](const std::string& row) {
    for (const PlanOptions& options : {fixed(256), fixed(100), forced_splits(0)}) {
      Scene hinted = scene;
      hinted.max_seq_len = 1024;
      const Output small = decode(hinted, row, options);
      hinted.max_seq_len = 131072;
      hinted.max_query_len = 1000;
      EXPECT_TRUE(same_bits(decode(hinted, row, options), small));
    }
  });
}

TEST(Faults, B114_FixedSplitBitsHoldWithWindowsRanksAndRaggedTokens) {
  testkit::Rng rng(31);
  for (int i = 0; i < 40; ++i) {
    DecodeProblem problem = shape(rng.between(1, 24), rng.between(1, 40));
    problem.kv_lora_rank = 64;
    problem.qk_rope_head_dim = 16;
    problem.causal = !rng.one_in(3);
    if (rng.one_in(2)) problem.sliding_window = rng.between(1, 300);
    if (rng.one_in(3)) problem.kv_format = KvFormat::kE4M3;
    std::vector<std::int64_t> lens, tokens;
    for (int b = 0; b < 6; ++b) {
      lens.push_back(rng.between(0, 700));
      tokens.push_back(rng.between(0, 9));
    }
    Scene scene = random_scene(problem, lens, tokens, static_cast<std::uint64_t>(i + 1));
    if (rng.one_in(2)) scene = shard(scene, 2, rng.below(2), rng.between(1, 9));
    const std::int64_t length = rng.between(1, 200);
    for_each_kernel_row(scene, [&](const std::string& row) {
      const Output batch = decode(scene, row, fixed(length, 3));
      std::int64_t token = 0;
      for (std::size_t b = 0; b < 6; ++b) {
        const Output alone =
            decode(solo(scene, b), row, fixed(length, 1 + static_cast<int>(b) % 2));
        EXPECT_TRUE(same_bits(batch, token, alone, 0, tokens[b]))
            << "case " << i << " request " << b;
        token += tokens[b];
      }
    });
    if (HasFailure()) return;
  }
}

TEST(Faults, ThreadCountsChangeNoBitOfForcedSplits) {
  const Scene scene = random_scene(shape(20), {1, 900, 333}, {2});
  for_each_row(scene, [&](const std::string& row) {
    for (const std::int64_t splits : {1, 2, 4, 50}) {
      const Output one = decode(scene, row, forced_splits(splits, 1));
      for (const int threads : {2, 3, 7}) {
        EXPECT_TRUE(same_bits(decode(scene, row, forced_splits(splits, threads)), one));
      }
    }
  });
}

}  // namespace
}  // namespace mla
