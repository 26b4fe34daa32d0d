// The heads-in-lanes kernel: rows are the lanes of every vector, cached values are only broadcast.
//
//   queries  [group][D][width]        packed once per split, scale folded in
//   tile     [D/16][48 keys + 1][16]  f32 copy of the keys, shared by all groups
//   scores   [48 keys][width]         S^T = K Q^T, then the weights P^T
//   output   [group][L][width]        O^T += V^T P^T
//
// Per tile and group: scores, softmax down the columns (no shuffles), weighted sum. One lane's
// arithmetic is one fixed chain whatever the group's shape, so a row's bits depend on its own keys
// alone. The tile is cut into cache-line blocks so that both products walk memory with constant
// strides.
//
// Included once per target by highway_kernels.cpp.
#if defined(MLA_CPU_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLA_CPU_LANES_INL_H_
#undef MLA_CPU_LANES_INL_H_
#else
#define MLA_CPU_LANES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/convert-inl.h"
#include "cpu/key_tile.hpp"
#include "cpu/softmax-inl.h"

// Both compilers keep a constant-size array of vectors in registers once its loops are unrolled.
#undef MLA_UNROLL
#if defined(__clang__)
#define MLA_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define MLA_UNROLL _Pragma("GCC unroll 32")
#else
#define MLA_UNROLL
#endif

HWY_BEFORE_NAMESPACE();
namespace mla::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr int kVectorRegisters = 32;
#else
inline constexpr int kVectorRegisters = 16;
#endif

/// Width of a group as kVectors vectors of tag D, with its register tiles: keys of a score strip
/// and dims of an output strip. Two-vector tiles halve the broadcasts per multiply-add.
template <class D, int kVectors>
struct Panel {
  using Tag = D;
  using Vec = hn::Vec<D>;
  static constexpr int kVecs = kVectors;
  static constexpr int kVecLanes = static_cast<int>(hn::MaxLanes(D()));
  static constexpr int kWidth = kVectors * kVecLanes;
  static constexpr bool kManyRegisters = kVectorRegisters == 32;
  static constexpr int kStripKeys = kVectors == 2 && !kManyRegisters ? 6 : 12;
  static constexpr int kStripDims =
      kVectors == 2 ? (kManyRegisters ? 8 : 6) : (kManyRegisters ? 16 : 12);
  static_assert(kKeyTile % kStripKeys == 0);
};
using PairPanel = Panel<Wide, 2>;
using OnePanel = Panel<Wide, 1>;
#if HWY_TARGET == HWY_AVX3
using NarrowPanel = Panel<hn::CappedTag<float, 8>, 1>;
inline constexpr GroupWidths kGroupWidths{PairPanel::kWidth, OnePanel::kWidth, NarrowPanel::kWidth};
#else
inline constexpr GroupWidths kGroupWidths{PairPanel::kWidth, OnePanel::kWidth, 0};
#endif
inline constexpr int kMaxGroups = static_cast<int>(kMaxRows) / PairPanel::kWidth + 2;

/// Floats from one 16-value block of the tile to the next. One spare line makes the stride an odd
/// number of lines, so that the blocks of a key spread over all sets of a cache.
inline constexpr int kBlockStride = (kKeyTile + 1) * kBlock;

/// Blocks of one partial dot product. Partial sums shorten the rounding chain of a score, and the
/// queries of so many blocks stay in the L1 while the strips pass.
inline constexpr std::int64_t kScoreBlocks = 4;

/// Products of kStripKeys keys and one group over num_blocks blocks; added to `scores` or stored.
template <class P>
HWY_INLINE void score_strip(const float* HWY_RESTRICT queries, const float* HWY_RESTRICT keys,
                            std::int64_t num_blocks, bool adds, float* HWY_RESTRICT scores) {
  constexpr int kKeys = P::kStripKeys;
  constexpr int kVecs = P::kVecs;
  const typename P::Tag d;
  typename P::Vec acc[kKeys][kVecs];
  MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
    MLA_UNROLL for (int v = 0; v < kVecs; ++v) acc[k][v] = hn::Zero(d);
  }
  for (std::int64_t b = 0; b < num_blocks; ++b, keys += kBlockStride - kBlock) {
    for (int i = 0; i < kBlock; ++i, ++keys, queries += P::kWidth) {
      typename P::Vec q[kVecs];
      MLA_UNROLL for (int v = 0; v < kVecs; ++v) q[v] = hn::Load(d, queries + v * P::kVecLanes);
      MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
        const auto key = hn::Set(d, keys[k * kBlock]);
        MLA_UNROLL for (int v = 0; v < kVecs; ++v) acc[k][v] = hn::MulAdd(key, q[v], acc[k][v]);
      }
    }
  }
  MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
    MLA_UNROLL for (int v = 0; v < kVecs; ++v) {
      float* cell = scores + k * P::kWidth + v * P::kVecLanes;
      hn::Store(adds ? hn::Add(hn::Load(d, cell), acc[k][v]) : acc[k][v], d, cell);
    }
  }
}

