// The few-row kernel: bound by memory, so the cache is read once, ahead of use, and decoded once into
// an L1-sized chunk; values are the lanes of both products.
//
// Per absolute chunk of 8 keys: decode while prefetching the chunks ahead, dot products of up to 8
// (row, key) pairs at once, softmax over the 8 positions, then output += p_k c_k with the output
// chunk in registers. A position's place in the chunk fixes the order of every sum, so a row's bits
// depend on its own keys alone.
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
#include <cstring>

#include "cpu/convert-inl.h"
#include "cpu/key_tile.hpp"
#include "cpu/lanes-inl.h"
#include "cpu/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Floats from one 16-value block of the chunk to the next.
inline constexpr int kChunkStride = kKeyChunk * kBlock;

/// Chunks that are resolved, and prefetched, ahead of the one in work.
inline constexpr int kChunksAhead = 3;

/// State of a split in scratch.
struct FewRowsState {
  float* queries;  // [rows][D]
  float* output;   // [rows][L]
  float* chunk;    // [D/16][8][16]
  float* weights;  // [rows][8] scores, then weights, by position in the chunk
  float* maximum;  // [rows]
  float* sum;      // [rows]
  float* rescale;  // [rows]

  FewRowsState(std::int64_t rank, std::int64_t rope, ScratchCarver* carver)
      : queries(carver->floats(kMaxRows * (rank + rope))),
        output(carver->floats(kMaxRows * rank)),
        chunk(carver->floats(kKeyChunk * (rank + rope))),
        weights(carver->floats(kMaxRows * kKeyChunk)),
        maximum(carver->floats(kMaxRows)),
        sum(carver->floats(kMaxRows)),
        rescale(carver->floats(kMaxRows)) {}
};

/// Dot products of kRows rows with all 8 chunk rows, kKeys at a time; stale rows give values that
/// nobody reads. products[row * 8 + list index].
template <int kRows, int kKeys>
HWY_NOINLINE void chunk_products(const float* HWY_RESTRICT queries, std::int64_t query_stride,
                                 const float* HWY_RESTRICT chunk, std::int64_t num_blocks,
                                 float* HWY_RESTRICT products) {
  const Wide d;
  for (int first = 0; first < kKeyChunk; first += kKeys) {
    WideVec acc[kRows][kKeys];
    MLA_UNROLL for (int r = 0; r < kRows; ++r) {
      MLA_UNROLL for (int k = 0; k < kKeys; ++k) acc[r][k] = hn::Zero(d);
    }
    const float* HWY_RESTRICT key = chunk + first * kBlock;
    const float* HWY_RESTRICT query = queries;
    for (std::int64_t b = 0; b < num_blocks; ++b, key += kChunkStride, query += kBlock) {
      MLA_UNROLL for (int i = 0; i < kBlock; i += kLanes) {
        WideVec x[kKeys];
        MLA_UNROLL for (int k = 0; k < kKeys; ++k) x[k] = hn::Load(d, key + k * kBlock + i);
        MLA_UNROLL for (int r = 0; r < kRows; ++r) {
          const auto q = hn::Load(d, query + r * query_stride + i);
          MLA_UNROLL for (int k = 0; k < kKeys; ++k) acc[r][k] = hn::MulAdd(q, x[k], acc[r][k]);
        }
      }
    }
    MLA_UNROLL for (int r = 0; r < kRows; ++r) {
      MLA_UNROLL for (int k = 0; k < kKeys; ++k) {
        products[r * kKeyChunk + first + k] = hn::GetLane(hn::SumOfLanes(d, acc[r][k]));
      }
    }
  }
}

/// output = rescale * output + sum over list indices [first, last) of weight * value, kVecs vectors
/// of kRows rows at a time. `weights` [row][8] by list index.
template <int kRows, int kBlocks>
HWY_INLINE void chunk_output_part(const float* HWY_RESTRICT value, const float* HWY_RESTRICT weights,
                                  int first, int last, const float* HWY_RESTRICT rescale,
                                  std::int64_t output_stride, float* HWY_RESTRICT output) {
  constexpr int kVecs = kBlocks * (kBlock / kLanes);
  const Wide d;
  WideVec acc[kRows][kVecs];
  MLA_UNROLL for (int r = 0; r < kRows; ++r) {
    MLA_UNROLL for (int v = 0; v < kVecs; ++v) acc[r][v] = hn::Zero(d);
  }
  for (int k = first; k < last; ++k) {
    WideVec x[kVecs];
    MLA_UNROLL for (int v = 0; v < kVecs; ++v) {
      const int at = v * kLanes;
      x[v] = hn::Load(d, value + k * kBlock + at / kBlock * kChunkStride + at % kBlock);
    }
    MLA_UNROLL for (int r = 0; r < kRows; ++r) {
      const auto p = hn::Set(d, weights[r * kKeyChunk + k]);
      MLA_UNROLL for (int v = 0; v < kVecs; ++v) acc[r][v] = hn::MulAdd(p, x[v], acc[r][v]);
    }
  }
  MLA_UNROLL for (int r = 0; r < kRows; ++r) {
    const auto factor = hn::Set(d, rescale[r]);
    MLA_UNROLL for (int v = 0; v < kVecs; ++v) {
      float* cell = output + r * output_stride + v * kLanes;
      hn::Store(hn::MulAdd(hn::Load(d, cell), factor, acc[r][v]), d, cell);
    }
  }
}

