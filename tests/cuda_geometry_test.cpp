// Grids, blocks and workspaces of the CUDA rows: host arithmetic, tested without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "cuda/portable/launch.hpp"
#include "cuda/sm90/launch.hpp"

namespace mla {
namespace {

constexpr int kMultiprocessors = 132;

sm90::Geometry geometry(std::int64_t heads, std::int64_t max_query_len, std::int64_t tokens,
                        std::int64_t fixed_split, std::int64_t max_seq_len = 131072) {
  PlanState state;
  state.problem.num_requests = std::min<std::int64_t>(tokens, 64);
  state.problem.max_seq_len = max_seq_len;
  state.problem.num_heads = heads;
  state.problem.max_query_len = max_query_len;
  state.problem.num_tokens = tokens;
  state.options.fixed_split = fixed_split;
  return sm90::make_geometry(state, kMultiprocessors);
}

TEST(Sm90Geometry, BlocksAreAsSmallAsTheRowsOfARequest) {
  EXPECT_EQ(geometry(16, 1, 64, 0).block_rows, 16);
  EXPECT_EQ(geometry(17, 1, 64, 0).block_rows, 32);
  EXPECT_EQ(geometry(33, 1, 64, 0).block_rows, 64);
  EXPECT_EQ(geometry(16, 1'000'000, 1, 0).block_rows, 16);  // one token: the bound over-estimates
  EXPECT_EQ(geometry(16, 1'000'000, 3, 0).block_rows, 64);
}

TEST(Sm90Geometry, LittleToReadIsSharedByManySmallBlocks) {
  EXPECT_EQ(geometry(128, 1, 1, 0, 1024).block_rows, 16);
  EXPECT_EQ(geometry(128, 1, 1, 0, 1024).group, 8);
  EXPECT_EQ(geometry(64, 1, 4, 0, 4096).block_rows, 32);
  EXPECT_EQ(geometry(128, 1, 4, 0, 16384).block_rows, 64);
  // A bound without limit promises nothing.
  EXPECT_EQ(geometry(128, 1, 4, 0, INT64_MAX).block_rows, 64);
  EXPECT_EQ(geometry(16, 1, 4, 0, INT64_MAX).block_rows, 16);
}

TEST(Sm90Geometry, RowsBeyondABlockShareAWorkerAndTheGridFits) {
  for (std::int64_t heads : {64, 65, 128, 129, 512, 4000}) {
    const sm90::Geometry g = geometry(heads, 1, 8, 0);
    EXPECT_EQ(g.group, std::min<std::int64_t>((heads + 63) / 64, 8)) << heads;
    EXPECT_EQ(g.num_ctas, g.num_workers * g.group) << heads;
    EXPECT_LE(g.num_ctas, 132) << heads;
  }
}

TEST(Sm90Geometry, InFixedSplitModeTheKernelDoesNotDependOnTheBatch) {
  for (std::int64_t heads : {1, 8, 16, 128}) {
    for (std::int64_t max_query_len : {1, 2, 4, 8, 1'000'000}) {
      const int alone = geometry(heads, max_query_len, 1, 512).block_rows;
      for (std::int64_t tokens : {2, 3, 64, 4096}) {
        for (std::int64_t keys : {1, 1000, 1'000'000}) {
          EXPECT_EQ(geometry(heads, max_query_len, tokens, 512, keys).block_rows, alone)
              << heads << " heads, at most " << max_query_len << " of " << tokens << " tokens, "
              << keys << " keys";
        }
      }
    }
  }
}

portable::Setup setup(const DecodeProblem& problem, int shared_kilobytes,
                      std::int64_t fixed_split = 0) {
  PlanState state;
  state.problem = problem;
  state.options.fixed_split = fixed_split;
  return portable::make_setup(state, kMultiprocessors, shared_kilobytes * 1024);
}

DecodeProblem decode_problem(std::int64_t heads, std::int64_t tokens,
                             KvFormat format = KvFormat::kBF16) {
  DecodeProblem problem;
  problem.num_requests = tokens;
  problem.num_tokens = tokens;
  problem.num_heads = heads;
  problem.max_seq_len = 131072;
  problem.kv_format = format;
  return problem;
}

constexpr int kSharedClasses[] = {99, 163, 227};  // RTX cards, A100, H100 and B200
constexpr KvFormat kFormats[] = {KvFormat::kBF16, KvFormat::kF16, KvFormat::kE4M3,
                                 KvFormat::kFp8DsMla};

TEST(PortableSetup, NoRowsArePaddedBeyondSixteen) {
  for (const int kilobytes : kSharedClasses) {
    for (const KvFormat format : kFormats) {
      EXPECT_EQ(setup(decode_problem(1, 8, format), kilobytes).geometry.block_rows, 16);
      EXPECT_EQ(setup(decode_problem(16, 8, format), kilobytes).geometry.block_rows, 16);
      EXPECT_EQ(setup(decode_problem(17, 8, format), kilobytes).geometry.block_rows, 32);
    }
  }
}

TEST(PortableSetup, TheLargestBlocksComeWhereTheirRingFits) {
  EXPECT_EQ(setup(decode_problem(128, 8), 227).geometry.block_rows, 64);
  EXPECT_EQ(setup(decode_problem(128, 8), 163).geometry.block_rows, 32);
  EXPECT_EQ(setup(decode_problem(128, 8), 99).geometry.block_rows, 32);
}

TEST(PortableSetup, EveryClassHasARingOfAtLeastTwoTilesThatFits) {
  for (const int kilobytes : kSharedClasses) {
    for (const KvFormat format : kFormats) {
      for (const std::int64_t heads : {1, 16, 32, 64, 128, 1000}) {
        const portable::Setup s = setup(decode_problem(heads, 8, format), kilobytes);
        EXPECT_GE(s.num_stages, 2) << to_string(format) << heads << " heads, " << kilobytes;
        EXPECT_LE(s.num_stages, portable::kMaxStages);
        EXPECT_LE(s.shared_bytes, kilobytes * 1024);
      }
    }
  }
}

TEST(PortableSetup, QueriesWithARestRunInTheSmallestBlocks) {
  for (const KvFormat format : kFormats) {
    DecodeProblem problem = decode_problem(128, 8, format);
    problem.q_dtype = DType::kF16;
    const bool wider_than_the_cache = format == KvFormat::kBF16 || format == KvFormat::kFp8DsMla;
    EXPECT_EQ(setup(problem, 227).geometry.block_rows == 16, wider_than_the_cache)
        << to_string(format);
  }
}

TEST(PortableSetup, ASparseTokenIsARequestOfItsOwn) {
  DecodeProblem problem = decode_problem(16, 64);
  problem.num_requests = 8;
  problem.max_query_len = 8;
  EXPECT_EQ(setup(problem, 227).geometry.block_rows, 64);
  problem.num_indices = 2048;
  EXPECT_EQ(setup(problem, 227).geometry.block_rows, 16);
}

TEST(PortableSetup, InFixedSplitModeTheKernelDoesNotDependOnTheBatch) {
  for (const int kilobytes : kSharedClasses) {
    for (const std::int64_t heads : {1, 8, 16, 128}) {
      for (const std::int64_t max_query_len : {1, 2, 4, 1'000'000}) {
        const auto block_rows = [&](std::int64_t tokens, std::int64_t keys) {
          DecodeProblem problem = decode_problem(heads, tokens);
          problem.max_query_len = max_query_len;
          problem.max_seq_len = keys;
          return setup(problem, kilobytes, 512).geometry.block_rows;
        };
        for (const std::int64_t tokens : {2, 3, 64, 4096}) {
          EXPECT_EQ(block_rows(tokens, tokens * 100), block_rows(1, 1))
              << heads << " heads, at most " << max_query_len << " of " << tokens << " tokens";
        }
      }
    }
  }
}

}  // namespace
}  // namespace mla