/// Raw products of keys [first, last) rounded outwards to strips; all num_blocks blocks.
template <class P>
HWY_NOINLINE void score_tile(const float* queries, const float* tile, std::int64_t num_blocks,
                             int first, int last, LinePrefetcher* prefetcher, float* scores) {
  for (std::int64_t b = 0; b < num_blocks; b += kScoreBlocks) {
    const std::int64_t blocks = std::min(kScoreBlocks, num_blocks - b);
    const float* part = queries + b * kBlock * P::kWidth;
    for (int k = first / P::kStripKeys * P::kStripKeys; k < last; k += P::kStripKeys) {
      prefetcher->step();
      score_strip<P>(part, tile + b * kBlockStride + k * kBlock, blocks, b > 0,
                     scores + k * P::kWidth);
    }
  }
}

/// Which lanes see which keys of a mixed tile: lane r sees [first[r], last[r]).
struct LaneRanges {
  HWY_ALIGN_MAX float first[kMaxRows];
  HWY_ALIGN_MAX float last[kMaxRows];
};

/// Output dims [kFirst, kFirst + kDims) of a superblock: output = rescale * output + sum_k p_k v_k,
/// the sum from 0 so that long contexts accumulate tile by tile. With kMixed, a lane skips the keys
/// it does not see: 0 * NaN would reach it otherwise.
template <class P, int kFirst, int kDims, bool kMixed>
HWY_INLINE void output_strip(const float* HWY_RESTRICT values, const float* HWY_RESTRICT weights,
                             int first, int last, const LaneRanges* ranges,
                             const float* HWY_RESTRICT rescale, float* HWY_RESTRICT output) {
  constexpr int kVecs = P::kVecs;
  const typename P::Tag d;
  typename P::Vec acc[kDims][kVecs];
  MLA_UNROLL for (int i = 0; i < kDims; ++i) {
    MLA_UNROLL for (int v = 0; v < kVecs; ++v) acc[i][v] = hn::Zero(d);
  }
  const float* HWY_RESTRICT value = values + first * kBlock;
  const float* HWY_RESTRICT weight = weights + first * P::kWidth;
  for (int k = first; k < last; ++k, value += kBlock, weight += P::kWidth) {
    typename P::Vec p[kVecs];
    MLA_UNROLL for (int v = 0; v < kVecs; ++v) p[v] = hn::Load(d, weight + v * P::kVecLanes);
    MLA_UNROLL for (int i = 0; i < kDims; ++i) {
      const int dim = kFirst + i;
      const auto x = hn::Set(d, value[dim / kBlock * kBlockStride + dim % kBlock]);
      MLA_UNROLL for (int v = 0; v < kVecs; ++v) {
        const auto sum = hn::MulAdd(x, p[v], acc[i][v]);
        if constexpr (kMixed) {
          const auto key = hn::Set(d, static_cast<float>(k));
          const auto sees = hn::And(hn::Ge(key, hn::Load(d, ranges->first + v * P::kVecLanes)),
                                    hn::Lt(key, hn::Load(d, ranges->last + v * P::kVecLanes)));
          acc[i][v] = hn::IfThenElse(sees, sum, acc[i][v]);
        } else {
          acc[i][v] = sum;
        }
      }
    }
  }
  MLA_UNROLL for (int v = 0; v < kVecs; ++v) {
    const auto factor = hn::Load(d, rescale + v * P::kVecLanes);
    MLA_UNROLL for (int i = 0; i < kDims; ++i) {
      float* cell = output + (kFirst + i) * P::kWidth + v * P::kVecLanes;
      hn::Store(hn::MulAdd(hn::Load(d, cell), factor, acc[i][v]), d, cell);
    }
  }
}