template <int kRows, int kBlocks>
HWY_NOINLINE void chunk_output(const float* chunk, const float* weights, int first, int last,
                               const float* rescale, std::int64_t rank, float* output) {
  const std::int64_t num_blocks = rank / kBlock;
  std::int64_t b = 0;
  for (; b + kBlocks <= num_blocks; b += kBlocks) {
    chunk_output_part<kRows, kBlocks>(chunk + b * kChunkStride, weights, first, last, rescale, rank,
                                      output + b * kBlock);
  }
  for (; b < num_blocks; ++b) {
    chunk_output_part<kRows, 1>(chunk + b * kChunkStride, weights, first, last, rescale, rank,
                                output + b * kBlock);
  }
}

/// Softmax of one row over the chunk. `products` [8] by list index becomes weights by list index.
HWY_NOINLINE void chunk_softmax(const CallView& call, const ScoreRule& rule, const SplitRow& row,
                                const KeyTile& keys, int first, int last, float* products,
                                float* maximum, float* sum, float* rescale) {
  const hn::CappedTag<float, kKeyChunk> d;
  constexpr int kStep = static_cast<int>(hn::MaxLanes(d));
  HWY_ALIGN float score[kKeyChunk];
  std::fill(score, score + kKeyChunk, kMinusInf);
  for (int k = first; k < last; ++k) score[keys.offset[k]] = products[k];
  if (rule.cap_log2 != 0.0F) {
    for (int i = 0; i < kKeyChunk; i += kStep) {
      const auto capped =
          hn::Mul(hn::Set(d, rule.cap_log2), hn::Tanh(d, hn::Load(d, score + i)));
      hn::Store(capped, d, score + i);
    }
  }
  if (rule.uses_alibi || rule.cap_log2 != 0.0F) {
    const hn::CappedTag<float, 1> d1;
    HWY_ALIGN float modified[kKeyChunk];
    std::fill(modified, modified + kKeyChunk, kMinusInf);
    for (int k = first; k < last; ++k) {
      const int at = keys.offset[k];
      const std::int64_t distance =
          rule.uses_alibi ? global_position(call.cp, keys.begin + at) - row.position : 0;
      const auto s = hn::MulAdd(hn::Set(d1, row.alibi_slope * kLog2E),
                                hn::Set(d1, static_cast<float>(distance)), hn::Set(d1, score[at]));
      modified[at] = rule.uses_alibi ? hn::GetLane(s) : score[at];
    }
    std::copy(modified, modified + kKeyChunk, score);
  }
  auto top = hn::Load(d, score);
  for (int i = kStep; i < kKeyChunk; i += kStep) top = hn::Max(top, hn::Load(d, score + i));
  const auto old_max = hn::Set(d, *maximum);
  const auto new_max = hn::Max(old_max, hn::MaxOfLanes(d, top));
  auto total = hn::Zero(d);
  for (int i = 0; i < kKeyChunk; i += kStep) {
    const auto weight = exp2_nonpositive(d, hn::Sub(hn::Load(d, score + i), new_max));
    hn::Store(weight, d, score + i);
    total = hn::Add(total, weight);
  }
  const auto factor = exp2_nonpositive(d, hn::Sub(old_max, new_max));
  *sum = hn::GetLane(hn::MulAdd(hn::Set(d, *sum), factor, hn::SumOfLanes(d, total)));
  *maximum = hn::GetLane(new_max);
  *rescale = hn::GetLane(factor);
  for (int k = first; k < last; ++k) products[k] = score[keys.offset[k]];
}

