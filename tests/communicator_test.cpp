// The group over threads: what each collective delivers, and how a group ends.
#include "mla/communicator.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <vector>

#include "support/ranks.hpp"
#include "support/rows.hpp"

namespace mla::test {
namespace {

using std::chrono::milliseconds;

TEST(Communicator, deliversBlocksInRankOrder) {
  for (const int world : {1, 2, 3, 7, 16}) {
    on_ranks(world, [&](Communicator& ranks) {
      const int me = ranks.rank();
      const auto w = static_cast<std::size_t>(world);
      // Many rounds, so that a fast rank would overtake a slow one.
      for (int round = 0; round < 50; ++round) {
        std::vector<std::int32_t> mine(w), theirs(w * w), swapped(w);
        for (int r = 0; r < world; ++r)
          mine[static_cast<std::size_t>(r)] = 1000 * me + 10 * r + round;
        ASSERT_TRUE(ranks.all_gather(mine.data(), theirs.data(), w * 4, nullptr).ok());
        ASSERT_TRUE(ranks.all_to_all(mine.data(), swapped.data(), 4, nullptr).ok());
        for (int r = 0; r < world; ++r) {
          EXPECT_EQ(theirs[static_cast<std::size_t>(r * world + me)], 1000 * r + 10 * me + round);
          EXPECT_EQ(swapped[static_cast<std::size_t>(r)], 1000 * r + 10 * me + round);
        }
        std::vector<float> parts(3 * w), sum(3);
        for (std::size_t i = 0; i < parts.size(); ++i) {
          parts[i] = static_cast<float>(me * 100) + static_cast<float>(i);
        }
        ASSERT_TRUE(ranks.reduce_scatter(parts.data(), sum.data(), 3, nullptr).ok());
        for (int i = 0; i < 3; ++i) {
          const int expected = world * (me * 3 + i) + 100 * world * (world - 1) / 2;
          EXPECT_EQ(sum[static_cast<std::size_t>(i)], static_cast<float>(expected));
        }
      }
    });
  }
}

TEST(Communicator, reportsMismatchedCollectivesOnEveryRank) {
  on_ranks(3, [](Communicator& ranks) {
    std::vector<float> send(64), receive(64);
    const std::size_t bytes = ranks.rank() == 2 ? 8 : 4;
    const char* sentence =
        "communicator: rank 2: found all_gather of 8 bytes, needed all_gather of 4 bytes as on "
        "rank 0";
    EXPECT_TRUE(refused(ranks.all_gather(send.data(), receive.data(), bytes, nullptr),
                        StatusCode::kInvalidArgument, sentence));
    // Nobody is out of step afterwards.
    EXPECT_TRUE(ranks.exchange(send.data(), receive.data(), 4).ok());
  });
}

TEST(Communicator, aRankThatDoesNotArriveEndsTheGroupInTime) {
  const auto begin = std::chrono::steady_clock::now();
  on_ranks(
      4,
      [](Communicator& ranks) {
        std::int32_t mine = 0;
        std::vector<std::int32_t> all(4);
        if (ranks.rank() == 2) {
          // It comes when the others have given up.
          Status late;
          for (int tries = 0; tries < 200 && late.ok(); ++tries) {
            std::this_thread::sleep_for(milliseconds(10));
            if (tries >= 40) late = ranks.exchange(&mine, all.data(), 4);
          }
          EXPECT_EQ(late.code(), StatusCode::kPeer);
          return;
        }
        const char* sentence =
            "exchange: rank 2: found no arrival within 100 ms, needed all 4 ranks";
        EXPECT_TRUE(refused(ranks.exchange(&mine, all.data(), 4), StatusCode::kPeer, sentence));
        EXPECT_TRUE(refused(ranks.exchange(&mine, all.data(), 4), StatusCode::kPeer, sentence));
      },
      milliseconds(100));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST(Communicator, aRankThatLeavesIsNoticedAtOnce) {
  auto ends = make_thread_communicators(2, std::chrono::hours(1));
  ASSERT_TRUE(ends.ok());
  std::thread other([end = std::move((*ends)[1])]() mutable { end.reset(); });
  std::int32_t mine = 0;
  std::vector<std::int32_t> all(2);
  EXPECT_TRUE(refused((*ends)[0]->exchange(&mine, all.data(), 4), StatusCode::kPeer,
                      "communicator: rank 1: found it gone, needed all 2 ranks"));
  other.join();
}

TEST(Communicator, abortGivesItsReasonToEveryRank) {
  on_ranks(
      3,
      [](Communicator& ranks) {
        std::int32_t mine = 0;
        std::vector<std::int32_t> all(3);
        if (ranks.rank() == 1) ranks.abort(Status(StatusCode::kOutOfMemory, "run: out of memory"));
        EXPECT_TRUE(refused(ranks.exchange(&mine, all.data(), 4), StatusCode::kOutOfMemory,
                            "run: out of memory"));
      },
      std::chrono::hours(1));
}

TEST(Communicator, refusesAnEmptyWorld) {
  EXPECT_TRUE(refused(make_thread_communicators(0).status(), StatusCode::kInvalidArgument,
                      "make_thread_communicators: world: found 0, needed at least 1"));
  EXPECT_TRUE(refused(make_thread_communicators(2, milliseconds(0)).status(),
                      StatusCode::kInvalidArgument,
                      "make_thread_communicators: timeout: found 0 ms, needed at least 1 ms"));
}

}  // namespace
}  // namespace mla::test