/// kDims dims as strips of nearly equal size, none above P::kStripDims.
template <class P, bool kMixed, int kDims, std::size_t... kStrip, class... Args>
HWY_INLINE void output_strips(std::index_sequence<kStrip...>, Args... args) {
  constexpr int kNum = static_cast<int>(sizeof...(kStrip));
  (output_strip<P, kDims* static_cast<int>(kStrip) / kNum,
                kDims*(static_cast<int>(kStrip) + 1) / kNum -
                    kDims* static_cast<int>(kStrip) / kNum,
                kMixed>(args...),
   ...);
}

template <class P, bool kMixed, int kBlocks, class... Args>
HWY_NOINLINE void output_superblock(Args... args) {
  constexpr int kDims = kBlocks * kBlock;
  constexpr int kNumStrips = (kDims + P::kStripDims - 1) / P::kStripDims;
  output_strips<P, kMixed, kDims>(std::make_index_sequence<kNumStrips>(), args...);
}

/// Blocks of the superblock that strips divide without a remainder: 48 dims for strips of 6 and 12.
inline constexpr int kSuperBlocks = 3;

template <class P, bool kMixed>
HWY_NOINLINE void output_tile(const float* tile, const float* weights, int first, int last,
                              const LaneRanges* ranges, const float* rescale,
                              std::int64_t num_blocks, LinePrefetcher* prefetcher, float* output) {
  std::int64_t b = 0;
  if constexpr (!kMixed && kBlock % P::kStripDims != 0) {
    for (; b + kSuperBlocks <= num_blocks; b += kSuperBlocks) {
      prefetcher->step();
      output_superblock<P, kMixed, kSuperBlocks>(tile + b * kBlockStride, weights, first, last,
                                                 ranges, rescale, output + b * kBlock * P::kWidth);
    }
    if (num_blocks - b == 2) {
      output_superblock<P, kMixed, 2>(tile + b * kBlockStride, weights, first, last, ranges,
                                      rescale, output + b * kBlock * P::kWidth);
      return;
    }
  }
  for (; b < num_blocks; ++b) {
    prefetcher->step();
    output_superblock<P, kMixed, 1>(tile + b * kBlockStride, weights, first, last, ranges, rescale,
                                    output + b * kBlock * P::kWidth);
  }
}

/// State of a split in scratch. Lane arrays are indexed by padded row.
struct LanesState {
  float* queries;       // [lanes][D] in group layout
  float* output;        // [lanes][L] in group layout
  float* tile;          // [D/16][48 + 1][16]
  float* scores;        // [48][widest group]
  float* staging;       // [D] one decoded query
  float* maximum;       // [lanes]
  float* sum;           // [lanes]
  float* rescale;       // [widest group]
  float* slope_log2;    // [lanes]
  float* row_position;  // [lanes] relative to the tile

  LanesState(std::int64_t rank, std::int64_t rope, ScratchCarver* carver)
      : queries(carver->floats(kMaxRows * (rank + rope))),
        output(carver->floats(kMaxRows * rank)),
        tile(carver->floats((rank + rope) / kBlock * kBlockStride)),
        scores(carver->floats(kKeyTile * PairPanel::kWidth)),
        staging(carver->floats(rank + rope)),
        maximum(carver->floats(kMaxRows)),
        sum(carver->floats(kMaxRows)),
        rescale(carver->floats(kMaxRows)),
        slope_log2(carver->floats(kMaxRows)),
        row_position(carver->floats(kMaxRows)) {}
};

/// Queries of a group to [D][width]; lanes without a key-seeing row hold zeros.
HWY_NOINLINE void pack_queries(const CallView& call, const SplitJob& job, const ScoreRule& rule,
                               const RowGroup& group, LanesState* state) {
  const std::int64_t head_dim = call.kv_lora_rank + call.qk_rope_head_dim;
  float* HWY_RESTRICT packed = state->queries + group.first * head_dim;
  for (int r = 0; r < group.width; ++r) {
    const int row_idx = group.first + r;
    const bool used = r < group.count && job.rows[row_idx].key_begin < job.rows[row_idx].key_end;
    const float* HWY_RESTRICT staging = state->staging;
    if (used) {
      decode_query(call, job.rows[row_idx], rule.q_factor, state->staging);
    } else {
      std::memset(state->staging, 0, static_cast<std::size_t>(head_dim) * sizeof(float));
    }
    for (std::int64_t i = 0; i < head_dim; ++i) packed[i * group.width + r] = staging[i];
    state->slope_log2[row_idx] = used ? job.rows[row_idx].alibi_slope * kLog2E : 0.0F;
  }
}

