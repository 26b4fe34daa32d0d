// MLA decode with AMX tiles. The tile instructions come from a TileOps type, so that tests can run
// the whole algorithm with emulated ones.
//
//   S^T[16 keys][16 rows] += K[16 keys][32 of D] . Q^T[32 of D][16 rows]   K read in place
//   O[16 rows][16 dims]   += P[16 rows][32 keys] . V[32 keys][16 dims]     V interleaved per tile
//
// A TileOps has 8 tiles of 16 rows x 64 bytes and, for tile numbers known at compile time,
//   zero<T>(), load<T>(memory, stride), store<T>(memory, stride), dot<C, A, B>().
// Constructing it makes the tiles usable on this thread; its destructor gives them back.
//
// Tiles 0-3 accumulate. A pass over a key tile serves up to four groups of 16 rows: then one V tile
// feeds four products, and O, which is larger than L1, is read and written once per 128 keys.
#pragma once

#include <algorithm>

#include "cpu/bf16_softmax.hpp"
#include "cpu/kernel.hpp"

#if defined(MLA_CPU_BF16)

namespace mla::cpu::bf16 {

inline constexpr std::int64_t kAmxBlock = 32;  ///< keys computed together
inline constexpr std::int64_t kAmxStep = 32;   ///< values of D or keys of one product
/// Values of D of q that stay in L1 while the keys of a tile pass.
inline constexpr std::int64_t kScoreChunk = 9 * kAmxStep;
inline constexpr std::int64_t kTileWords = kLanes * kLanes;

/// Where the keys of a tile lie, 16 at a time, as whole rows of padded D values.
struct KeyBlocks {
  const std::byte* base[kKeyTile / kLanes];
  std::int64_t stride[kKeyTile / kLanes];  ///< bytes
};

/// Finds blocks that can be read in place (16 absent keys are: stride 0 over the zero row); copies
/// the others to the scratch.
MLA_TARGET_BF16 inline void find_blocks(const Shape& shape, const Scratch& scratch, Tile* tile,
                                        KeyBlocks* blocks) {
  for (std::int64_t k = tile->begin; k < tile->end; k += kLanes) {
    const std::int64_t b = k / kLanes;
    const std::byte* const* rows = tile->rows + k;
    blocks->base[b] = rows[0];
    blocks->stride[b] = rows[1] - rows[0];
    bool in_place = true;
    for (std::int64_t i = 0; i < kLanes; ++i) {
      in_place &= rows[i] == rows[0] + i * blocks->stride[b];
    }
    if (in_place) continue;
    for (std::int64_t i = 0; i < kLanes; ++i) {
      auto* copy = reinterpret_cast<std::byte*>(scratch.keys + (k + i) * shape.padded);
      if (rows[i] != copy) std::memcpy(copy, rows[i], static_cast<std::size_t>(shape.padded) * 2);
      tile->rows[k + i] = copy;
    }
    blocks->base[b] = tile->rows[k];
    blocks->stride[b] = shape.padded * 2;
  }
}

/// S^T of 32 keys and kGroups (1 or 2) groups over D values [first, first + count).
template <class TileOps, int kGroups>
MLA_TARGET_BF16 void score_block(TileOps& ops, const KeyBlocks& blocks, std::int64_t k,
                                 const std::uint16_t* q, std::int64_t q_stride, std::int64_t first,
                                 std::int64_t count, float* scores) {
  constexpr std::int64_t kRow = kLanes * 4;
  float* const s0 = scores + k * kLanes;
  float* const s1 = s0 + kKeyTile * kLanes;
  if (first == 0) {
    ops.template zero<0>();
    ops.template zero<1>();
    if constexpr (kGroups == 2) ops.template zero<2>();
    if constexpr (kGroups == 2) ops.template zero<3>();
  } else {
    ops.template load<0>(s0, kRow);
    ops.template load<1>(s0 + kTileWords, kRow);
    if constexpr (kGroups == 2) ops.template load<2>(s1, kRow);
    if constexpr (kGroups == 2) ops.template load<3>(s1 + kTileWords, kRow);
  }
  const std::int64_t b = k / kLanes;
  for (std::int64_t d = first; d < first + count; d += kAmxStep) {
    ops.template load<4>(blocks.base[b] + d * 2, blocks.stride[b]);
    ops.template load<6>(q + d * kLanes, kRow);
    ops.template dot<0, 4, 6>();
    ops.template load<5>(blocks.base[b + 1] + d * 2, blocks.stride[b + 1]);
    ops.template dot<1, 5, 6>();
    if constexpr (kGroups == 2) {
      ops.template load<7>(q + q_stride + d * kLanes, kRow);
      ops.template dot<2, 4, 7>();
      ops.template dot<3, 5, 7>();
    }
  }
  ops.template store<0>(s0, kRow);
  ops.template store<1>(s0 + kTileWords, kRow);
  if constexpr (kGroups == 2) ops.template store<2>(s1, kRow);
  if constexpr (kGroups == 2) ops.template store<3>(s1 + kTileWords, kRow);
}

/// S^T of kGroups (1 or 2) groups from `group` on.
template <class TileOps, int kGroups>
MLA_TARGET_BF16 void score_tile(TileOps& ops, const Shape& shape, const Scratch& scratch,
                                const Tile& tile, const KeyBlocks& blocks, std::int64_t group,
                                float* scores) {
  const std::uint16_t* q = scratch.q + group * shape.q_stride;
  for (std::int64_t first = 0; first < shape.padded; first += kScoreChunk) {
    const std::int64_t count = std::min(kScoreChunk, shape.padded - first);
    for (std::int64_t k = tile.begin; k < tile.end; k += kAmxBlock) {
      score_block<TileOps, kGroups>(ops, blocks, k, q, shape.q_stride, first, count, scores);
    }
  }
}

/// p [keys / 2][16 rows][2] to [16 rows][keys].
MLA_TARGET_BF16 inline void transpose_weights(const Tile& tile, const std::uint16_t* p,
                                              std::uint16_t* p_rows) {
  for (std::int64_t k = tile.begin; k < tile.end; k += kAmxStep) {
    transpose_16x16(p + k * kLanes, kLanes * 4, p_rows + k, kKeyTile * 2);
  }
}

/// O is [group][L / 16][16 rows][16 dims]: one contiguous tile per product.
inline float* o_tile(const Shape& shape, const Scratch& scratch, std::int64_t group,
                     std::int64_t dim) {
  return scratch.o + (group * shape.rank + dim) * kLanes;
}

/// O of a group times the rescale factors of the rows whose maximum moved.
MLA_TARGET_BF16 inline void rescale_group(const Shape& shape, const Scratch& scratch,
                                          const RowStates& rows, std::int64_t group) {
  for (std::int64_t r = 0; r < kLanes; ++r) {
    const float factor = rows.rescale[group * kLanes + r];
    if (factor == 1.0F) continue;
    const __m512 factors = _mm512_set1_ps(factor);
    float* at = o_tile(shape, scratch, group, 0) + r * kLanes;
    for (std::int64_t d = 0; d < shape.rank; d += kLanes, at += kTileWords) {
      _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factors));
    }
  }
}

