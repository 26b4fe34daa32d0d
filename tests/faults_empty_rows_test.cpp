// Faults that users met: rows without keys, padding, dirty tails. Each test is a small input of the
// catalogue (docs/faults-covered.md) with the right behaviour, on every row of the backend table.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "support/scene.hpp"

namespace mla {
namespace {

using namespace test;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

void expect_empty(const Output& output, std::int64_t token) {
  for (std::int64_t head = 0; head < output.heads; ++head) {
    EXPECT_EQ(output.lse_at(token, head), kMinusInfinity) << "token " << token;
    for (std::int64_t d = 0; d < output.rank; ++d) {
      ASSERT_EQ(output.at(token, head, d), 0.0) << "token " << token << " head " << head;
    }
  }
}

TEST(Faults, B01_AZeroLengthRowOfAPaddedStepStaysAlone) {
  const Scene scene = random_scene(shape(16, 16), {5, 9, 17, 0});
  for_each_row(scene, [&](const std::string& row) {
    const Output batch = decode(scene, row);
    EXPECT_TRUE(batch.finite());
    expect_right(scene, batch);
    expect_empty(batch, 3);
    for (std::size_t b = 0; b < 3; ++b) {
      const Output alone = decode(solo(scene, b), row);
      expect_right(solo(scene, b), alone);
    }
  });
}

TEST(Faults, B02_EmptyRowsDoNotDependOnTheLengthHint) {
  const Scene scene = random_scene(shape(128), {512, 512, 512, 512, 512, 0, 0, 0});
  const Exact right = exact(scene);
  for_each_row(scene, [&](const std::string& row) {
    Output outputs[2];
    for (int hint = 0; hint < 2; ++hint) {
      Scene hinted = scene;
      hinted.max_seq_len = hint == 0 ? 1024 : 163840;
      Laid laid = lay_out(hinted);
      auto* out = laid.out.as<std::uint16_t>();
      std::fill(out, out + laid.out.size() / 2, std::uint16_t{0x40E0});  // 7.0
      outputs[hint] = run_laid(laid, row);
      for (std::int64_t token = 5; token < 8; ++token) expect_empty(outputs[hint], token);
    }
    expect_right(scene, outputs[0], right);
    EXPECT_TRUE(same_bits(outputs[0], outputs[1]));
  });
}

TEST(Faults, B03_RowsWithoutKeysOverwriteTheNaNOfTheBuffer) {
  const Scene scene = random_scene(shape(128), {7, 0});
  for_each_row(scene, [&](const std::string& row) {
    const Output output = decode(scene, row);  // the buffer holds NaN before
    EXPECT_TRUE(output.finite());
    expect_empty(output, 1);
  });
}

TEST(Faults, B04_AllLengthsZeroWithoutTableOrPool) {
  Scene scene = random_scene(shape(16), std::vector<std::int64_t>(16, 0));
  scene.extra_pages = scene.extra_columns = 0;
  for_each_row(scene, [&](const std::string& row) {
    for (const bool null : {false, true}) {
      Laid laid = lay_out(scene);
      ASSERT_EQ(laid.tensors.block_table.shape[1], 0);
      ASSERT_EQ(laid.tensors.kv_cache.shape[0], 0);
      if (null) laid.tensors.block_table.data = laid.tensors.kv_cache.data = nullptr;
      const Output output = run_laid(laid, row);
      for (std::int64_t token = 0; token < 16; ++token) expect_empty(output, token);
    }
  });
}

TEST(Faults, B05_PlanningWithoutWorkGivesNoWork) {
  for (const std::size_t requests : {std::size_t{32}, std::size_t{1}}) {
    Scene scene = random_scene(shape(16), std::vector<std::int64_t>(requests, 0));
    scene.max_seq_len = 4096;
    for_each_row(scene, [&](const std::string& row) {
      PlanOptions options;
      options.backend = row;
      const Result<DecodePlan> made = plan(lay_out(scene).problem, options);
      ASSERT_TRUE(made.ok());
      const std::vector<std::int32_t> lens(requests, 0);
      const Result<std::vector<Split>> dealt = splits(*made, lens.data());
      ASSERT_TRUE(dealt.ok());
      for (const Split& split : *dealt) {
        EXPECT_EQ(split.key_begin, split.key_end);
        EXPECT_EQ(split.partial, -1);
      }
    });
  }
}

TEST(Faults, B06_AChunkWithoutKeysLeavesTheMergeAlone) {
  DecodeProblem problem = shape(16);
  problem.causal = false;
  problem.out_dtype = DType::kF32;
  const Scene first = random_scene(problem, {256, 256});
  Scene second = random_scene(problem, {256, 0}, {1}, 2);
  for (std::size_t b = 0; b < 2; ++b) second.requests[b].query = first.requests[b].query;
  for_each_row(first, [&](const std::string& row) {
    const Output pass1 = decode(first, row);
    const Output pass2 = decode(second, row);
    expect_empty(pass2, 1);
    const Output merged = merge_outputs({pass1, pass2});
    EXPECT_TRUE(same_bits(merged, 1, pass1, 1));
    Scene whole = first;
    whole.requests[0].keys.insert(whole.requests[0].keys.end(), second.requests[0].keys.begin(),
                                  second.requests[0].keys.end());
    expect_right(whole, merged);
  });
}

TEST(Faults, B07_RowsWithoutKeysHaveMinusInfinity) {
  std::vector<std::int64_t> lens(64, 64);
  for (std::size_t b = 1; b < 64; b += 2) lens[b] = 0;
  DecodeProblem problem = shape(16);
  problem.causal = false;
  const Scene scene = random_scene(problem, lens);
  for_each_row(scene, [&](const std::string& row) {
    const Output output = decode(scene, row);
    expect_right(scene, output);
    for (std::int64_t token = 1; token < 64; token += 2) expect_empty(output, token);
  });
}

TEST(Faults, B09_APageNobodyOwnsMayHoldNaN) {
  Scene scene = random_scene(shape(16), {65, 3});
  scene.requests[0].pages = {5, 2};
  scene.requests[1].pages = {7};
  scene.extra_pages = 4;
  for_each_row(scene, [&](const std::string& row) {
    Output outputs[2];
    for (int zeroed = 0; zeroed < 2; ++zeroed) {
      Laid laid = lay_out(scene);
      auto* table = laid.table.as<std::int32_t>();
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t column = b == 0 ? 2 : 1; column < laid.tensors.block_table.shape[1];
             ++column) {
          table[b * laid.tensors.block_table.stride[0] + column] = 0;
        }
      }
      if (zeroed != 0) std::memset(laid.kv.data(), 0, 64 * 576 * 2);
      outputs[zeroed] = run_laid(laid, row);
    }
    EXPECT_TRUE(outputs[0].finite());
    expect_right(scene, outputs[0]);
    EXPECT_TRUE(same_bits(outputs[0], outputs[1]));
  });
}