/// f32 copy of the listed keys. Rows up to the next strip are zeroed: strips read them.
HWY_NOINLINE void load_tile(const CallView& call, const KeyTile& keys, float* tile) {
  const std::int64_t head_dim = call.kv_lora_rank + call.qk_rope_head_dim;
  for (int k = 0; k < keys.count; ++k) {
    decode_token(call.kv_format, keys.address[k], head_dim, tile + k * kBlock, kBlockStride);
  }
  const int strip_end = (keys.count + 11) / 12 * 12;
  const auto pad_bytes = static_cast<std::size_t>(strip_end - keys.count) * kBlock * sizeof(float);
  for (std::int64_t b = 0; b < head_dim / kBlock && pad_bytes > 0; ++b) {
    std::memset(tile + b * kBlockStride + keys.count * kBlock, 0, pad_bytes);
  }
}

/// Positions of keys and rows relative to the tile's first key.
inline void alibi_positions(const CallView& call, const SplitJob& job, const KeyTile& keys,
                            float* key_position, float* row_position) {
  const std::int64_t origin = global_position(call.cp, keys.begin);
  for (int k = 0; k < keys.count; ++k) {
    key_position[k] =
        static_cast<float>(global_position(call.cp, keys.begin + keys.offset[k]) - origin);
  }
  for (std::int64_t r = 0; r < job.num_rows; ++r) {
    row_position[r] = static_cast<float>(job.rows[r].position - origin);
  }
}

/// One tile for one group.
template <class P>
HWY_NOINLINE void group_tile(const CallView& call, const SplitJob& job, const ScoreRule& rule,
                             const RowGroup& group, const KeyTile& keys, const float* key_position,
                             const LanesState& state, LinePrefetcher* prefetcher) {
  const typename P::Tag d;
  const std::int64_t rank = call.kv_lora_rank;
  const std::int64_t head_dim = rank + call.qk_rope_head_dim;
  const int first = keys.index_of(group.begin_min);
  const int last = keys.index_of(group.end_max);
  if (first >= last) return;
  // Lanes that nobody reads may do as the others do; only real rows make a tile mixed.
  const bool mixed =
      keys.index_of(group.begin_max) != first || keys.index_of(group.end_min) != last;

  score_tile<P>(state.queries + group.first * head_dim, state.tile, head_dim / kBlock, first, last,
                prefetcher, state.scores);
  if (!rule.plain()) {
    modify_scores(d, rule, first, last, P::kWidth, key_position, state.slope_log2 + group.first,
                  state.row_position + group.first, state.scores);
  }
  LaneRanges ranges;
  if (mixed) {
    for (int r = 0; r < P::kWidth; ++r) {
      const bool real = r < group.count;
      const SplitRow& row = job.rows[group.first + (real ? r : 0)];
      ranges.first[r] = static_cast<float>(keys.index_of(row.key_begin));
      ranges.last[r] = static_cast<float>(real ? keys.index_of(row.key_end) : 0);
    }
    mask_scores(d, first, last, P::kWidth, ranges.first, ranges.last, state.scores);
  }
  online_softmax(d, first, last, P::kWidth, state.scores, state.maximum + group.first,
                 state.sum + group.first, state.rescale);
  float* output = state.output + group.first * rank;
  if (mixed) {
    output_tile<P, true>(state.tile, state.scores, first, last, &ranges, state.rescale,
                         rank / kBlock, prefetcher, output);
  } else {
    output_tile<P, false>(state.tile, state.scores, first, last, nullptr, state.rescale,
                          rank / kBlock, prefetcher, output);
  }
}