/// Tile kTile of the accumulators of kGroups x kPanels belongs to group kTile / kPanels and panel
/// kTile % kPanels.
template <class TileOps, int kGroups, int kPanels>
struct ValueBlock {
  static constexpr int kTiles = kGroups * kPanels;
  static constexpr std::int64_t kRow = kLanes * 4;

  TileOps& ops;
  float* o;                     ///< tile of the first group and panel
  std::int64_t o_stride;        ///< floats between groups
  const std::uint16_t* p_rows;  ///< [kGroups][16 rows][kKeyTile]
  const std::uint16_t* v;       ///< first panel

  template <int kTile>
  float* o_at() const {
    return o + kTile / kPanels * o_stride + kTile % kPanels * kTileWords;
  }
  template <int kTile = 0>
  MLA_TARGET_BF16 void load_sums() {
    ops.template load<kTile>(o_at<kTile>(), kRow);
    if constexpr (kTile + 1 < kTiles) load_sums<kTile + 1>();
  }
  template <int kTile = 0>
  MLA_TARGET_BF16 void store_sums() {
    ops.template store<kTile>(o_at<kTile>(), kRow);
    if constexpr (kTile + 1 < kTiles) store_sums<kTile + 1>();
  }
  /// Products of keys [k, k + 32). Weights use tiles 4 and 5 in turn, values 6 and 7.
  template <int kTile = 0>
  MLA_TARGET_BF16 void add(std::int64_t k) {
    constexpr int kGroup = kTile / kPanels;
    constexpr int kPanel = kTile % kPanels;
    if constexpr (kPanel == 0) {
      ops.template load<4 + kGroup % 2>(p_rows + kGroup * kLanes * kKeyTile + k, kKeyTile * 2);
    }
    // Up to two panels stay loaded for all groups; four panels serve a single group.
    if constexpr (kGroup == 0) {
      ops.template load<6 + kPanel % 2>(v + kPanel * kPanelStride + k * kLanes, kRow);
    }
    ops.template dot<kTile, 4 + kGroup % 2, 6 + kPanel % 2>();
    if constexpr (kTile + 1 < kTiles) add<kTile + 1>(k);
  }
};

