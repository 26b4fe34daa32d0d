// Faults that users met: head counts, widths, sinks, sparse lists, and what the table answers.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "support/rows.hpp"
#include "support/scene.hpp"
#include "testkit/rng.hpp"

namespace mla {
namespace {

using namespace test;

void expect_all_rows(const Scene& scene) {
  const Exact right = exact(scene);
  for_each_row(scene,
               [&](const std::string& row) { expect_right(scene, decode(scene, row), right); });
}

TEST(Faults, B66_PlannerAndKernelAgreeForEveryHeadCount) {
  for (const std::int64_t heads : {8, 12, 16, 24, 32, 48, 64, 96, 128}) {
    const Scene scene = random_scene(shape(heads), {1, 64, 777});
    if (heads <= 16) {
      expect_all_rows(scene);
      continue;
    }
    const Exact right = exact(scene);
    for_each_kernel_row(
        scene, [&](const std::string& row) { expect_right(scene, decode(scene, row), right); });
  }
}

TEST(Faults, B67_TwelveHeadsWithAnFP8Cache) {
  expect_all_rows(random_scene(shape(12, 64, KvFormat::kE4M3), {129, 4097}));
}

TEST(Faults, B88_B89_SixteenAndThirtyTwoHeads) {
  expect_all_rows(random_scene(shape(16, 128), {1, 64, 65, 1000}));
  expect_all_rows(random_scene(shape(32), {1, 64, 65, 300}));
  expect_all_rows(random_scene(shape(32, 64, KvFormat::kE4M3), {1, 64, 65, 300}));
}

TEST(Faults, B90_FewHeadsLeaveNoTraceOfPadding) {
  // decode() checks the guard bands on both sides of out and lse.
  for (const std::int64_t heads : {1, 4, 8}) expect_all_rows(random_scene(shape(heads), {5, 300}));
}

TEST(Faults, B91_OnlyTwelveHeadsAreWritten) {
  const Scene scene = random_scene(shape(12), {5, 300});
  for_each_row(scene, [&](const std::string& row) {
    // Heads 12 apart from the next token by a band of 4 rows that must stay as it was.
    Laid laid = lay_out(scene);
    Buffer out(2 * 16 * 512 * 2, 0x5A), lse(2 * 16 * 4, 0x5A);
    laid.tensors.out.data = out.data();
    laid.tensors.out.stride[0] = 16 * 512;
    laid.tensors.lse.data = lse.data();
    laid.tensors.lse.stride[0] = 16;
    run_laid(laid, row);
    EXPECT_TRUE(out.intact() && lse.intact());
    for (std::size_t token = 0; token < 2; ++token) {
      for (std::size_t i = 12 * 512; i < 16 * 512; ++i) {
        ASSERT_EQ(out.as<std::uint16_t>()[token * 16 * 512 + i], 0x5A5A);
      }
      for (std::size_t head = 12; head < 16; ++head) {
        ASSERT_EQ(lse.as<std::uint32_t>()[token * 16 + head], 0x5A5A5A5AU);
      }
    }
    const Output expected = decode(scene, row);
    EXPECT_EQ(std::memcmp(out.data(), expected.out.data(), 12 * 512 * 2), 0);
  });
}

TEST(Faults, B92_HeadCountsBetweenTheTiles) {
  for (const std::int64_t heads : {65, 96, 127}) {
    for (const std::int64_t tokens : {1, 4}) {
      DecodeProblem problem = shape(heads);
      if (tokens > 1) problem.kv_lora_rank = 64;
      const Scene scene = random_scene(problem, {700}, {tokens});
      const Exact right = exact(scene);
      for_each_kernel_row(
          scene, [&](const std::string& row) { expect_right(scene, decode(scene, row), right); });
    }
  }
}

TEST(Faults, B110_SinksJoinTheDenominatorOnce) {
  Scene scene = random_scene(shape(16), {300, 40});
  scene.problem.out_dtype = DType::kF32;
  Scene minus_infinity = scene;
  minus_infinity.sinks.assign(16, -std::numeric_limits<float>::infinity());
  Scene five = scene;
  five.sinks.assign(16, 5.0F);
  for_each_row(scene, [&](const std::string& row) {
    const Output plain = decode(scene, row);
    EXPECT_TRUE(same_bits(decode(minus_infinity, row), plain));
    for (const std::int64_t splits : {1, 4}) {
      PlanOptions options;
      options.num_splits = splits;
      const Output sunk = decode(five, row, options);
      expect_right(five, sunk);
      for (std::int64_t head = 0; head < 16; ++head) {
        const double lse = plain.lse_at(0, head);
        const double share = 1 / (1 + std::exp(5.0 - lse));  // sigmoid(lse - sink)
        for (std::int64_t d = 0; d < 512; d += 7) {
          EXPECT_NEAR(sunk.at(0, head, d), plain.at(0, head, d) * share, 2e-3);
        }
        EXPECT_NEAR(sunk.lse_at(0, head), std::log(std::exp(lse) + std::exp(5.0)), 1e-3);
      }
    }
  });
}

Scene sparse_scene(const DecodeProblem& base, std::int64_t seq_len, std::int64_t width,
                   std::int64_t valid, std::uint64_t seed = 1) {
  DecodeProblem problem = base;
  problem.num_indices = width;
  Scene scene = random_scene(problem, {seq_len, seq_len}, {1}, seed);
  testkit::Rng rng(seed);
  for (Request& request : scene.requests) {
    std::vector<std::int64_t> keys(static_cast<std::size_t>(seq_len));
    std::iota(keys.begin(), keys.end(), 0);
    for (std::int64_t i = 0; i < valid; ++i) {
      std::swap(keys[static_cast<std::size_t>(i)],
                keys[static_cast<std::size_t>(rng.between(i, seq_len - 1))]);
    }
    keys.resize(static_cast<std::size_t>(valid));
    request.indices = {keys};
  }
  return scene;
}

TEST(Faults, B87_EveryPairOfHeadsAndListWidth) {
  DecodeProblem problem = shape(1);
  problem.kv_lora_rank = 64;
  problem.qk_rope_head_dim = 16;
  for (const std::int64_t heads : {8, 16, 32, 64}) {
    problem.num_heads = heads;
    for (const std::int64_t width : {64, 128, 192, 256, 512, 1024, 2048}) {
      const Scene scene =
          sparse_scene(problem, 2500, width, width - 1, static_cast<std::uint64_t>(width));
      const Exact right = exact(scene);
      for_each_kernel_row(
          scene, [&](const std::string& row) { expect_right(scene, decode(scene, row), right); });
    }
  }
}

TEST(Faults, B111_EveryIndexOutsideThePoolIsNoKey) {
  for (const std::int64_t heads : {1, 16}) {
    Scene scene = sparse_scene(shape(heads), 100, 12, 4);
    const std::int64_t pool_tokens = lay_out(scene).tensors.kv_cache.shape[0] * 64;
    for (Request& request : scene.requests) {
      std::vector<std::int64_t>& list = request.indices[0];
      const std::vector<std::int64_t> valid = list;
      list = {kRaw - 1,
              valid[0],
              kRaw + pool_tokens,
              valid[1],
              kRaw + 2147480000,
              valid[2],
              kRaw - 77,
              valid[3],
              kRaw + 2147483647,
              kRaw - 1,
              kRaw + pool_tokens + 63,
              kRaw - 2147483647};
    }
    // exact() counts what is below kRaw / 2: the four real entries.
    for (Request& request : scene.requests) ASSERT_EQ(request.indices[0].size(), 12U);
    Scene four = scene;
    for (Request& request : four.requests) {
      std::erase_if(request.indices[0], [](std::int64_t entry) { return entry > kRaw / 2; });
      ASSERT_EQ(request.indices[0].size(), 4U);
    }
    const Exact right = exact(four);
    for_each_row(scene,
                 [&](const std::string& row) { expect_right(four, decode(scene, row), right); });
  }
}

TEST(Faults, B112_MinusOneAloneBoundsAList) {
  for (const std::int64_t heads : {1, 16}) {
    const Scene padded = sparse_scene(shape(heads), 200, 128, 5);
    Scene exact_width = padded;
    exact_width.problem.num_indices = 5;
    const Exact right = exact(exact_width);
    for_each_row(padded, [&](const std::string& row) {
      expect_right(exact_width, decode(padded, row), right);
      expect_right(exact_width, decode(exact_width, row), right);
    });
  }
}

TEST(Faults, B142_SparseDecodeOfABF16Cache) {
  const Scene scene = sparse_scene(shape(64), 600, 512, 512);
  const Exact right = exact(scene);
  for_each_row(scene,
               [&](const std::string& row) { expect_right(scene, decode(scene, row), right); });
}

TEST(Faults, B130_B136_B140_TheTableAnswersHonestlyPerWidth) {
  const std::int64_t widths[][2] = {{512, 64}, {256, 64}, {512, 0}};
  for (const auto& width : widths) {
    for (const KvFormat kv : {KvFormat::kBF16, KvFormat::kE4M3}) {
      DecodeProblem problem = shape(6, 64, kv);
      problem.kv_lora_rank = width[0];
      problem.qk_rope_head_dim = width[1];
      const Scene scene = random_scene(problem, {75, 100}, {2});
      expect_all_rows(scene);  // whatever answers yes is right
      for (const BackendInfo& row : backends(lay_out(scene).problem)) {
        EXPECT_EQ(plan(lay_out(scene).problem, forced(row.name)).ok(), row.reject_reason.empty())
            << row.name;
      }
    }
  }
}

TEST(Faults, B129_EachInstructionSetRunsItsOwnRow) {
  const Scene scene = random_scene(shape(16), {100});
  for_each_row(scene, [&](const std::string& row) {
    const Result<DecodePlan> made = plan(lay_out(scene).problem, forced(row));
    ASSERT_TRUE(made.ok());
    EXPECT_EQ(made->backend_name(), row);
  });
}

TEST(Faults, B145_EveryRowStaysWithinToleranceStepByStep) {
  // The same growing state through every row; the first wrong step is named.
  const DecodeProblem problem = shape(16);
  const Request history = random_request(problem, 60, 1, 5);
  for (std::int64_t len = 1; len <= 60; ++len) {
    Scene scene = random_scene(problem, {0}, {1}, static_cast<std::uint64_t>(len));
    scene.requests[0].keys.assign(history.keys.begin(), history.keys.begin() + len * 576);
    SCOPED_TRACE("step " + std::to_string(len));
    expect_all_rows(scene);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace mla
