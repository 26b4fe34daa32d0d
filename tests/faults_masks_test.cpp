// Faults that users met: causal masks, windows, several and uneven tokens per request.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "support/scene.hpp"

namespace mla {
namespace {

using namespace test;

/// With zero queries exp(lse) is the number of keys that a row sees.
void expect_visible(const Output& output, std::int64_t token, std::int64_t count) {
  for (std::int64_t head = 0; head < output.heads; ++head) {
    EXPECT_NEAR(output.lse_at(token, head), std::log(static_cast<double>(count)), 1e-3)
        << "token " << token << " head " << head;
  }
}

TEST(Faults, B46_TheLastKeyReachesTheLastRowOnly) {
  for (const KvFormat kv : {KvFormat::kBF16, KvFormat::kF16}) {
    Scene scene = with_zero_queries(random_scene(shape(16, 64, kv), {64}, {8}));
    for (std::size_t d = 0; d < 512; ++d) scene.requests[0].keys[63 * 576 + d] = 1e3F;
    for_each_row(scene, [&](const std::string& row) {
      const Output output = decode(scene, row);
      for (std::int64_t head = 0; head < 16; ++head) {
        for (std::int64_t d = 0; d < 512; ++d) {
          for (std::int64_t token = 0; token < 7; ++token)
            ASSERT_LT(output.at(token, head, d), 5.0);
          ASSERT_GT(output.at(7, head, d), 10.0);
        }
      }
    });
  }
}

TEST(Faults, B47_TheCausalFlagChangesTheRowsItMust) {
  const Scene causal = random_scene(shape(8), {64}, {2});
  Scene open = causal;
  open.problem.causal = false;
  for_each_row(causal, [&](const std::string& row) {
    const Output a = decode(causal, row);
    const Output b = decode(open, row);
    expect_right(causal, a);
    expect_right(open, b);
    EXPECT_FALSE(same_bits(a, 0, b, 0));
    EXPECT_TRUE(same_bits(a, 1, b, 1));
  });
}

TEST(Faults, B48_RowTSeesTheRightKeysOfAnFP8Cache) {
  for (const std::int64_t tokens : {2, 3, 4}) {
    const Scene small = random_scene(shape(128, 64, KvFormat::kE4M3), {100}, {tokens});
    for_each_row(small, [&](const std::string& row) { expect_right(small, decode(small, row)); });
    const Scene large =
        with_zero_queries(random_scene(shape(128, 64, KvFormat::kE4M3), {1024}, {tokens}));
    for_each_kernel_row(large, [&](const std::string& row) {
      const Output output = decode(large, row);
      for (std::int64_t t = 0; t < tokens; ++t) expect_visible(output, t, 1024 - tokens + t + 1);
    });
  }
}

TEST(Faults, B49_TwoTokensOnTopOfACache) {
  const Scene scene = with_zero_queries(random_scene(shape(16), {7}, {2}));
  for_each_row(scene, [&](const std::string& row) {
    const Output output = decode(scene, row);
    expect_visible(output, 0, 6);
    expect_visible(output, 1, 7);
  });
}

TEST(Faults, B50_NonCausalRowsStopAtTheLength) {
  for (const std::int64_t heads : {1, 16}) {
    Scene scene = with_zero_queries(random_scene(shape(heads, 16), {100}));
    scene.problem.causal = false;
    for_each_row(scene, [&](const std::string& row) {
      const Output output = decode(scene, row);
      expect_right(scene, output);  // the plain mean of the 100 values
      expect_visible(output, 0, 100);
    });
  }
}

TEST(Faults, B52_OneTableRowServesAllTokensOfARequest) {
  const Scene scene = random_scene(shape(4, 16), {10, 20}, {3});
  for_each_row(scene, [&](const std::string& row) {
    Laid laid = lay_out(scene);
    ASSERT_EQ(laid.tensors.block_table.shape[0], 2);
    expect_right(scene, run_laid(laid, row));
    const Output counts = decode(with_zero_queries(scene), row);
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t t = 0; t < 3; ++t)
        expect_visible(counts, b * 3 + t, (b + 1) * 10 - 3 + t + 1);
    }
  });
}