/// O += P V of kGroups groups and kPanels panels of 16 dims from `dim` on.
template <class TileOps, int kGroups, int kPanels>
MLA_TARGET_BF16 void value_block(TileOps& ops, const Shape& shape, const Scratch& scratch,
                                 const Tile& tile, std::int64_t group, std::int64_t dim) {
  static_assert(kGroups * kPanels <= 4 && (kPanels <= 2 || kGroups == 1));
  ValueBlock<TileOps, kGroups, kPanels> block{ops, o_tile(shape, scratch, group, dim),
                                              shape.rank * kLanes, scratch.p_rows,
                                              scratch.v + dim / kLanes * kPanelStride};
  block.load_sums();
  for (std::int64_t k = tile.begin; k < tile.end; k += kAmxStep) block.add(k);
  block.store_sums();
  fetch_ahead(tile.ahead);
}

template <class TileOps, int kGroups>
MLA_TARGET_BF16 void value_tile(TileOps& ops, const Shape& shape, const Scratch& scratch,
                                const Tile& tile, std::int64_t group) {
  constexpr int kPanels = 4 / kGroups;
  std::int64_t d = 0;
  for (; d + kPanels * kLanes <= shape.rank; d += kPanels * kLanes) {
    value_block<TileOps, kGroups, kPanels>(ops, shape, scratch, tile, group, d);
  }
  for (; d < shape.rank; d += kLanes) {
    value_block<TileOps, kGroups, 1>(ops, shape, scratch, tile, group, d);
  }
}

/// The keys whose values are not finite, for exactly the rows that see them.
MLA_TARGET_BF16 inline void add_nonfinite_rows(const Shape& shape, const Scratch& scratch,
                                               const Tile& tile, const RowStates& rows,
                                               std::int64_t group, const std::uint16_t* p_rows) {
  for (std::int64_t n = 0; n < tile.num_nonfinite; ++n) {
    const std::int64_t k = tile.nonfinite[n];
    for (std::int64_t r = 0; r < kLanes; ++r) {
      const std::int64_t i = group * kLanes + r;
      if (tile.first + k < rows.key_begin[i] || tile.first + k >= rows.key_end[i]) continue;
      const float weight = numeric::bf16_to_float(p_rows[r * kKeyTile + k]);
      for (std::int64_t d = 0; d < shape.rank; ++d) {
        std::uint16_t bits;
        std::memcpy(&bits, tile.rows[k] + d * 2, sizeof(bits));
        const std::int64_t slot = panel_slot(d, shape.rank);
        float* at = o_tile(shape, scratch, group, slot / kLanes * kLanes) + r * kLanes;
        at[slot % kLanes] += weight * numeric::bf16_to_float(bits);
      }
    }
  }
}