/// Same bits whatever the slots behind the last key hold.
void expect_tail_is_never_read(const Scene& scene, const std::vector<std::uint16_t>& patterns) {
  const Exact right = exact(scene);
  for_each_row(scene, [&](const std::string& row) {
    Output first;
    for (const std::uint16_t pattern : patterns) {
      Laid laid = lay_out(scene);
      // lay_out marks everything without an owner with 0xFF bytes; no stored number has them.
      auto* words = laid.kv.as<std::uint16_t>();
      for (std::size_t i = 0; i < laid.kv.size() / 2; ++i) {
        if (words[i] == 0xFFFF) words[i] = pattern;
      }
      const Output output = run_laid(laid, row);
      EXPECT_TRUE(output.finite()) << std::hex << pattern;
      if (pattern == patterns[0]) {
        expect_right(scene, output, right);
        first = output;
      }
      EXPECT_TRUE(same_bits(output, first)) << std::hex << pattern;
    }
  });
}

TEST(Faults, B12_DirtyTailOfLastPageIsNeverRead) {
  for (std::int64_t len = 1; len <= 16; ++len) {
    // NaN, NaN, +-infinity, the largest number, 0.
    expect_tail_is_never_read(random_scene(shape(16, 4), {len}),
                              {0xFFFF, 0x7FC0, 0x7F80, 0xFF80, 0x7F7F, 0x0000});
  }
  for (std::int64_t len : {31, 33, 50}) {
    expect_tail_is_never_read(random_scene(shape(3, 64), {len}), {0xFFFF, 0x7F80, 0x0000});
    expect_tail_is_never_read(random_scene(shape(3, 64, KvFormat::kF16, DType::kF16), {len}),
                              {0xFFFF, 0x7C00, 0x7BFF, 0x0000});
  }
}

TEST(Faults, B13_RecycledFP8PagesMayHoldNaNCodes) {
  for (const std::int64_t heads : {1, 16}) {
    expect_tail_is_never_read(random_scene(shape(heads, 64, KvFormat::kE4M3), {33}),
                              {0xFFFF, 0x7F7F, 0x7FFF, 0x7E7E, 0x0000});
    expect_tail_is_never_read(random_scene(shape(heads, 64, KvFormat::kFp8DsMla), {33}),
                              {0xFFFF, 0x7F7F, 0x7F80, 0x0000});
  }
}

}  // namespace
}  // namespace mla
