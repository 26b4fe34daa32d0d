// The few-row kernel: bound by memory, so cached values are decoded in registers and are the lanes
// of both products.
//
// Per absolute chunk of 8 keys: dot products of a few (row, key) pairs at once, softmax over the 8
// positions, then output += p_k c_k with a piece of the output in registers; the second reading of
// the chunk hits the L1. Lines of later chunks are prefetched a few at a time all along. A key's
// position in its chunk fixes the order of every sum, so a row's bits depend on its own keys alone.
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

/// Chunks that are resolved, and prefetched, ahead of the one in work.
inline constexpr int kChunksAhead = 3;

struct Unit {
  FewVec low;
  FewVec high;
};

// How unit u of a token's values is read.
struct Bf16Coding {
  static constexpr bool kEvenOdd = true;
  static constexpr int kUnitBytes = 2 * kUnit;
  static HWY_INLINE Unit load(const std::byte* token, std::int64_t u) {
    const Few d;
    const hn::RebindToUnsigned<Few> du32;
    const auto pairs = load_bytes(du32, token + u * kUnitBytes);
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

/// State of a split in scratch.
struct FewRowsState {
  float* queries;  // [rows][D] in unit order
  float* output;   // [rows][L] in unit order
  float* staging;  // [D] one decoded query
  float* chunk;    // [8][D + 16] f32 keys of a staged format
  float* weights;  // [rows][8] products, then weights, by list index
  float* maximum;  // [rows]
  float* sum;      // [rows]
  float* rescale;  // [rows]

  FewRowsState(std::int64_t rank, std::int64_t rope, ScratchCarver* carver)
      : queries(carver->floats(kMaxRows * (rank + rope))),
        output(carver->floats(kMaxRows * rank)),
        staging(carver->floats(rank + rope)),
        chunk(carver->floats(kKeyChunk * (rank + rope + kBlock))),
        weights(carver->floats(kMaxRows * kKeyChunk)),
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

/// Adds the products over units [begin, end), and prefetches the same units of the tokens ahead.
template <class Coding, int kRows, int kKeys>
HWY_INLINE void add_products(const float* HWY_RESTRICT queries, std::int64_t query_stride,
                             const std::byte* const* keys, const std::byte* const* ahead,
                             std::int64_t begin, std::int64_t end, Products<kRows, kKeys>* sums) {
  const Few d;
  constexpr std::int64_t kUnitsPerLine = std::max(1, 64 / Coding::kUnitBytes);
  const std::byte* token[kKeys];
  const std::byte* token_ahead[kKeys];
  MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
    token[k] = keys[k];
    token_ahead[k] = ahead[k];
  }
  for (std::int64_t line = begin; line < end; line += kUnitsPerLine) {
    if constexpr (!kStaged<Coding>) {
      // Into the L2: many L1 misses in flight would hold up the loads of this chunk.
      MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
        __builtin_prefetch(token_ahead[k] + line * Coding::kUnitBytes, 0, 2);
      }
    }
    const std::int64_t line_end = std::min(line + kUnitsPerLine, end);
    for (std::int64_t u = line; u < line_end; ++u) {
      const float* query = queries + u * kUnit;
      MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
        const Unit x = Coding::load(token[k], u);
        MLA_UNROLL for (int r = 0; r < kRows; ++r) {
          const float* q = query + r * query_stride;
          sums->low[r][k] = hn::MulAdd(hn::Load(d, q), x.low, sums->low[r][k]);
          sums->high[r][k] = hn::MulAdd(hn::Load(d, q + kFewLanes), x.high, sums->high[r][k]);
        }
      }
    }
  }
}

/// Units that one partial sum covers: all of them, but with one lane its chain would be long.
inline constexpr std::int64_t kSliceUnits = kFewLanes > 1 ? 1 << 30 : 32;

