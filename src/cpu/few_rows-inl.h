// The few-row kernel: bound by memory, so cached values are decoded in registers and are the lanes
// of both products.
//
// Per absolute chunk of 8 keys: dot products of a few (row, key) pairs at once, softmax over the 8
// positions, then output += p_k c_k with a piece of the output in registers; the second reading of
// the chunk hits the L1. Products of a chunk take turns with output of the one before: softmax is
// off the critical path, and keys are fetched evenly. A key's position in its chunk fixes the order
// of every sum, so a row's bits depend on its own keys alone.
//
// Memory decides how keys are fetched: the next tile as kStreams ascending streams, a few lines at
// a time, because a miss buffer that is full drops what it is asked for; and a key's lines once
// more shortly before their use, for those that were dropped.
//
// The 8-bit formats cost more to decode than to read: their chunks are decoded to f32 once instead.
//
// Values travel in units of two vectors. A unit of bf16 is split into its even and odd elements,
// which costs two operations; queries follow that order, and output is put right at the end.
//
// Included once per target by highway_kernels.cpp.
#if defined(MLA_CPU_FEW_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLA_CPU_FEW_ROWS_INL_H_
#undef MLA_CPU_FEW_ROWS_INL_H_
#else
#define MLA_CPU_FEW_ROWS_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <type_traits>

#include "cpu/convert-inl.h"
#include "cpu/key_tile.hpp"
#include "cpu/lanes-inl.h"
#include "cpu/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Eight lanes also where sixteen exist: a unit is then one 16-value block, and memory is the limit.
using Few = hn::CappedTag<float, 8>;
using FewVec = hn::Vec<Few>;
inline constexpr int kFewLanes = static_cast<int>(hn::MaxLanes(Few()));
inline constexpr int kUnit = 2 * kFewLanes;
static_assert(kBlock % kUnit == 0);

/// A tile is fetched while the one before it is in work, as this many ascending streams that lie
/// pages of memory apart. The hardware's prefetcher runs ahead of each; ahead of one alone, or of
/// neighbouring keys, it does not cover the memory's latency.
inline constexpr int kStreams = 4;
inline constexpr int kStreamKeys = kKeyTile / kStreams;
static_assert(kKeyTile % kStreams == 0 && kKeyChunk % kStreams == 0);

/// Keys beyond a chunk that are fetched into the L1 meanwhile.
inline constexpr int kKeysNear = 4;

struct Unit {
  FewVec low;
  FewVec high;
};

/// Keeps a vector in its register: a compiler that folds the load into each use issues it anew.
template <class V>
HWY_INLINE V held(V v) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  asm("" : "+x"(v.raw));
#endif
  return v;
}

// How unit u of a token's values is read.
struct Bf16Coding {
  static constexpr bool kEvenOdd = true;
  static constexpr int kUnitBytes = 2 * kUnit;
  static HWY_INLINE Unit load(const std::byte* token, std::int64_t u) {
    const Few d;
    const hn::RebindToUnsigned<Few> du32;
    const auto pairs = held(load_bytes(du32, token + u * kUnitBytes));
    return {hn::BitCast(d, hn::ShiftLeft<16>(pairs)),
            hn::BitCast(d, hn::And(pairs, hn::Set(du32, 0xFFFF0000U)))};
  }
};

struct F16Coding {
  static constexpr bool kEvenOdd = false;
  static constexpr int kUnitBytes = 2 * kUnit;
  static HWY_INLINE Unit load(const std::byte* token, std::int64_t u) {
    const Few d;
    const std::byte* source = token + u * kUnitBytes;
    return {f16_vector(d, source), f16_vector(d, source + 2 * kFewLanes)};
  }
};

struct F32Coding {
  static constexpr bool kEvenOdd = false;
  static constexpr int kUnitBytes = 4 * kUnit;
  static HWY_INLINE Unit load(const std::byte* token, std::int64_t u) {
    const Few d;
    const auto* value = reinterpret_cast<const float*>(token + u * kUnitBytes);
    return {hn::Load(d, value), hn::Load(d, value + kFewLanes)};
  }
};