/// One key tile against kGroups (1, 2 or 4) groups.
template <class TileOps, int kGroups>
MLA_TARGET_BF16 void run_amx_pass(TileOps& ops, const ScoreRule& rule, const Shape& shape,
                                  const Scratch& scratch, const Tile& tile, const KeyBlocks& blocks,
                                  RowStates* rows, std::int64_t group) {
  constexpr std::int64_t kGroupWords = kKeyTile * kLanes;
  bool touched = false;
  for (std::int64_t g = 0; g < kGroups; ++g) touched |= touches(*rows, group + g, tile);
  if (!touched) return;
  for (std::int64_t g = 0; g < kGroups; g += 2) {
    score_tile<TileOps, (kGroups > 1 ? 2 : 1)>(ops, shape, scratch, tile, blocks, group + g,
                                               scratch.scores + g * kGroupWords);
  }
  for (std::int64_t g = 0; g < kGroups; ++g) {
    std::uint16_t* p = scratch.p;
    std::uint16_t* p_rows = scratch.p_rows + g * kGroupWords;
    const bool moved =
        softmax_group(rule, rows, group + g, tile, scratch.scores + g * kGroupWords, p);
    transpose_weights(tile, p, p_rows);
    if (moved) rescale_group(shape, scratch, *rows, group + g);
  }
  value_tile<TileOps, kGroups>(ops, shape, scratch, tile, group);
  if (tile.num_nonfinite == 0) return;
  for (std::int64_t g = 0; g < kGroups; ++g) {
    add_nonfinite_rows(shape, scratch, tile, *rows, group + g, scratch.p_rows + g * kGroupWords);
  }
}

/// out = O / sum.
MLA_TARGET_BF16 inline void store_amx_out(const SplitJob& job, const Shape& shape,
                                          const Scratch& scratch, const RowStates& rows) {
  for (std::int64_t i = 0; i < job.num_rows; ++i) {
    const __m512 sum = _mm512_set1_ps(rows.sum[i]);
    const __mmask16 seen = rows.sum[i] != 0.0F ? 0xFFFF : 0;
    const float* at = o_tile(shape, scratch, i / kLanes, 0) + i % kLanes * kLanes;
    float* out = job.out + i * shape.rank;
    std::int64_t d = 0;
    for (; d + 2 * kLanes <= shape.rank; d += 2 * kLanes, at += 2 * kTileWords) {
      store_panels(_mm512_maskz_div_ps(seen, _mm512_load_ps(at), sum),
                   _mm512_maskz_div_ps(seen, _mm512_load_ps(at + kTileWords), sum), out + d);
    }
    if (d < shape.rank) {
      _mm512_storeu_ps(out + d, _mm512_maskz_div_ps(seen, _mm512_load_ps(at), sum));
    }
  }
}

/// One split with more than a few rows.
template <class TileOps>
MLA_TARGET_BF16 void run_amx_split(const CallView& call, const SplitJob& job, std::byte* memory) {
  const Shape shape = make_shape(call.kv_lora_rank, call.qk_rope_head_dim);
  Scratch scratch;
  carve(shape, memory, &scratch);
  const ScoreRule rule = make_score_rule(call);
  RowStates rows;
  init_rows(job, &rows);
  pack_q(call, job, shape, scratch);
  std::memset(scratch.zeros, 0, static_cast<std::size_t>(shape.padded) * 2);
  std::memset(scratch.o, 0, static_cast<std::size_t>(rows.num_groups * kLanes * shape.rank) * 4);
  TileOps ops;
  Lookahead ahead;
  init_lookahead(call, shape, (rows.num_groups * shape.rank / kLanes + 3) / 4, &ahead);
  Tile tile;
  tile.ahead = &ahead;
  KeyBlocks blocks;
  for (std::int64_t first = job.key_begin / kKeyTile * kKeyTile; first < job.key_end;
       first += kKeyTile) {
    load_tile(call, job, shape, scratch, rows, first, kAmxBlock, shape.padded != shape.dim, &tile);
    find_blocks(shape, scratch, &tile, &blocks);
    std::int64_t group = 0;
    while (group < rows.num_groups) {
      const std::int64_t left = rows.num_groups - group;
      if (left >= 4) {
        run_amx_pass<TileOps, 4>(ops, rule, shape, scratch, tile, blocks, &rows, group);
        group += 4;
      } else if (left >= 2) {
        run_amx_pass<TileOps, 2>(ops, rule, shape, scratch, tile, blocks, &rows, group);
        group += 2;
      } else {
        run_amx_pass<TileOps, 1>(ops, rule, shape, scratch, tile, blocks, &rows, group);
        group += 1;
      }
    }
  }
  store_amx_out(job, shape, scratch, rows);
  store_lse(job, rows);
}

}  // namespace mla::cpu::bf16

#endif  // MLA_CPU_BF16