TEST(Faults, B53_FourTokensEqualFourSingleTokenRuns) {
  std::vector<std::int64_t> lens;
  for (std::int64_t len = 500; len <= 4000; len += 500) lens.push_back(len);
  const Scene scene = random_scene(shape(16, 64, KvFormat::kE4M3), lens, {4});
  for_each_kernel_row(scene, [&](const std::string& row) {
    const Output all = decode(scene, row);
    for (std::int64_t t = 0; t < 4; ++t) {
      Scene step = scene;
      for (std::size_t b = 0; b < lens.size(); ++b) {
        Request& request = step.requests[b];
        request.num_tokens = 1;
        request.keys.resize(static_cast<std::size_t>((lens[b] - 3 + t) * 576));
        const auto query = scene.requests[b].query.begin() + t * 16 * 576;
        request.query.assign(query, query + 16 * 576);
      }
      const Output one = decode(step, row);
      double error = 0, norm = 0;
      for (std::int64_t b = 0; b < 8; ++b) {
        for (std::int64_t head = 0; head < 16; ++head) {
          EXPECT_NEAR(one.lse_at(b, head), all.lse_at(b * 4 + t, head), 1e-3);
          for (std::int64_t d = 0; d < 512; ++d) {
            error += std::pow(one.at(b, head, d) - all.at(b * 4 + t, head, d), 2);
            norm += std::pow(one.at(b, head, d), 2);
          }
        }
      }
      EXPECT_LT(std::sqrt(error / norm), 8e-3);
    }
  });
}

TEST(Faults, B54_UnevenTokensInOneCall) {
  const Scene scene = random_scene(shape(2), {50, 9, 50, 300}, {2, 1, 2, 300});
  const Exact right = exact(scene);
  for_each_row(scene, [&](const std::string& row) {
    expect_right(scene, decode(scene, row), right);
    for (std::size_t b = 0; b < 3; ++b) expect_right(solo(scene, b), decode(solo(scene, b), row));
  });
}

TEST(Faults, B55_TheFirstOfTwoTokensEqualsASingleOne) {
  for (const std::int64_t heads : {1, 2, 16, 20}) {
    const Scene two = random_scene(shape(heads), {50}, {2});
    Scene one = two;
    one.requests[0].num_tokens = 1;
    one.requests[0].keys.resize(49 * 576);
    one.requests[0].query.resize(static_cast<std::size_t>(heads) * 576);
    for_each_row(two, [&](const std::string& row) {
      const Output first = decode(one, row);
      Output both = decode(two, row);
      expect_right(one, first);
      both.out.resize(first.out.size());
      both.lse.resize(first.lse.size());
      expect_right(one, both);
    });
  }
}

TEST(Faults, B107_OutputsOfSeveralTokensKeepTheirRank) {
  const Scene scene = random_scene(shape(3), {10, 20}, {3});
  for_each_row(scene, [&](const std::string& row) {
    Laid laid = lay_out(scene);
    EXPECT_EQ(laid.tensors.out.shape[0], 6);
    expect_right(scene, run_laid(laid, row));
  });
  Scene uniform = scene;
  uniform.uniform = true;  // without query_start_loc
  for_each_row(uniform, [&](const std::string& row) {
    EXPECT_TRUE(same_bits(decode(uniform, row), decode(scene, row)));
  });
}

TEST(Faults, B137_AnyMixOfTokenCounts) {
  const Scene scene = random_scene(shape(8), {20, 64, 65, 100, 2}, {1, 4, 8, 16, 2});
  for_each_row(scene, [&](const std::string& row) { expect_right(scene, decode(scene, row)); });
}

TEST(Faults, B141_AWindowShowsExactlyTheLastKeys) {
  for (const std::int64_t tokens : {1, 3}) {
    DecodeProblem problem = shape(4);
    problem.sliding_window = 128;
    const std::vector<std::int64_t> lens{100, 128, 129, 5000};
    const Scene scene = random_scene(problem, lens, {tokens});
    for_each_row(scene, [&](const std::string& row) {
      expect_right(scene, decode(scene, row));
      const Output counts = decode(with_zero_queries(scene), row);
      for (std::int64_t b = 0; b < 4; ++b) {
        for (std::int64_t t = 0; t < tokens; ++t) {
          const std::int64_t seen = lens[static_cast<std::size_t>(b)] - tokens + t + 1;
          expect_visible(counts, b * tokens + t, std::min<std::int64_t>(128, seen));
        }
      }
    });
  }
}

}  // namespace
}  // namespace mla