/// True where a chunk is decoded to f32 first, because decoding twice in registers costs more.
template <class Coding>
inline constexpr bool kStaged = std::is_same_v<Coding, F32Coding>;

/// A tile with the keys to fetch while it is in work. Products are formed and keys fetched in
/// whole chunks: places past a list's end repeat a key that is at hand.
struct FewTile {
  KeyTile keys;
  const std::byte* address[kKeyTile + kKeyChunk + kKeysNear];  ///< its keys and those that follow
  const std::byte* ahead[kKeyTile];  ///< keys of the next tile, streams innermost

  /// Sets the addresses of a tile with keys; `next` is the tile after it.
  void place(const KeyTile& next) noexcept {
    const std::byte* at_hand = keys.address[0];
    const int near = std::min(next.count, kKeysNear);
    const std::byte** end = std::copy_n(keys.address, keys.count, address);
    end = std::copy_n(next.address, near, end);
    std::fill(end, address + kKeyTile + kKeyChunk + kKeysNear, at_hand);
    for (int k = 0; k < kStreamKeys; ++k) {
      for (int s = 0; s < kStreams; ++s) {
        const int at = s * kStreamKeys + k;
        ahead[k * kStreams + s] = at < next.count ? next.address[at] : at_hand;
      }
    }
  }
};

/// The keys of one absolute chunk of a tile.
struct Chunk {
  const KeyTile* tile = nullptr;
  std::int64_t begin = 0;                     ///< absolute key of position 0
  int first = 0;                              ///< index of address[0] in the tile's list
  int count = 0;                              ///< listed keys
  const std::byte* const* address = nullptr;  ///< [8 + kKeysNear], `count` of its own
  const std::byte* const* ahead = nullptr;    ///< [8]

  Chunk() noexcept = default;
  Chunk(const FewTile& of, int c) noexcept
      : tile(&of.keys),
        begin(of.keys.begin + c * kKeyChunk),
        first(of.keys.rank[c * kKeyChunk]),
        count(of.keys.rank[(c + 1) * kKeyChunk] - first),
        address(of.address + first),
        ahead(of.ahead + c * kKeyChunk) {}

  /// Index of the first listed key that is not below absolute key `key`.
  int index_of(std::int64_t key) const noexcept {
    if (key <= begin) return 0;
    if (key >= begin + kKeyChunk) return count;
    return tile->index_of(key) - first;
  }
  /// Listed key k's place in the chunk.
  int position(int k) const noexcept {
    return static_cast<int>(tile->begin - begin) + tile->offset[first + k];
  }
};

/// State of a split in scratch.
struct FewRowsState {
  float* queries;     // [rows][D] in unit order
  float* output;      // [rows][L] in unit order
  float* staging;     // [D] one decoded query
  float* chunk;       // [8][D + 16] f32 keys of a staged format
  float* weights[2];  // [rows][8] products, then weights, by list index; of even and odd chunks
  float* maximum;     // [rows]
  float* sum;         // [rows]
  float* rescale;     // [rows]

  FewRowsState(std::int64_t rank, std::int64_t rope, ScratchCarver* carver)
      : queries(carver->floats(kMaxRows * (rank + rope))),
        output(carver->floats(kMaxRows * rank)),
        staging(carver->floats(rank + rope)),
        chunk(carver->floats(kKeyChunk * (rank + rope + kBlock))),
        weights{carver->floats(kMaxRows * kKeyChunk), carver->floats(kMaxRows * kKeyChunk)},
        maximum(carver->floats(kMaxRows)),
        sum(carver->floats(kMaxRows)),
        rescale(carver->floats(kMaxRows)) {}
};

/// Products of kRows rows and kKeys keys so far, by unit half.
template <int kRows, int kKeys>
struct Products {
  FewVec low[kRows][kKeys];
  FewVec high[kRows][kKeys];
};

/// Units of a cache line.
template <class Coding>
inline constexpr std::int64_t kUnitsPerLine = std::max(1, 64 / Coding::kUnitBytes);

/// Units of two lines: while products pass over them, one line of each key ahead is fetched.
template <class Coding>
inline constexpr std::int64_t kUnitsPerFetch = 2 * kUnitsPerLine<Coding>;