/// Normalised rows of a group, transposed back, and their lse.
HWY_NOINLINE void finish_group(const CallView& call, const SplitJob& job, const RowGroup& group,
                               const LanesState& state) {
  const std::int64_t rank = call.kv_lora_rank;
  const float* HWY_RESTRICT output = state.output + group.first * rank;
  float factor[kMaxRows];
  for (int r = 0; r < group.count; ++r) {
    const int row = group.first + r;
    const bool empty = job.rows[row].key_begin >= job.rows[row].key_end || state.sum[row] == 0.0F;
    factor[r] = empty ? 0.0F : 1.0F / state.sum[row];
    job.lse[row] = empty ? kMinusInf : natural_lse(state.maximum[row], state.sum[row]);
  }
  for (std::int64_t b = 0; b < rank; b += kBlock) {
    for (int r = 0; r < group.count; ++r) {
      float* HWY_RESTRICT out = job.out + (group.first + r) * rank + b;
      const float* HWY_RESTRICT column = output + b * group.width + r;
      if (factor[r] == 0.0F) {
        std::memset(out, 0, kBlock * sizeof(float));
        continue;
      }
      for (int i = 0; i < kBlock; ++i) out[i] = column[i * group.width] * factor[r];
    }
  }
}

inline std::size_t lanes_scratch_bytes(std::int64_t rank, std::int64_t rope) {
  ScratchCarver carver(nullptr);
  LanesState state(rank, rope, &carver);
  static_cast<void>(state);
  return carver.used();
}

/// SplitJob with rows in lanes.
void run_lanes(const CallView& call, const SplitJob& job, std::byte* scratch) {
  const ScoreRule rule(call);
  ScratchCarver carver(scratch);
  LanesState state(call.kv_lora_rank, call.qk_rope_head_dim, &carver);
  RowGroup groups[kMaxGroups];
  const int num_groups = make_groups(job, kGroupWidths, groups);
  for (int g = 0; g < num_groups; ++g) {
    pack_queries(call, job, rule, groups[g], &state);
    std::memset(state.output + groups[g].first * call.kv_lora_rank, 0,
                static_cast<std::size_t>(groups[g].width * call.kv_lora_rank) * sizeof(float));
  }
  std::fill(state.maximum, state.maximum + kMaxRows, kNoMaximum);
  std::fill(state.sum, state.sum + kMaxRows, 0.0F);
  std::fill(state.row_position, state.row_position + kMaxRows, 0.0F);

  // Steps that the prefetcher gets per tile, about: score strips and output superblocks.
  const std::int64_t score_blocks = (call.kv_lora_rank + call.qk_rope_head_dim) / kBlock;
  const std::int64_t score_steps =
      (score_blocks + kScoreBlocks - 1) / kScoreBlocks * (kKeyTile / OnePanel::kStripKeys);
  const std::int64_t steps = num_groups * (score_steps + call.kv_lora_rank / kBlock / kSuperBlocks);

  KeyTile tiles[2];
  HWY_ALIGN_MAX float key_position[kKeyTile] = {};
  std::int64_t begin = job.key_begin / kKeyTile * kKeyTile;
  collect_keys(call, job, begin, kKeyTile, &tiles[0]);
  for (int t = 0; begin < job.key_end; begin += kKeyTile, t ^= 1) {
    const KeyTile& keys = tiles[t];
    collect_keys(call, job, begin + kKeyTile, kKeyTile, &tiles[t ^ 1]);
    LinePrefetcher prefetcher(tiles[t ^ 1], token_bytes(call), steps);
    load_tile(call, keys, state.tile);
    if (rule.uses_alibi) alibi_positions(call, job, keys, key_position, state.row_position);
    for (int g = 0; g < num_groups; ++g) {
      const RowGroup& group = groups[g];
      if (group.width == PairPanel::kWidth) {
        group_tile<PairPanel>(call, job, rule, group, keys, key_position, state, &prefetcher);
      } else if (group.width == OnePanel::kWidth) {
        group_tile<OnePanel>(call, job, rule, group, keys, key_position, state, &prefetcher);
      } else {
#if HWY_TARGET == HWY_AVX3
        group_tile<NarrowPanel>(call, job, rule, group, keys, key_position, state, &prefetcher);
#endif
      }
    }
  }
  for (int g = 0; g < num_groups; ++g) finish_group(call, job, groups[g], state);
}

}  // namespace HWY_NAMESPACE
}  // namespace mla::cpu
HWY_AFTER_NAMESPACE();

#endif  // MLA_CPU_LANES_INL_H_
