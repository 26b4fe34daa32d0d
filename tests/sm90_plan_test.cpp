// The work division of the sm90 kernels, lane by lane on the host: whatever the batch, every key
// tile of every row block belongs to exactly one piece, and all CTAs agree about what was cut.
#include "warp.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <tuple>

#include "core/diagnostics.hpp"
#include "cuda/line.cuh"
#include "cuda/sm90/traits.cuh"
#include "testkit/rng.hpp"

namespace mla::sm90 {
namespace {

using testkit::Rng;

/// A batch in host memory, as the kernel sees it.
struct Batch {
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> query_start_loc;
  std::vector<std::int32_t> global_lens;
  KernelParams p{};
  bool plain = true;

  std::int32_t num_tokens_of(int b) const { return query_start_loc[b + 1] - query_start_loc[b]; }
};

struct Limits {
  int workers = 12;
  int group = 1;
  bool fixed = false;
};

void finish(Batch& batch, int heads, const Limits& limits) {
  KernelParams& p = batch.p;
  p.seq_lens = batch.seq_lens.data();
  p.query_start_loc = batch.query_start_loc.data();
  p.num_requests = static_cast<std::int32_t>(batch.seq_lens.size());
  p.num_tokens = batch.query_start_loc.back();
  p.num_heads = heads;
  p.page_size = 64;
  p.heads_divisor = FastDivisor(static_cast<std::uint32_t>(heads));
  p.page_divisor = FastDivisor(64);
  p.group_divisor = FastDivisor(static_cast<std::uint32_t>(limits.group));
  p.max_seq_len = INT32_MAX;
  p.query_load = QueryLoad::kFlatBox;
  p.out_stride = {heads * 512, 512};
  p.lse_stride = {heads, 1};
  p.num_workers = limits.workers;
  p.group = limits.group;
  p.piece_overhead = 1;
  p.min_piece = limits.fixed ? INT32_MAX / 2 : 1;
  p.even_slack = limits.fixed ? -1 : 20;
}

/// A piece as one CTA published it.
template <class T>
struct Found {
  int cta;
  Piece<T::kRows> piece;
};

template <class T>
std::vector<Found<T>> pieces_of(const KernelParams& p) {
  std::vector<Found<T>> found;
  for (int cta = 0; cta < p.num_workers * p.group; ++cta) {
    Piece<T::kRows> piece{};
    CutResult<T::kRows> cuts[2]{};
    warp::run([&](int lane) {
      PieceWalk<T> walk(p, cta / p.group, cta % p.group, lane);
      while (true) {
        const bool more = walk.next(piece);
        warp::meet();
        if (!more) return;
        walk.finish(piece, cuts);
        warp::meet();
        if (lane == 0) found.push_back({cta, piece});
        warp::meet();
      }
    });
    EXPECT_EQ(piece.valid, 0) << "CTA " << cta << " ends its queue";
  }
  return found;
}

/// Keys that a row sees, by the formula that the CPU backends and the oracle use.
KeyRange keys_of(const Batch& batch, int b, int token) {
  const KernelParams& p = batch.p;
  const int global = p.global_lens != nullptr ? batch.global_lens[b] : batch.seq_lens[b];
  return visible_keys(p.cp, batch.seq_lens[b], global - batch.num_tokens_of(b) + token, p.causal,
                      p.sliding_window);
}

/// One row block of one request.
struct Block {
  int request, row_begin;
  bool operator<(const Block& other) const {
    return std::tie(request, row_begin) < std::tie(other.request, other.row_begin);
  }
};

template <class T>
void check_rows(const Batch& batch, const Piece<T::kRows>& piece) {
  const KernelParams& p = batch.p;
  const int first_token = batch.query_start_loc[piece.request];
  for (int r = 0; r < piece.num_rows; ++r) {
    const int row = piece.row_begin + r;
    const int token = row / p.num_heads;
    const int head = row % p.num_heads;
    EXPECT_EQ(piece.row_out[r],
              (first_token + token) * p.out_stride.token + head * p.out_stride.head);
    EXPECT_EQ(piece.row_lse[r], (first_token + token) * p.lse_stride.token + head);
    EXPECT_EQ(piece.row_head[r], head);
    const KeyRange keys = keys_of(batch, piece.request, token);
    if (keys.empty()) continue;
    EXPECT_EQ(piece.row_key_end[r], keys.end);
    if (!T::kPlain) {
      EXPECT_EQ(piece.row_key_begin[r], keys.begin);
    }
  }
}

template <class T>
void check_blocks(const Batch& batch, const std::map<Block, std::vector<Found<T>>>& blocks) {
  std::set<int> slots;
  std::set<int> counters;
  for (const auto& [block, pieces] : blocks) {
    KeyRange all{INT32_MAX, 0};
    for (int r = 0; r < pieces[0].piece.num_rows; ++r) {
      const KeyRange keys =
          keys_of(batch, block.request, (block.row_begin + r) / batch.p.num_heads);
      if (keys.empty()) continue;
      all = {std::min(all.begin, keys.begin), std::max(all.end, keys.end)};
    }
    // In the order of workers, which is the order of keys.
    int tile = all.empty() ? -1 : static_cast<int>(all.begin / kTileKeys);
    int rank = 0;
    for (const Found<T>& f : pieces) {
      const Piece<T::kRows>& piece = f.piece;
      if (piece.tile_begin < piece.tile_end) {
        EXPECT_EQ(piece.tile_begin, tile) << "tiles follow each other";
        tile = piece.tile_end;
      }
      EXPECT_EQ(piece.whole != 0, pieces.size() == 1);
      if (piece.whole == 0) {
        EXPECT_EQ(piece.num_pieces, static_cast<int>(pieces.size()));
        EXPECT_EQ(piece.first_cta, pieces[0].cta) << "all name the CTA of the first piece";
        EXPECT_EQ(piece.partial_slot, partial_slot(pieces[0].cta, batch.p.group, rank));
        EXPECT_EQ(piece.partial_slot / 2, f.cta) << "a CTA writes to its own slots";
        EXPECT_TRUE(slots.insert(piece.partial_slot).second) << "a slot has one writer";
      }
      check_rows<T>(batch, piece);
      ++rank;
    }
    if (!all.empty()) {
      EXPECT_EQ(tile, static_cast<int>((all.end + kTileKeys - 1) / kTileKeys))
          << "to the last tile";
    }
    if (pieces.size() > 1) {
      EXPECT_TRUE(counters.insert(pieces[0].cta).second) << "a counter has one result";
    }
  }
}

template <class T>
void check(const Batch& batch) {
  std::map<Block, std::vector<Found<T>>> blocks;
  for (const Found<T>& f : pieces_of<T>(batch.p))
    blocks[{f.piece.request, f.piece.row_begin}].push_back(f);
  std::size_t expected = 0;
  for (int b = 0; b < batch.p.num_requests; ++b) {
    const int rows = batch.num_tokens_of(b) * batch.p.num_heads;
    for (int row = 0; row < rows; row += T::kRows, ++expected) {
      EXPECT_EQ(blocks.count({b, row}), 1U) << "request " << b << ", row " << row;
    }
  }
  EXPECT_EQ(blocks.size(), expected);
  check_blocks<T>(batch, blocks);
}

using Plain16 = Traits<void, 16, 8, 1, true>;
using Plain64 = Traits<void, 64, 8, 1, true>;
using Full64 = Traits<void, 64, 8, 1, false>;

Batch uniform(int requests, int tokens, int keys, int heads, const Limits& limits) {
  Batch batch;
  batch.query_start_loc.push_back(0);
  for (int b = 0; b < requests; ++b) {
    batch.seq_lens.push_back(keys);
    batch.query_start_loc.push_back(batch.query_start_loc.back() + tokens);
  }
  batch.p.causal = true;
  finish(batch, heads, limits);
  return batch;
}

TEST(Sm90Plan, EvenBatchesAreCutIntoEvenParts) {
  for (int requests : {1, 2, 3, 5, 11, 12}) {
    const Batch batch = uniform(requests, 1, 64 * 40, 16, {});
    check<Plain16>(batch);
    const int parts = 12 / requests;
    const int most = (40 + parts - 1) / parts;
    std::map<int, int> tiles;
    for (const auto& f : pieces_of<Plain16>(batch.p)) {
      EXPECT_EQ(tiles.count(f.cta), 0U) << "one piece a worker";
      tiles[f.cta] = f.piece.tile_end - f.piece.tile_begin;
      EXPECT_LE(tiles[f.cta], most) << requests << " requests";
    }
    EXPECT_EQ(static_cast<int>(tiles.size()), requests * ((40 + most - 1) / most));
  }
}

TEST(Sm90Plan, MoreResultsThanWorkersAreSharedOut) {
  for (int requests : {13, 24, 31, 140}) check<Plain16>(uniform(requests, 1, 64 * 9, 16, {}));
}

TEST(Sm90Plan, EquallyLongResultsStayWholeWhereThatIsHardlyUneven) {
  for (int requests : {24, 36, 95, 119, 240}) {
    const Batch batch = uniform(requests, 1, 64 * 9, 16, {});
    check<Plain16>(batch);
    for (const auto& f : pieces_of<Plain16>(batch.p)) EXPECT_NE(f.piece.whole, 0) << requests;
  }
  // Thirteen on twelve workers: whole would take twice as long.
  int cut = 0;
  for (const auto& f : pieces_of<Plain16>(uniform(13, 1, 64 * 40, 16, {}).p))
    cut += f.piece.whole == 0 ? 1 : 0;
  EXPECT_GT(cut, 0);
}

TEST(Sm90Plan, RowBlocksOfAGroupReadTheSameKeys) {
  for (int heads : {64, 65, 128, 200}) {
    for (int group : {1, 2, 4})
      check<Plain64>(uniform(3, 2, 1000, heads, {.workers = 5, .group = group}));
  }
}

TEST(Sm90Plan, FixedSplitCutsNothing) {
  Batch batch = uniform(5, 1, 64 * 30, 16, {.workers = 12, .group = 1, .fixed = true});
  check<Plain16>(batch);
  for (const auto& f : pieces_of<Plain16>(batch.p)) EXPECT_NE(f.piece.whole, 0);
}

TEST(Sm90Plan, EmptyBatchesAndRequestsWithoutKeysOrTokens) {
  Batch batch;
  batch.seq_lens = {0, 700, 0, 64, 1};
  batch.query_start_loc = {0, 1, 1,
                           3, 4, 9};  // the second has no token, the last sees one key with five
  batch.p.causal = true;
  finish(batch, 16, {});
  check<Plain16>(batch);
  check<Plain64>(batch);
}

/// Lengths from nothing to long, few and many requests, ragged queries, windows, context
/// parallelism.
Batch random_batch(Rng& rng, Limits& limits) {
  const auto upto = [&rng](int most) {
    return static_cast<int>(rng.next() % static_cast<std::uint64_t>(most + 1));
  };
  Batch batch;
  const int requests = upto(3) == 0 ? 40 + upto(150) : 1 + upto(12);
  const int longest = upto(1) == 0 ? 300 : 9000;
  const int most_tokens = upto(1) == 0 ? 1 : 5;
  batch.query_start_loc.push_back(0);
  batch.p.cp.world = upto(2) == 0 ? 1 + upto(3) : 1;
  batch.p.cp.rank = batch.p.cp.world > 1 ? upto(static_cast<int>(batch.p.cp.world) - 1) : 0;
  batch.p.cp.interleave = 1 + upto(70);
  batch.p.causal = upto(3) != 0;
  batch.p.sliding_window = upto(2) == 0 ? 1 + upto(500) : 0;
  for (int b = 0; b < requests; ++b) {
    const int global = upto(4) == 0 ? upto(5) : upto(longest);
    batch.global_lens.push_back(global);
    batch.seq_lens.push_back(static_cast<std::int32_t>(local_keys_below(batch.p.cp, global)));
    batch.query_start_loc.push_back(batch.query_start_loc.back() + upto(most_tokens));
  }
  limits.workers = 1 + upto(16);
  limits.group = 1 + upto(2);
  limits.fixed = upto(4) == 0;
  finish(batch, 1 + upto(70), limits);
  if (batch.p.cp.world > 1) batch.p.global_lens = batch.global_lens.data();
  return batch;
}

TEST(Sm90Plan, RandomBatchesAreCoveredOnce) {
  constexpr int kBatches = 100;
  for (std::uint64_t seed = 1; seed <= kBatches; ++seed) {
    Rng rng(seed);
    Limits limits;
    const Batch batch = random_batch(rng, limits);
    SCOPED_TRACE(text("seed ", seed, ": ", batch.p.num_requests, " requests, ", batch.p.num_heads,
                      " heads, ", limits.workers, " workers of ", limits.group));
    check<Full64>(batch);
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace mla::sm90