/// Adds unit u of all pairs.
template <class Coding, int kRows, int kKeys>
HWY_INLINE void add_unit(const float* HWY_RESTRICT queries, std::int64_t query_stride,
                         const std::byte* const* keys, std::int64_t u,
                         Products<kRows, kKeys>* sums) {
  const Few d;
  FewVec query[kRows][2];
  MLA_UNROLL for (int r = 0; r < kRows; ++r) {
    const float* q = queries + u * kUnit + r * query_stride;
    query[r][0] = hn::Load(d, q);
    query[r][1] = hn::Load(d, q + kFewLanes);
    if (kKeys > 1) {
      query[r][0] = held(query[r][0]);
      query[r][1] = held(query[r][1]);
    }
  }
  MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
    const Unit x = Coding::load(keys[k], u);
    MLA_UNROLL for (int r = 0; r < kRows; ++r) {
      sums->low[r][k] = hn::MulAdd(query[r][0], x.low, sums->low[r][k]);
      sums->high[r][k] = hn::MulAdd(query[r][1], x.high, sums->high[r][k]);
    }
  }
}

/// Adds the products over units [begin, end). On the way, each line of the keys kKeysNear further
/// on is fetched into the L1 and half of the keys `ahead` into the L2, where many misses in flight
/// do not hold up the loads of this chunk.
template <class Coding, int kRows, int kKeys>
HWY_INLINE void add_products(const float* HWY_RESTRICT queries, std::int64_t query_stride,
                             const std::byte* const* keys, const std::byte* const* ahead,
                             std::int64_t begin, std::int64_t end, Products<kRows, kKeys>* sums) {
  constexpr std::int64_t kPerLine = kUnitsPerLine<Coding>;
  const std::byte* key[kKeys];
  const std::byte* near[kKeys];
  const std::byte* far[kKeys];
  MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
    key[k] = keys[k];
    near[k] = keys[k + kKeysNear];
    far[k] = ahead[k];
  }
  std::int64_t u = begin;
  for (; u + kUnitsPerFetch<Coding> <= end; u += kUnitsPerFetch<Coding>) {
    if constexpr (!kStaged<Coding>) {
      MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
        __builtin_prefetch(far[k] + u / kUnitsPerFetch<Coding> * 64, 0, 2);
      }
    }
    MLA_UNROLL for (int i = 0; i < kUnitsPerFetch<Coding>; ++i) {
      if (!kStaged<Coding> && i % kPerLine == 0) {
        MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
          __builtin_prefetch(near[k] + (u + i) / kPerLine * 64, 0, 3);
        }
      }
      add_unit<Coding>(queries, query_stride, key, u + i, sums);
    }
  }
  for (; u < end; ++u) add_unit<Coding>(queries, query_stride, key, u, sums);
}

/// Units that one partial sum covers: all of them, but with one lane its chain would be long.
inline constexpr std::int64_t kSliceUnits = kFewLanes > 1 ? 1 << 30 : 32;

/// products[row * 8 + k] of kRows rows and kKeys keys.
template <class Coding, int kRows, int kKeys>
HWY_NOINLINE void block_products(const float* HWY_RESTRICT queries, const std::byte* const* keys,
                                 const std::byte* const* ahead, std::int64_t head_dim,
                                 float* HWY_RESTRICT products) {
  const Few d;
  const std::int64_t num_units = head_dim / kUnit;
  for (std::int64_t begin = 0; begin < num_units; begin += kSliceUnits) {
    Products<kRows, kKeys> sums;
    MLA_UNROLL for (int r = 0; r < kRows; ++r) {
      MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
        sums.low[r][k] = hn::Zero(d);
        sums.high[r][k] = hn::Zero(d);
      }
    }
    add_products<Coding>(queries, head_dim, keys, ahead, begin,
                         std::min(begin + kSliceUnits, num_units), &sums);
    MLA_UNROLL for (int r = 0; r < kRows; ++r) {
      MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
        const auto sum = hn::SumOfLanes(d, hn::Add(sums.low[r][k], sums.high[r][k]));
        float* product = products + r * kKeyChunk + k;
        *product = begin == 0 ? hn::GetLane(sum) : *product + hn::GetLane(sum);
      }
    }
  }
}

