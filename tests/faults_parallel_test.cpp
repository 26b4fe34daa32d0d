// Faults that users met: a cache split over context-parallel ranks, simulated in one process, and
// partial results merged.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "support/scene.hpp"

namespace mla {
namespace {

using namespace test;

DecodeProblem f32_output(DecodeProblem problem) {
  problem.out_dtype = DType::kF32;
  return problem;
}

/// Decodes every shard and merges.
Output run_ranks(const Scene& scene, std::int64_t world, std::int64_t interleave,
                 const std::string& row) {
  std::vector<Output> parts;
  for (std::int64_t rank = 0; rank < world; ++rank) {
    parts.push_back(decode(shard(scene, world, rank, interleave), row));
  }
  return merge_outputs(parts, scene.problem.lse_base);
}

TEST(Faults, B20_ShardsOfDifferentMassMergeInTheDocumentedBase) {
  for (const LseBase base : {LseBase::kE, LseBase::kTwo}) {
    DecodeProblem problem = f32_output(shape(16));
    problem.lse_base = base;
    Scene scene = random_scene(problem, {1024});
    std::vector<float>& keys = scene.requests[0].keys;
    for (std::size_t i = 0; i < keys.size(); ++i)
      keys[i] *= 0.5F * static_cast<float>(1 + i / 576 / 256);
    const Exact right = exact(scene);
    for_each_row(scene, [&](const std::string& row) {
      const Output merged = run_ranks(scene, 4, 256, row);
      expect_right(scene, merged, right);
      EXPECT_LT(relative_error(merged, decode(scene, row)), 4e-3);
    });
  }
}

TEST(Faults, B21_PrefixAndSuffixMergeToOnePass) {
  const Scene whole = random_scene(f32_output(shape(16)), {3136}, {2});
  Scene prefix = whole;
  prefix.problem.causal = false;
  prefix.requests[0].keys.resize(3072 * 576);
  Scene suffix = whole;
  suffix.requests[0].keys.erase(suffix.requests[0].keys.begin(),
                                suffix.requests[0].keys.begin() + 3072 * 576);
  const Exact right = exact(whole);
  for_each_row(whole, [&](const std::string& row) {
    const Output merged = merge_outputs({decode(prefix, row), decode(suffix, row)});
    EXPECT_LT(relative_error(merged, right.out), 3e-3);
    expect_right(whole, merged, right);
  });
}

TEST(Faults, B57_RanksWithoutKeysAreTheIdentity) {
  const Scene scene = random_scene(f32_output(shape(16)), {5});
  for_each_row(scene, [&](const std::string& row) {
    for (std::int64_t rank = 5; rank < 8; ++rank) {
      const Output part = decode(shard(scene, 8, rank, 1), row);
      for (std::int64_t head = 0; head < 16; ++head) {
        EXPECT_EQ(part.lse_at(0, head), -std::numeric_limits<float>::infinity());
        for (std::int64_t d = 0; d < 512; ++d) EXPECT_EQ(part.at(0, head, d), 0.0);
      }
    }
    expect_right(scene, run_ranks(scene, 8, 1, row));
  });
}

TEST(Faults, B60_EightRanksAreAsExactAsOne) {
  DecodeProblem problem = f32_output(shape(64));
  problem.kv_lora_rank = 128;
  problem.qk_rope_head_dim = 32;
  for (std::int64_t step = 0; step < 4; ++step) {
    const Scene scene =
        random_scene(problem, {1500 + step * 37}, {1}, static_cast<std::uint64_t>(step + 1));
    const Exact right = exact(scene);
    for_each_row(scene, [&](const std::string& row) {
      const double one = relative_error(decode(scene, row), right.out);
      const double eight = relative_error(run_ranks(scene, 8, 64, row), right.out);
      EXPECT_LE(eight, 2 * one + 1e-6) << "length " << scene.seq_len(0);
    });
  }
}

TEST(Faults, B59_CausalRaggedTokensOverRanksAreRight) {
  // Every mode of the formula together: tokens, window, soft cap, ALiBi, base 2.
  DecodeProblem problem = f32_output(shape(5, 16));
  problem.lse_base = LseBase::kTwo;
  problem.sliding_window = 90;
  problem.logits_soft_cap = 20;
  Scene scene = random_scene(problem, {100, 3, 217}, {3, 1, 5});
  scene.alibi_slopes = {0.5F, 0.25F, 0.1F, 0.05F, 0.01F};
  const Exact right = exact(scene);
  for (const std::int64_t world : {2, 3, 8}) {
    for (const std::int64_t interleave : {1, 16}) {
      for_each_row(scene, [&](const std::string& row) {
        expect_right(scene, run_ranks(scene, world, interleave, row), right);
        const Scene part = shard(scene, world, world - 1, interleave);
        expect_right(part, decode(part, row));
      });
    }
  }
}

TEST(Faults, B61_ARankWithoutSelectedTokensDoesNotPoisonTheMerge) {
  DecodeProblem problem = f32_output(shape(16));
  problem.num_indices = 8;
  Scene owner = random_scene(problem, {100}, {2});
  for (Request& request : owner.requests) {
    request.indices = {{3, 99, 4, 17, 50, 51, 0, 64}, {9, kRaw - 1, 11, kRaw - 1, 12, 60, 61, 62}};
  }
  Scene other = random_scene(problem, {64}, {2}, 9);
  other.requests[0].query = owner.requests[0].query;
  other.requests[0].indices.assign(2, std::vector<std::int64_t>(8, kRaw - 1));
  for_each_row(owner, [&](const std::string& row) {
    const Output first = decode(owner, row);
    expect_right(owner, first);
    Output second = decode(other, row);
    for (std::int64_t token = 0; token < 2; ++token) {
      for (std::int64_t head = 0; head < 16; ++head) {
        EXPECT_EQ(second.lse_at(token, head), -std::numeric_limits<float>::infinity());
        EXPECT_EQ(second.at(token, head, 100), 0.0);
      }
    }
    EXPECT_TRUE(same_bits(merge_outputs({first, second}), first));
    std::fill(second.out.begin(), second.out.end(), std::byte{0xFF});  // NaN
    EXPECT_TRUE(same_bits(merge_outputs({first, second}), first));
  });
}

TEST(Faults, B110_ASinkBelongsToOneRank) {
  Scene scene = random_scene(f32_output(shape(16)), {200});
  scene.sinks.assign(16, 1.5F);
  const Exact right = exact(scene);
  for_each_row(scene, [&](const std::string& row) {
    std::vector<Output> parts;
    for (std::int64_t rank = 0; rank < 4; ++rank) {
      Scene part = shard(scene, 4, rank, 16);
      if (rank > 0) part.sinks.clear();
      parts.push_back(decode(part, row));
    }
    expect_right(scene, merge_outputs(parts), right);
  });
}

}  // namespace
}  // namespace mla
