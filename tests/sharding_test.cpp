// Ownership of tokens under context parallelism by brute force: tokens dealt one by one. Splitting
// and gathering a cache, token by token.
#include "mla/sharding.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "mla/problem.hpp"
#include "support/rows.hpp"
#include "testkit/rng.hpp"

namespace mla {
namespace {

using test::refused;

constexpr std::int64_t kLongest = 70;

/// Deals positions 0, 1, 2, ... one by one: to the next rank after every `interleave` tokens.
std::vector<LocalToken> dealt(const Sharding& sharding, std::int64_t global_len) {
  std::vector<LocalToken> tokens;
  std::vector<std::int64_t> held(static_cast<std::size_t>(sharding.world), 0);
  std::int64_t rank = 0;
  for (std::int64_t g = 0; g < global_len; ++g) {
    if (g > 0 && g % sharding.interleave == 0) rank = rank + 1 == sharding.world ? 0 : rank + 1;
    tokens.push_back({rank, held[static_cast<std::size_t>(rank)]++});
  }
  return tokens;
}

template <class Check>
void for_each_sharding(Check check) {
  for (std::int64_t world = 1; world <= 8; ++world) {
    for (std::int64_t interleave = 1; interleave <= 16; ++interleave) {
      SCOPED_TRACE(testing::Message() << "W=" << world << " I=" << interleave);
      check(Sharding{world, interleave});
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Sharding, EveryTokenLiesWhereDealingOneByOnePutsIt) {
  for_each_sharding([](const Sharding& sharding) {
    const std::vector<LocalToken> tokens = dealt(sharding, kLongest);
    for (std::int64_t g = 0; g < kLongest; ++g) {
      const LocalToken& expected = tokens[static_cast<std::size_t>(g)];
      const LocalToken found = local_token(sharding, g);
      ASSERT_EQ(found.rank, expected.rank) << g;
      ASSERT_EQ(found.index, expected.index) << g;
      ASSERT_EQ(global_position(sharding, expected), g);
    }
  });
}

TEST(Sharding, LocalLengthsCountTheDealtTokens) {
  for_each_sharding([](const Sharding& sharding) {
    const std::vector<LocalToken> tokens = dealt(sharding, kLongest);
    std::vector<std::int64_t> held(static_cast<std::size_t>(sharding.world), 0);
    for (std::int64_t length = 0; length <= kLongest; ++length) {
      for (std::int64_t rank = 0; rank < sharding.world; ++rank) {
        ASSERT_EQ(local_seq_len(length, sharding.world, rank, sharding.interleave),
                  held[static_cast<std::size_t>(rank)])
            << "rank " << rank << " length " << length;
      }
      if (length < kLongest)
        ++held[static_cast<std::size_t>(tokens[static_cast<std::size_t>(length)].rank)];
    }
  });
}

TEST(Sharding, SlotsAreDistinctDenseAndOnOneRankOnly) {
  for_each_sharding([](const Sharding& sharding) {
    for (const std::int64_t page_size : {1, 2, 3, 7, 16, 64}) {
      const std::vector<std::int32_t> pages = [&] {
        std::vector<std::int32_t> ids;
        for (std::int32_t i = 0; i <= kLongest / page_size; ++i) ids.push_back(1000 - 3 * i);
        return ids;
      }();
      std::vector<std::int64_t> next(static_cast<std::size_t>(sharding.world), 0);
      for (std::int64_t g = 0; g < kLongest; ++g) {
        std::int64_t owners = 0;
        for (std::int64_t rank = 0; rank < sharding.world; ++rank) {
          const std::int64_t slot = shard_slot(sharding, rank, g, page_size, pages.data());
          if (slot == -1) continue;
          ++owners;
          // The rank's tokens fill its pages in order.
          const std::int64_t index = next[static_cast<std::size_t>(rank)]++;
          ASSERT_EQ(slot, pages[static_cast<std::size_t>(index / page_size)] * page_size +
                              index % page_size);
        }
        ASSERT_EQ(owners, 1) << "page size " << page_size << " position " << g;
      }
    }
  });
}

TEST(Sharding, PagesThatHoldWholeChunksAgreeWithVirtualPages) {
  // Where I divides the page size, a server may see a virtual page of page_size * W tokens.
  for_each_sharding([](const Sharding& sharding) {
    const std::int64_t page_size = sharding.interleave * 4;
    const std::vector<std::int32_t> pages = {5, 2,  9,  4,  0,  7,  1,  3,  6,
                                             8, 10, 11, 12, 13, 14, 15, 16, 17};
    for (std::int64_t g = 0; g < kLongest; ++g) {
      const std::int64_t column = g / (page_size * sharding.world);
      const std::int64_t offset = g % (page_size * sharding.world);
      const std::int64_t owner = g / sharding.interleave % sharding.world;
      const std::int64_t local =
          offset / (sharding.interleave * sharding.world) * sharding.interleave +
          offset % sharding.interleave;
      ASSERT_EQ(shard_slot(sharding, owner, g, page_size, pages.data()),
                pages[static_cast<std::size_t>(column)] * page_size + local);
    }
  });
}

TEST(Sharding, B58_LocalLengthsOfOneRank) {
  const std::int64_t lens[] = {1, 6, 9};
  const std::int64_t local[] = {0, 2, 2};
  for (int b = 0; b < 3; ++b) EXPECT_EQ(local_seq_len(lens[b], 4, 1), local[b]);
  for (const std::int64_t interleave : {1, 3, 64}) {
    std::int64_t sum = 0;
    for (std::int64_t rank = 0; rank < 8; ++rank) sum += local_seq_len(1000, 8, rank, interleave);
    EXPECT_EQ(sum, 1000);
  }
}

/// A cache whose every byte is known: random, or a filler.
struct Cache {
  std::vector<unsigned char> bytes;
  std::vector<std::int32_t> table;
  CacheView view;

  /// `tokens[b]` of each request in shuffled pages, with gaps between tokens and pages.
  Cache(DType dtype, std::int64_t width, std::int64_t page_size,
        const std::vector<std::int64_t>& tokens, std::uint64_t seed, bool filler) {
    testkit::Rng rng(seed, 1);
    std::int64_t columns = 1;
    std::int64_t num_pages = 3;
    for (const std::int64_t count : tokens) {
      columns = std::max(columns, count / page_size + 2);
      num_pages += (count + page_size - 1) / page_size;
    }
    std::vector<std::int32_t> ids;
    for (std::int32_t i = 0; i < num_pages; ++i) ids.push_back(i);
    for (std::size_t i = ids.size(); i > 1; --i) {
      std::swap(ids[i - 1], ids[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(i)))]);
    }
    const auto element = static_cast<std::int64_t>(dtype_bytes(dtype));
    const std::int64_t token_stride = width + 16;
    const std::int64_t page_stride = token_stride * page_size + 48;
    bytes.assign(static_cast<std::size_t>(num_pages * page_stride * element), 0xEE);
    if (!filler) {
      for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(rng.below(256));
    }
    table.assign(tokens.size() * static_cast<std::size_t>(columns), -1);
    std::size_t next = 0;
    for (std::size_t b = 0; b < tokens.size(); ++b) {
      for (std::int64_t c = 0; c < (tokens[b] + page_size - 1) / page_size; ++c) {
        table[b * static_cast<std::size_t>(columns) + static_cast<std::size_t>(c)] = ids[next++];
      }
    }
    view.kv_cache = TensorView::contiguous(bytes.data(), dtype, {num_pages, page_size, width});
    view.kv_cache.stride[0] = page_stride;
    view.kv_cache.stride[1] = token_stride;
    view.block_table = TensorView::contiguous(table.data(), DType::kI32,
                                              {static_cast<std::int64_t>(tokens.size()), columns});
  }

  unsigned char* token(std::size_t b, std::int64_t key) {
    const TensorView& kv = view.kv_cache;
    const std::int64_t page = table[b * static_cast<std::size_t>(view.block_table.shape[1]) +
                                    static_cast<std::size_t>(key / kv.shape[1])];
    return bytes.data() + (page * kv.stride[0] + key % kv.shape[1] * kv.stride[1]) *
                              static_cast<std::int64_t>(dtype_bytes(kv.dtype));
  }
  std::size_t token_bytes() const {
    return static_cast<std::size_t>(view.kv_cache.shape[2]) * dtype_bytes(view.kv_cache.dtype);
  }
};

TEST(Sharding, SplitAndGatherMoveEveryTokenOfEveryFormat) {
  const std::vector<std::int64_t> lens = {0, 1, 37, 64, 5};
  const std::vector<std::int32_t> lens32(lens.begin(), lens.end());
  const TensorView lens_view = TensorView::contiguous(lens32.data(), DType::kI32, {5});
  const std::pair<DType, std::int64_t> formats[] = {
      {DType::kBF16, 24}, {DType::kF16, 24}, {DType::kE4M3, 24}, {DType::kU8, 656}};
  for (const auto& [dtype, width] : formats) {
    for (const std::int64_t world : {1, 2, 3, 8}) {
      for (const std::int64_t interleave : {1, 2, 5, 16, 64}) {
        for (const std::int64_t page_size : {1, 6, 16}) {
          const Sharding sharding{world, interleave};
          Cache whole(dtype, width, 8, lens, 7, false);
          Cache restored(dtype, width, 8, lens, 7, true);
          const std::vector<unsigned char> before = whole.bytes;
          for (std::int64_t rank = 0; rank < world; ++rank) {
            std::vector<std::vector<std::int64_t>> positions(lens.size());
            std::vector<std::int64_t> counts;
            for (std::size_t b = 0; b < lens.size(); ++b) {
              const std::vector<LocalToken> tokens = dealt(sharding, lens[b]);
              for (std::size_t g = 0; g < tokens.size(); ++g) {
                if (tokens[g].rank == rank) positions[b].push_back(static_cast<std::int64_t>(g));
              }
              counts.push_back(static_cast<std::int64_t>(positions[b].size()));
            }
            Cache shard(dtype, width, page_size, counts, 8, true);
            const auto gaps =
                static_cast<std::size_t>(std::count(shard.bytes.begin(), shard.bytes.end(), 0xEE));
            ASSERT_EQ(gaps, shard.bytes.size());
            ASSERT_TRUE(split_cache(sharding, rank, whole.view, lens_view, shard.view).ok());
            std::vector<unsigned char> expected(shard.bytes.size(), 0xEE);
            for (std::size_t b = 0; b < lens.size(); ++b) {
              for (std::int64_t j = 0; j < counts[b]; ++j) {
                const std::int64_t g = positions[b][static_cast<std::size_t>(j)];
                std::memcpy(expected.data() + (shard.token(b, j) - shard.bytes.data()),
                            whole.token(b, g), whole.token_bytes());
              }
            }
            ASSERT_EQ(shard.bytes, expected) << "rank " << rank << " of " << world;
            ASSERT_TRUE(gather_cache(sharding, rank, shard.view, lens_view, restored.view).ok());
          }
          ASSERT_EQ(whole.bytes, before);
          for (std::size_t b = 0; b < lens.size(); ++b) {
            for (std::int64_t g = 0; g < lens[b]; ++g) {
              ASSERT_EQ(std::memcmp(restored.token(b, g), whole.token(b, g), whole.token_bytes()),
                        0);
            }
          }
        }
      }
    }
  }
}

TEST(Sharding, BadArgumentsAreOneSentenceAndCopyNothing) {
  const std::vector<std::int64_t> lens = {20};
  std::vector<std::int32_t> lens32 = {20};
  const TensorView lens_view = TensorView::contiguous(lens32.data(), DType::kI32, {1});
  Cache whole(DType::kBF16, 24, 8, lens, 1, false);
  Cache shard(DType::kBF16, 24, 4, {10}, 2, true);
  const std::vector<unsigned char> before = shard.bytes;
  const auto expect = [&](const Status& status, const std::string& sentence) {
    EXPECT_TRUE(refused(status, StatusCode::kInvalidArgument, sentence));
    EXPECT_EQ(shard.bytes, before);
  };
  expect(split_cache({0, 1}, 0, whole.view, lens_view, shard.view),
         "split_cache: world: found 0, needed at least 1");
  expect(split_cache({2, 0}, 0, whole.view, lens_view, shard.view),
         "split_cache: interleave: found 0, needed at least 1");
  expect(gather_cache({2, 1}, 2, shard.view, lens_view, whole.view),
         "gather_cache: rank: found 2, needed 0 to 1");
  CacheView other = shard.view;
  other.kv_cache.dtype = DType::kF16;
  expect(split_cache({2, 1}, 0, whole.view, lens_view, other),
         "split_cache: shard.kv_cache: found f16 tokens of 24 elements, needed bf16 tokens of 24 "
         "elements as "
         "in whole");
  expect(split_cache({1, 1}, 0, whole.view, lens_view, shard.view),
         "split_cache: shard.block_table columns: found 4, needed at least 5 for 20 keys of "
         "request 0");
  shard.table[1] = 99;
  expect(split_cache({2, 1}, 0, whole.view, lens_view, shard.view),
         "split_cache: shard.block_table[0][1]: found 99, needed 0 to 5");
  shard.table[1] = -1;
  expect(split_cache({2, 1}, 0, whole.view, lens_view, shard.view),
         "split_cache: shard.block_table[0][1]: found -1, needed 0 to 5");
  lens32[0] = -4;
  expect(split_cache({2, 1}, 0, whole.view, lens_view, shard.view),
         "split_cache: global_lens[0]: found -4, needed a length from 0");
  lens32[0] = 0;
  CacheView nothing = shard.view;
  nothing.kv_cache.data = nullptr;
  EXPECT_TRUE(split_cache({2, 1}, 0, whole.view, lens_view, nothing).ok());
}

TEST(Sharding, PositionsBeyondTheRangeOfInt32AreFound) {
  const std::int64_t far = std::numeric_limits<std::int32_t>::max() * std::int64_t{1000};
  const LocalToken token = local_token({7, 3}, far);
  EXPECT_EQ(global_position({7, 3}, token), far);
}

}  // namespace
}  // namespace mla