/// kUnits units of output of kRows rows: output = rescale * output + sum of weight * value over
/// list indices [first, last).
template <class Coding, int kRows, int kUnits>
HWY_INLINE void add_output(const std::byte* const* keys, std::int64_t unit,
                           const float* HWY_RESTRICT weights, int first, int last,
                           const float* HWY_RESTRICT rescale, std::int64_t rank,
                           float* HWY_RESTRICT output) {
  const Few d;
  FewVec acc[kRows][2 * kUnits];
  MLA_UNROLL for (int r = 0; r < kRows; ++r) {
    MLA_UNROLL for (int v = 0; v < 2 * kUnits; ++v) acc[r][v] = hn::Zero(d);
  }
  for (int k = first; k < last; ++k) {
    const std::byte* token = keys[k];
    MLA_UNROLL for (int i = 0; i < kUnits; ++i) {
      const Unit x = Coding::load(token, unit + i);
      MLA_UNROLL for (int r = 0; r < kRows; ++r) {
        const auto p = hn::Set(d, weights[r * kKeyChunk + k]);
        acc[r][2 * i] = hn::MulAdd(p, x.low, acc[r][2 * i]);
        acc[r][2 * i + 1] = hn::MulAdd(p, x.high, acc[r][2 * i + 1]);
      }
    }
  }
  MLA_UNROLL for (int r = 0; r < kRows; ++r) {
    const auto factor = hn::Set(d, rescale[r]);
    MLA_UNROLL for (int v = 0; v < 2 * kUnits; ++v) {
      float* cell = output + r * rank + unit * kUnit + v * kFewLanes;
      hn::Store(hn::MulAdd(hn::Load(d, cell), factor, acc[r][v]), d, cell);
    }
  }
}

/// Which lines of kKeys keys to fetch while output is formed: the second half, or none.
struct Fetch {
  const std::byte* const* ahead;
  std::int64_t line;
  std::int64_t num_lines;
};

/// Units [begin, end) of output of kRows rows, a multiple of kUnits from the start of the row.
template <class Coding, int kRows, int kUnits, int kKeys>
HWY_NOINLINE void block_output(const std::byte* const* keys, const Fetch& fetch, std::int64_t begin,
                               std::int64_t end, const float* weights, int first, int last,
                               const float* rescale, std::int64_t rank, float* output) {
  const std::int64_t lines = fetch.num_lines - fetch.line;
  std::int64_t fetched = 0;
  std::int64_t u = begin;
  for (; u + kUnits <= end; u += kUnits) {
    for (; fetched * (end - begin) < lines * (u + kUnits - begin); ++fetched) {
      MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
        __builtin_prefetch(fetch.ahead[k] + (fetch.line + fetched) * 64, 0, 2);
      }
    }
    add_output<Coding, kRows, kUnits>(keys, u, weights, first, last, rescale, rank, output);
  }
  for (; u < end; ++u) {
    add_output<Coding, kRows, 1>(keys, u, weights, first, last, rescale, rank, output);
  }
}

/// Products of one row by chunk position to base-2 scores; positions without a visible key to -inf.
HWY_NOINLINE void chunk_modify(const CallView& call, const ScoreRule& rule, const SplitRow& row,
                               const Chunk& chunk, int first, int last, float* score) {
  const hn::CappedTag<float, 1> d1;
  for (int k = first; k < last; ++k) {
    const int at = chunk.position(k);
    auto s = hn::Set(d1, score[at]);
    if (rule.cap_log2 != 0.0F) s = hn::Mul(hn::Set(d1, rule.cap_log2), hn::Tanh(d1, s));
    if (rule.uses_alibi) {
      const std::int64_t distance = global_position(call.cp, chunk.begin + at) - row.position;
      s = hn::MulAdd(hn::Set(d1, row.alibi_slope * kLog2E),
                     hn::Set(d1, static_cast<float>(distance)), s);
    }
    score[at] = hn::GetLane(s);
  }
}

