// The closed form of visibility against the formula of the contract, key by key.
#include "core/visibility.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "core/split.hpp"
#include "mla/sharding.hpp"

namespace mla {
namespace {

/// Global positions of the tokens on one rank, dealt one by one.
std::vector<std::int64_t> dealt(const CpLayout& cp, std::int64_t global_len) {
  std::vector<std::int64_t> tokens;
  for (std::int64_t g = 0; g < global_len; ++g) {
    if ((g / cp.interleave) % cp.world == cp.rank) tokens.push_back(g);
  }
  return tokens;
}

template <class Check>
void for_each_layout(Check check) {
  for (std::int64_t world = 1; world <= 8; ++world) {
    for (std::int64_t rank = 0; rank < world; ++rank) {
      for (std::int64_t interleave = 1; interleave <= 16; ++interleave) {
        check(CpLayout{world, rank, interleave});
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(Visibility, LocalKeysAreTheTokensDealtToTheRank) {
  for_each_layout([](const CpLayout& cp) {
    const std::vector<std::int64_t> tokens = dealt(cp, 130);
    for (std::size_t j = 0; j < tokens.size(); ++j) {
      ASSERT_EQ(global_position(cp, static_cast<std::int64_t>(j)), tokens[j]);
    }
    std::int64_t below = 0;
    for (std::int64_t x = -3; x < 130; ++x) {
      while (below < static_cast<std::int64_t>(tokens.size()) &&
             tokens[static_cast<std::size_t>(below)] < x) {
        ++below;
      }
      ASSERT_EQ(local_keys_below(cp, x), below) << "x " << x;
      ASSERT_EQ(local_seq_len(x, cp.world, cp.rank, cp.interleave), below) << "length " << x;
    }
  });
}

TEST(Visibility, RangesAreTheFormulaKeyByKey) {
  for_each_layout([](const CpLayout& cp) {
    const std::vector<std::int64_t> tokens = dealt(cp, 130);
    for (std::int64_t global_len = 0; global_len < 130; global_len += global_len < 40 ? 1 : 7) {
      const std::int64_t seq_len = local_keys_below(cp, global_len);
      // Rows i of n = 1..8 tokens stand at the positions G - 8 .. G - 1.
      for (std::int64_t p = global_len - 8; p < global_len; ++p) {
        for (std::int64_t window : {0, 1, 5, 64}) {
          for (bool causal : {false, true}) {
            const KeyRange range = visible_keys(cp, seq_len, p, causal, window);
            for (std::int64_t j = 0; j < seq_len; ++j) {
              const std::int64_t g = tokens[static_cast<std::size_t>(j)];
              const bool visible = (!causal || g <= p) && (window == 0 || g > p - window);
              ASSERT_EQ(j >= range.begin && j < range.end, visible)
                  << "W=" << cp.world << " r=" << cp.rank << " I=" << cp.interleave
                  << " G=" << global_len << " p=" << p << " window=" << window
                  << " causal=" << causal << " j=" << j;
            }
          }
        }
      }
    }
  });
}

TEST(Visibility, ARangeNeverLeavesTheKeysOfTheRank) {
  // A local length that is shorter or longer than the global length implies bounds the range all
  // the same.
  for_each_layout([](const CpLayout& cp) {
    for (std::int64_t seq_len : {0, 1, 17}) {
      for (std::int64_t p : {-5, -1, 0, 9, 500}) {
        for (std::int64_t window : {0, 3}) {
          const KeyRange range = visible_keys(cp, seq_len, p, true, window);
          ASSERT_LE(0, range.begin);
          ASSERT_LE(range.begin, range.end);
          ASSERT_LE(range.end, seq_len);
        }
      }
    }
  });
}

TEST(Visibility, RowsOfARequestFollowItsTokens) {
  DecodeProblem problem;
  problem.num_requests = 3;
  problem.num_tokens = 9;
  problem.num_heads = 1;
  const std::int32_t seq_lens[] = {10, 2, 0};
  const std::int32_t starts[] = {0, 3, 7, 8};
  const BatchLengths lengths{seq_lens, starts, nullptr};
  const RequestShape first = request_shape(problem, lengths, 0);
  EXPECT_EQ(first.first_token, 0);
  EXPECT_EQ(first.num_tokens, 3);
  for (std::int64_t i = 0; i < 3; ++i) EXPECT_EQ(token_keys(problem, first, i).end, 8 + i);
  // Four tokens on two keys: the first two rows stand before the sequence and see nothing.
  const RequestShape second = request_shape(problem, lengths, 1);
  EXPECT_TRUE(token_keys(problem, second, 0).empty());
  EXPECT_TRUE(token_keys(problem, second, 1).empty());
  EXPECT_EQ(token_keys(problem, second, 2).end, 1);
  EXPECT_EQ(token_keys(problem, second, 3).end, 2);
  EXPECT_TRUE(token_keys(problem, request_shape(problem, lengths, 2), 0).empty());

  // Without query_start_loc the tokens are dealt evenly.
  const BatchLengths uniform{seq_lens, nullptr, nullptr};
  EXPECT_EQ(request_shape(problem, uniform, 2).first_token, 6);
  EXPECT_EQ(request_shape(problem, uniform, 2).num_tokens, 3);
}

TEST(Visibility, HugeNumbersDoNotOverflow) {
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  const std::int64_t most = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(local_keys_below({1, 0, 1}, huge), huge);
  EXPECT_EQ(local_keys_below({most, most - 1, most}, most), 0);
  EXPECT_EQ(local_keys_below({most, 0, most}, most), most);
  EXPECT_LE(local_keys_below({2, 0, most}, huge), huge);
  EXPECT_EQ(visible_keys({most, 0, most}, most, most - 1, true, most).end, most);
  EXPECT_EQ(local_seq_len(huge, 2, 0, 1), huge / 2 + 1);
}

TEST(Visibility, LocalLengthOutOfRangeArgumentsGiveZero) {
  EXPECT_EQ(local_seq_len(100, 0, 0, 1), 0);
  EXPECT_EQ(local_seq_len(100, 4, -1, 1), 0);
  EXPECT_EQ(local_seq_len(100, 4, 4, 1), 0);
  EXPECT_EQ(local_seq_len(100, 4, 0, 0), 0);
  EXPECT_EQ(local_seq_len(-1, 4, 0, 1), 0);
}

}  // namespace
}  // namespace mla