/// Decodes the chunk's keys; with each goes the prefetch of one key of the chunk ahead.
HWY_NOINLINE void load_chunk(const CallView& call, const KeyTile& keys, const KeyTile& ahead,
                             float* chunk) {
  const std::int64_t head_dim = call.kv_lora_rank + call.qk_rope_head_dim;
  const std::int64_t row_bytes = token_bytes(call);
  const int both = std::max(keys.count, ahead.count);
  for (int k = 0; k < both; ++k) {
    if (k < ahead.count) {
      const std::byte* line = ahead.address[k];
      for (std::int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(line + at, 0, 3);
    }
    if (k < keys.count) {
      decode_token(call.kv_format, keys.address[k], head_dim, chunk + k * kBlock, kChunkStride);
    }
  }
}

/// Softmax and output of rows [first_row, first_row + kRows) once their products are there.
template <int kRows, int kBlocks>
HWY_INLINE void finish_chunk(const CallView& call, const SplitJob& job, const ScoreRule& rule,
                             const KeyTile& keys, int first_row, const FewRowsState& state) {
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
  const std::int64_t rank = call.kv_lora_rank;
  if (same) {
    if (first[0] >= last[0]) return;
    chunk_output<kRows, kBlocks>(state.chunk, state.weights + first_row * kKeyChunk, first[0],
                                 last[0], state.rescale + first_row, rank,
                                 state.output + first_row * rank);
    return;
  }
  for (int r = 0; r < kRows; ++r) {  // each row passes over its own keys only
    const int row = first_row + r;
    if (first[r] >= last[r]) continue;
    chunk_output<1, 4>(state.chunk, state.weights + row * kKeyChunk, first[r], last[r],
                       state.rescale + row, rank, state.output + row * rank);
  }
}

inline std::size_t few_rows_scratch_bytes(std::int64_t rank, std::int64_t rope) {
  ScratchCarver carver(nullptr);
  FewRowsState state(rank, rope, &carver);
  static_cast<void>(state);
  return carver.used();
}

/// SplitJob with values in lanes.
void run_few_rows(const CallView& call, const SplitJob& job, std::byte* scratch) {
  const ScoreRule rule(call);
  const std::int64_t rank = call.kv_lora_rank;
  const std::int64_t head_dim = rank + call.qk_rope_head_dim;
  const int num_rows = static_cast<int>(job.num_rows);
  ScratchCarver carver(scratch);
  FewRowsState state(rank, call.qk_rope_head_dim, &carver);
  for (int r = 0; r < num_rows; ++r) {
    float* query = state.queries + r * head_dim;
    if (job.rows[r].key_begin < job.rows[r].key_end) {
      decode_query(call, job.rows[r], rule.q_factor, query);
    } else {
      std::fill(query, query + head_dim, 0.0F);
    }
  }
  std::fill(state.output, state.output + num_rows * rank, 0.0F);
  std::fill(state.chunk, state.chunk + kKeyChunk * head_dim, 0.0F);
  std::fill(state.maximum, state.maximum + num_rows, kNoMaximum);
  std::fill(state.sum, state.sum + num_rows, 0.0F);

  KeyTile ring[kChunksAhead + 1];
  std::int64_t begin = job.key_begin / kKeyChunk * kKeyChunk;
  for (int c = 0; c < kChunksAhead; ++c) {
    collect_keys(call, job, begin + c * kKeyChunk, kKeyChunk, &ring[c]);
  }
  for (int c = 0; begin < job.key_end; begin += kKeyChunk, c = (c + 1) % (kChunksAhead + 1)) {
    const KeyTile& keys = ring[c];
    KeyTile& ahead = ring[(c + kChunksAhead) % (kChunksAhead + 1)];
    collect_keys(call, job, begin + kChunksAhead * kKeyChunk, kKeyChunk, &ahead);
    load_chunk(call, keys, ahead, state.chunk);
    if (keys.count == 0) continue;
    for (int r = 0; r < num_rows;) {
      const float* query = state.queries + r * head_dim;
      float* products = state.weights + r * kKeyChunk;
      if (num_rows - r >= 4) {
        chunk_products<4, 2>(query, head_dim, state.chunk, head_dim / kBlock, products);
        finish_chunk<4, 1>(call, job, rule, keys, r, state);
        r += 4;
      } else if (num_rows - r >= 2) {
        chunk_products<2, 4>(query, head_dim, state.chunk, head_dim / kBlock, products);
        finish_chunk<2, 2>(call, job, rule, keys, r, state);
        r += 2;
      } else {
        chunk_products<1, 8>(query, head_dim, state.chunk, head_dim / kBlock, products);
        finish_chunk<1, 4>(call, job, rule, keys, r, state);
        r += 1;
      }
    }
  }
  const Wide d;
  for (int r = 0; r < num_rows; ++r) {
    const bool empty =
        job.rows[r].key_begin >= job.rows[r].key_end || state.sum[r] == 0.0F;
    job.lse[r] = empty ? kMinusInf : natural_lse(state.maximum[r], state.sum[r]);
    const auto factor = hn::Set(d, empty ? 0.0F : 1.0F / state.sum[r]);
    for (std::int64_t i = 0; i < rank; i += kLanes) {
      const auto value = hn::Mul(hn::Load(d, state.output + r * rank + i), factor);
      hn::StoreU(empty ? hn::Zero(d) : value, d, job.out + r * rank + i);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mla::cpu
HWY_AFTER_NAMESPACE();

#endif  // MLA_CPU_FEW_ROWS_INL_H_