/// products[row * 8 + k] of kRows rows and the 8 keys of the list, kKeys at a time.
template <class Coding, int kRows, int kKeys>
HWY_NOINLINE void chunk_products(const float* HWY_RESTRICT queries, const KeyTile& keys,
                                 const KeyTile& ahead, std::int64_t head_dim,
                                 float* HWY_RESTRICT products) {
  const Few d;
  const std::int64_t num_units = head_dim / kUnit;
  for (int first = 0; first < kKeyChunk; first += kKeys) {
    for (std::int64_t begin = 0; begin < num_units; begin += kSliceUnits) {
      Products<kRows, kKeys> sums;
      MLA_UNROLL for (int r = 0; r < kRows; ++r) {
        MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
          sums.low[r][k] = hn::Zero(d);
          sums.high[r][k] = hn::Zero(d);
        }
      }
      add_products<Coding>(queries, head_dim, keys.address + first, ahead.address + first, begin,
                           std::min(begin + kSliceUnits, num_units), &sums);
      MLA_UNROLL for (int r = 0; r < kRows; ++r) {
        MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
          const auto sum = hn::SumOfLanes(d, hn::Add(sums.low[r][k], sums.high[r][k]));
          float* product = products + r * kKeyChunk + first + k;
          *product = begin == 0 ? hn::GetLane(sum) : *product + hn::GetLane(sum);
        }
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

template <class Coding, int kRows, int kUnits>
HWY_NOINLINE void chunk_output(const std::byte* const* keys, const float* weights, int first,
                               int last, const float* rescale, std::int64_t rank, float* output) {
  const std::int64_t num_units = rank / kUnit;
  std::int64_t u = 0;
  for (; u + kUnits <= num_units; u += kUnits) {
    add_output<Coding, kRows, kUnits>(keys, u, weights, first, last, rescale, rank, output);
  }
  for (; u < num_units; ++u) {
    add_output<Coding, kRows, 1>(keys, u, weights, first, last, rescale, rank, output);
  }
}

/// Products of one row by chunk position to base-2 scores; positions without a visible key to -inf.
HWY_NOINLINE void chunk_modify(const CallView& call, const ScoreRule& rule, const SplitRow& row,
                               const KeyTile& keys, int first, int last, float* score) {
  const hn::CappedTag<float, 1> d1;
  for (int k = first; k < last; ++k) {
    const int at = keys.offset[k];
    auto s = hn::Set(d1, score[at]);
    if (rule.cap_log2 != 0.0F) s = hn::Mul(hn::Set(d1, rule.cap_log2), hn::Tanh(d1, s));
    if (rule.uses_alibi) {
      const std::int64_t distance = global_position(call.cp, keys.begin + at) - row.position;
      s = hn::MulAdd(hn::Set(d1, row.alibi_slope * kLog2E),
                     hn::Set(d1, static_cast<float>(distance)), s);
    }
    score[at] = hn::GetLane(s);
  }
}

/// Softmax of one row over the chunk. `products` [8] by list index becomes weights by list index.
HWY_NOINLINE void chunk_softmax(const CallView& call, const ScoreRule& rule, const SplitRow& row,
                                const KeyTile& keys, int first, int last, float* products,
                                float* maximum, float* sum, float* rescale) {
  const Few d;
  HWY_ALIGN float placed[kKeyChunk];
  const bool whole = first == 0 && last == kKeyChunk;  // then list index and position agree
  float* score = whole ? products : placed;
  if (!whole) {
    std::fill(placed, placed + kKeyChunk, kMinusInf);
    for (int k = first; k < last; ++k) placed[keys.offset[k]] = products[k];
  }
  if (!rule.plain()) chunk_modify(call, rule, row, keys, first, last, score);
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
    for (int k = first; k < last; ++k) products[k] = placed[keys.offset[k]];
  }
}

/// One chunk for rows [first_row, first_row + kRows).
template <class Coding, int kRows>
HWY_INLINE void rows_chunk(const CallView& call, const SplitJob& job, const ScoreRule& rule,
                           const KeyTile& keys, const KeyTile& ahead, int first_row,
                           const FewRowsState& state) {
  const std::int64_t rank = call.kv_lora_rank;
  const std::int64_t head_dim = rank + call.qk_rope_head_dim;
  chunk_products<Coding, kRows, 4 / kRows>(state.queries + first_row * head_dim, keys, ahead,
                                           head_dim, state.weights + first_row * kKeyChunk);
  int first[kRows];
  int last[kRows];
  bool same = true;
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r;
    first[r] = keys.index_of(job.rows[row].key_begin);
    last[r] = keys.index_of(job.rows[row].key_end);
    same = same && first[r] == first[0] && last[r] == last[0];
    if (first[r] >= last[r]) continue;
    chunk_softmax(call, rule, job.rows[row], keys, first[r], last[r],
                  state.weights + row * kKeyChunk, state.maximum + row, state.sum + row,
                  state.rescale + row);
  }
  if (same && first[0] < last[0]) {
    chunk_output<Coding, kRows, 4 / kRows>(keys.address, state.weights + first_row * kKeyChunk,
                                           first[0], last[0], state.rescale + first_row, rank,
                                           state.output + first_row * rank);
  }
  for (int r = 0; r < kRows && !same; ++r) {  // each row passes over its own keys only
    const int row = first_row + r;
    if (first[r] >= last[r]) continue;
    chunk_output<Coding, 1, 4>(keys.address, state.weights + row * kKeyChunk, first[r], last[r],
                               state.rescale + row, rank, state.output + row * rank);
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

/// Replaces the addresses of a list by f32 copies of its keys; a key of the list ahead is
/// prefetched with each.
HWY_NOINLINE void stage_chunk(const CallView& call, const KeyTile& ahead, const FewRowsState& state,
                              KeyTile* keys) {
  const std::int64_t head_dim = call.kv_lora_rank + call.qk_rope_head_dim;
  const std::int64_t row_bytes = token_bytes(call);
  for (int k = 0; k < keys->count; ++k) {
    for (std::int64_t at = 0; at < row_bytes; at += 64) {
      __builtin_prefetch(ahead.address[k] + at, 0, 2);
    }
    float* copy = state.chunk + k * (head_dim + kBlock);
    decode_token(call.kv_format, keys->address[k], head_dim, copy, kBlock);
    keys->address[k] = reinterpret_cast<const std::byte*>(copy);
  }
}

template <class Coding>
HWY_NOINLINE void run_few_rows_of(const CallView& call, const SplitJob& job, std::byte* scratch) {
  const ScoreRule rule(call);
  ScratchCarver carver(scratch);
  FewRowsState state(call.kv_lora_rank, call.qk_rope_head_dim, &carver);
  start_rows<Coding>(call, job, rule, &state);
  const int num_rows = static_cast<int>(job.num_rows);
  KeyTile ring[kChunksAhead + 1];
  std::int64_t begin = job.key_begin / kKeyChunk * kKeyChunk;
  for (int c = 0; c < kChunksAhead; ++c) {
    collect_keys(call, job, begin + c * kKeyChunk, kKeyChunk, &ring[c]);
  }
  for (int c = 0; begin < job.key_end; begin += kKeyChunk, c = (c + 1) % (kChunksAhead + 1)) {
    KeyTile& keys = ring[c];
    KeyTile& ahead = ring[(c + kChunksAhead) % (kChunksAhead + 1)];
    collect_keys(call, job, begin + kChunksAhead * kKeyChunk, kKeyChunk, &ahead);
    if (keys.count == 0) continue;
    // Products are formed for 8 keys; those past the list repeat a listed key and are not used.
    std::fill(ahead.address + ahead.count, ahead.address + kKeyChunk, keys.address[0]);
    if constexpr (kStaged<Coding>) stage_chunk(call, ahead, state, &keys);
    std::fill(keys.address + keys.count, keys.address + kKeyChunk, keys.address[0]);
    for (int r = 0; r < num_rows;) {
      const KeyTile& fetched = r == 0 ? ahead : keys;  // once is enough
      if (num_rows - r >= 4) {
        rows_chunk<Coding, 4>(call, job, rule, keys, fetched, r, state);
        r += 4;
      } else if (num_rows - r >= 2) {
        rows_chunk<Coding, 2>(call, job, rule, keys, fetched, r, state);
        r += 2;
      } else {
        rows_chunk<Coding, 1>(call, job, rule, keys, fetched, r, state);
        r += 1;
      }
    }
  }
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