/// Softmax of one row over the chunk. `products` [8] by list index becomes weights by list index.
HWY_NOINLINE void chunk_softmax(const CallView& call, const ScoreRule& rule, const SplitRow& row,
                                const Chunk& chunk, int first, int last, float* products,
                                float* maximum, float* sum, float* rescale) {
  const Few d;
  HWY_ALIGN float placed[kKeyChunk];
  const bool whole = first == 0 && last == kKeyChunk;  // then list index and position agree
  float* score = whole ? products : placed;
  if (!whole) {
    std::fill(placed, placed + kKeyChunk, kMinusInf);
    for (int k = first; k < last; ++k) placed[chunk.position(k)] = products[k];
  }
  if (!rule.plain()) chunk_modify(call, rule, row, chunk, first, last, score);
  auto top = hn::Load(d, score);
  for (int i = kFewLanes; i < kKeyChunk; i += kFewLanes) top = hn::Max(top, hn::Load(d, score + i));
  const auto old_max = hn::Set(d, *maximum);
  const auto new_max = hn::Max(old_max, hn::MaxOfLanes(d, top));
  auto total = hn::Zero(d);
  for (int i = 0; i < kKeyChunk; i += kFewLanes) {
    const auto weight = exp2_nonpositive(d, hn::Sub(hn::Load(d, score + i), new_max));
    hn::Store(weight, d, score + i);
    total = hn::Add(total, weight);
  }
  const auto factor = exp2_nonpositive(d, hn::Sub(old_max, new_max));
  *sum = hn::GetLane(hn::MulAdd(hn::Set(d, *sum), factor, hn::SumOfLanes(d, total)));
  *maximum = hn::GetLane(new_max);
  *rescale = hn::GetLane(factor);
  if (!whole) {
    for (int k = first; k < last; ++k) products[k] = placed[chunk.position(k)];
  }
}

/// What a chunk leaves for its rows: keys [first, last) of its list have weights. `same`: the rows
/// agree on them.
template <int kRows>
struct RowKeys {
  int first[kRows];
  int last[kRows];
  bool same = true;

  RowKeys(const SplitJob& job, const Chunk& chunk, int first_row) {
    for (int r = 0; r < kRows; ++r) {
      first[r] = chunk.count == 0 ? 0 : chunk.index_of(job.rows[first_row + r].key_begin);
      last[r] = chunk.count == 0 ? 0 : chunk.index_of(job.rows[first_row + r].key_end);
      same = same && first[r] == first[0] && last[r] == last[0];
    }
  }
};

/// One step of rows [first_row, first_row + kRows): products and softmax of chunk `now`, output of
/// the chunk `before` (either may be empty), a block of each in turn.
template <class Coding, int kRows>
HWY_INLINE void rows_step(const CallView& call, const SplitJob& job, const ScoreRule& rule,
                          const Chunk& now, const Chunk& before, int parity, int first_row,
                          const FewRowsState& state) {
  constexpr int kKeys = 4 / kRows;
  constexpr int kUnits = 4 / kRows;
  constexpr int kNumBlocks = kKeyChunk / kKeys;
  const std::int64_t rank = call.kv_lora_rank;
  const std::int64_t head_dim = rank + call.qk_rope_head_dim;
  const std::int64_t groups = rank / kUnit / kUnits;
  float* products = state.weights[parity] + first_row * kKeyChunk;
  const float* weights = state.weights[parity ^ 1] + first_row * kKeyChunk;
  float* rescale = state.rescale + first_row;
  float* output = state.output + first_row * rank;
  const bool fetches = !kStaged<Coding> && first_row == 0;  // once is enough
  const RowKeys<kRows> old(job, before, first_row);
  const bool outputs = old.same && old.first[0] < old.last[0];
  for (int b = 0; b < kNumBlocks; ++b) {
    const std::byte* const* ahead = (fetches ? now.ahead : now.address) + b * kKeys;
    if (now.count > 0) {
      block_products<Coding, kRows, kKeys>(state.queries + first_row * head_dim,
                                           now.address + b * kKeys, ahead, head_dim,
                                           products + b * kKeys);
    }
    if (!outputs) continue;
    const std::int64_t half = head_dim / kUnit / kUnitsPerFetch<Coding>;  // products fetched these
    const Fetch fetch{ahead, half, fetches && now.count > 0 ? (token_bytes(call) + 63) / 64 : half};
    const bool is_last = b + 1 == kNumBlocks;
    block_output<Coding, kRows, kUnits, kKeys>(
        before.address, fetch, groups * b / kNumBlocks * kUnits,
        is_last ? rank / kUnit : groups * (b + 1) / kNumBlocks * kUnits, weights, old.first[0],
        old.last[0], rescale, rank, output);
  }
  for (int r = 0; r < kRows && !old.same; ++r) {  // each row passes over its own keys only
    if (old.first[r] >= old.last[r]) continue;
    block_output<Coding, 1, 4, 1>(before.address, {}, 0, rank / kUnit, weights + r * kKeyChunk,
                                  old.first[r], old.last[r], rescale + r, rank, output + r * rank);
  }
  if (now.count == 0) return;
  const RowKeys<kRows> seen(job, now, first_row);
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r;
    if (seen.first[r] >= seen.last[r]) continue;
    chunk_softmax(call, rule, job.rows[row], now, seen.first[r], seen.last[r],
                  products + r * kKeyChunk, state.maximum + row, state.sum + row, rescale + r);
  }
}

template <class Coding>
HWY_NOINLINE void chunk_step(const CallView& call, const SplitJob& job, const ScoreRule& rule,
                             const Chunk& now, const Chunk& before, int parity,
                             const FewRowsState& state) {
  const int num_rows = static_cast<int>(job.num_rows);
  for (int r = 0; r < num_rows;) {
    if (num_rows - r >= 4) {
      rows_step<Coding, 4>(call, job, rule, now, before, parity, r, state);
      r += 4;
    } else if (num_rows - r >= 2) {
      rows_step<Coding, 2>(call, job, rule, now, before, parity, r, state);
      r += 2;
    } else {
      rows_step<Coding, 1>(call, job, rule, now, before, parity, r, state);
      r += 1;
    }
  }
}

/// Natural order to unit order, or back.
template <bool kEvenOdd>
HWY_INLINE void reorder_units(const float* HWY_RESTRICT from, std::int64_t count, bool back,
                              float* HWY_RESTRICT to) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t in_unit = i % kUnit;
    const std::int64_t moved = kEvenOdd ? i - in_unit + in_unit / 2 + in_unit % 2 * kFewLanes : i;
    to[back ? i : moved] = from[back ? moved : i];
  }
}

template <class Coding>
HWY_NOINLINE void start_rows(const CallView& call, const SplitJob& job, const ScoreRule& rule,
                             FewRowsState* state) {
  const std::int64_t rank = call.kv_lora_rank;
  const std::int64_t head_dim = rank + call.qk_rope_head_dim;
  for (std::int64_t r = 0; r < job.num_rows; ++r) {
    if (job.rows[r].key_begin < job.rows[r].key_end) {
      decode_query(call, job.rows[r], rule.q_factor, state->staging);
    } else {
      std::fill(state->staging, state->staging + head_dim, 0.0F);
    }
    reorder_units<Coding::kEvenOdd>(state->staging, head_dim, false, state->queries + r * head_dim);
  }
  std::fill(state->output, state->output + job.num_rows * rank, 0.0F);
  std::fill(state->maximum, state->maximum + job.num_rows, kNoMaximum);
  std::fill(state->sum, state->sum + job.num_rows, 0.0F);
}

template <class Coding>
HWY_NOINLINE void finish_rows(const CallView& call, const SplitJob& job,
                              const FewRowsState& state) {
  const Few d;
  const std::int64_t rank = call.kv_lora_rank;
  for (std::int64_t r = 0; r < job.num_rows; ++r) {
    float* value = state.output + r * rank;
    float* out = job.out + r * rank;
    if (job.rows[r].key_begin >= job.rows[r].key_end || state.sum[r] == 0.0F) {
      std::fill(out, out + rank, 0.0F);
      job.lse[r] = kMinusInf;
      continue;
    }
    const auto factor = hn::Set(d, 1.0F / state.sum[r]);
    for (std::int64_t i = 0; i < rank; i += kFewLanes) {
      hn::Store(hn::Mul(hn::Load(d, value + i), factor), d, value + i);
    }
    reorder_units<Coding::kEvenOdd>(value, rank, true, out);
    job.lse[r] = natural_lse(state.maximum[r], state.sum[r]);
  }
}

/// f32 copies of a chunk's keys to `copies` [8 + kKeysNear]; a key ahead is fetched with each.
HWY_NOINLINE void stage_chunk(const CallView& call, const FewRowsState& state, const Chunk& chunk,
                              const std::byte** copies) {
  const std::int64_t head_dim = call.kv_lora_rank + call.qk_rope_head_dim;
  const std::int64_t row_bytes = token_bytes(call);
  for (int k = 0; k < kKeyChunk; ++k) {
    for (std::int64_t at = 0; at < row_bytes; at += 64) {
      __builtin_prefetch(chunk.ahead[k] + at, 0, 2);
    }
    float* copy = state.chunk + (k < chunk.count ? k : 0) * (head_dim + kBlock);
    if (k < chunk.count) decode_token(call.kv_format, chunk.address[k], head_dim, copy, kBlock);
    copies[k] = reinterpret_cast<const std::byte*>(copy);
  }
  std::fill_n(copies + kKeyChunk, kKeysNear, copies[0]);
}

template <class Coding>
HWY_NOINLINE void run_few_rows_of(const CallView& call, const SplitJob& job, std::byte* scratch) {
  const ScoreRule rule(call);
  ScratchCarver carver(scratch);
  FewRowsState state(call.kv_lora_rank, call.qk_rope_head_dim, &carver);
  start_rows<Coding>(call, job, rule, &state);
  FewTile tiles[3];  // of the chunk before, in work, next
  const std::byte* copies[kKeyChunk + kKeysNear];
  Chunk before;
  int parity = 0;
  std::int64_t begin = job.key_begin / kKeyTile * kKeyTile;
  collect_keys(call, job, begin, kKeyTile, &tiles[0].keys);
  for (int t = 0; begin < job.key_end; begin += kKeyTile, t = (t + 1) % 3) {
    FewTile& tile = tiles[t];
    FewTile& next = tiles[(t + 1) % 3];
    collect_keys(call, job, begin + kKeyTile, kKeyTile, &next.keys);
    if (tile.keys.count == 0) {  // its place in the ring is taken next
      chunk_step<Coding>(call, job, rule, Chunk(), before, parity, state);
      before = Chunk();
      continue;
    }
    tile.place(next.keys);
    for (int c = 0; c < kKeyTile / kKeyChunk; ++c) {
      Chunk now(tile, c);
      if (now.count == 0) continue;
      if constexpr (kStaged<Coding>) {
        stage_chunk(call, state, now, copies);
        now.address = copies;
        chunk_step<Coding>(call, job, rule, now, Chunk(), parity, state);
        chunk_step<Coding>(call, job, rule, Chunk(), now, parity ^ 1, state);
      } else {
        chunk_step<Coding>(call, job, rule, now, before, parity, state);
        before = now;
        parity ^= 1;
      }
    }
  }
  chunk_step<Coding>(call, job, rule, Chunk(), before, parity, state);
  finish_rows<Coding>(call, job, state);
}

inline std::size_t few_rows_scratch_bytes(std::int64_t rank, std::int64_t rope) {
  ScratchCarver carver(nullptr);
  FewRowsState state(rank, rope, &carver);
  static_cast<void>(state);
  return carver.used();
}

/// SplitJob with values in lanes.
void run_few_rows(const CallView& call, const SplitJob& job, std::byte* scratch) {
  switch (call.kv_format) {
    case KvFormat::kBF16: return run_few_rows_of<Bf16Coding>(call, job, scratch);
    case KvFormat::kF16: return run_few_rows_of<F16Coding>(call, job, scratch);
    case KvFormat::kE4M3:
    case KvFormat::kFp8DsMla: return run_few_rows_of<F32Coding>(call, job, scratch);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mla::cpu
HWY_AFTER_NAMESPACE();

#endif  // MLA_CPU_FEW_ROWS_INL_H_
