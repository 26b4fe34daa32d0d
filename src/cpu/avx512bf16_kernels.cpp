// MLA decode with vdpbf16ps, rows in lanes.
//
//   S^T[key][16 rows] = sum over pairs of D   broadcast(key pair) . q[pair][16 rows][2]
//   O^T[dim][16 rows] = sum over pairs of keys  broadcast(v pair)  . p[pair][16 rows][2]
//
// Both products broadcast one 32-bit pair and hold 8 x groups accumulators; a bf16 cache is
// broadcast straight from its pages. A pass serves up to three groups of 16 rows, so that one
// broadcast feeds three products. A row's arithmetic is its lane's alone and the same for every
// number of groups.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/bf16_features.hpp"
#include "cpu/bf16_softmax.hpp"
#include "cpu/kernel.hpp"

#if defined(MLA_CPU_BF16)

namespace mla::cpu {
namespace {

using namespace bf16;

constexpr int kBlock = 8;            ///< keys or dims of a register tile
constexpr std::int64_t kChunk = 64;  ///< pairs of D whose sum is formed before it joins the score:
                                     ///< bounds the rounding error and keeps q in the L1 cache

MLA_INLINE_BF16 __m512bh broadcast_pair(const void* pair) {
  std::int32_t bits;
  std::memcpy(&bits, pair, sizeof(bits));
  return (__m512bh)_mm512_set1_epi32(bits);
}

MLA_INLINE_BF16 __m512bh load_pairs(const std::uint16_t* pairs) {
  return (__m512bh)_mm512_load_si512(pairs);
}

/// Scores of 8 keys and kGroups groups over the pairs [first, first + count) of D.
template <int kGroups>
MLA_TARGET_BF16 void score_block(const std::byte* const* rows, const std::uint16_t* q,
                                 std::int64_t q_stride, std::int64_t first, std::int64_t count,
                                 float* scores) {
  __m512 acc[kBlock][kGroups];
  MLA_UNROLL
  for (int k = 0; k < kBlock; ++k) {
    MLA_UNROLL
    for (int g = 0; g < kGroups; ++g) acc[k][g] = _mm512_setzero_ps();
  }
  const std::byte* key[kBlock];
  MLA_UNROLL
  for (int k = 0; k < kBlock; ++k) key[k] = rows[k] + first * 4;
  const std::uint16_t* q_at = q + first * 2 * kLanes;
  for (std::int64_t i = 0; i < count; ++i) {
    __m512bh q_pair[kGroups];
    MLA_UNROLL
    for (int g = 0; g < kGroups; ++g) q_pair[g] = load_pairs(q_at + g * q_stride + i * 2 * kLanes);
    MLA_UNROLL
    for (int k = 0; k < kBlock; ++k) {
      const __m512bh key_pair = broadcast_pair(key[k] + i * 4);
      MLA_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        acc[k][g] = _mm512_dpbf16_ps(acc[k][g], q_pair[g], key_pair);
      }
    }
  }
  MLA_UNROLL
  for (int k = 0; k < kBlock; ++k) {
    MLA_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      float* at = scores + (g * kKeyTile + k) * kLanes;
      // The first chunk is stored as it is, which spares clearing the scores.
      const __m512 sum = first == 0 ? acc[k][g] : _mm512_add_ps(_mm512_load_ps(at), acc[k][g]);
      _mm512_store_ps(at, sum);
    }
  }
}

/// S^T of kGroups groups from `group` on.
template <int kGroups>
MLA_TARGET_BF16 void score_tile(const Shape& shape, const Scratch& scratch, const Tile& tile,
                                std::int64_t group) {
  const std::uint16_t* q = scratch.q + group * shape.q_stride;
  const std::int64_t pairs = shape.dim / 2;
  for (std::int64_t first = 0; first < pairs; first += kChunk) {
    const std::int64_t count = std::min(kChunk, pairs - first);
    for (std::int64_t k = tile.begin; k < tile.end; k += kBlock) {
      score_block<kGroups>(tile.rows + k, q, shape.q_stride, first, count,
                           scratch.scores + k * kLanes);
    }
  }
}

/// O^T of 8 dims and kGroups groups: rescaled, plus P V over the computed keys of the tile.
template <int kGroups>
MLA_TARGET_BF16 void value_block(const std::uint16_t* v, const std::uint16_t* p,
                                 std::int64_t num_pairs, const float* rescale, float* o,
                                 std::int64_t o_stride) {
  __m512 acc[kBlock][kGroups];
  MLA_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    const __m512 factor = _mm512_load_ps(rescale + g * kLanes);
    MLA_UNROLL
    for (int d = 0; d < kBlock; ++d) {
      acc[d][g] = _mm512_mul_ps(_mm512_load_ps(o + g * o_stride + d * kLanes), factor);
    }
  }
  for (std::int64_t i = 0; i < num_pairs; ++i) {
    __m512bh weights[kGroups];
    MLA_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      weights[g] = load_pairs(p + (g * kKeyTile + i * 2) * kLanes);
    }
    MLA_UNROLL
    for (int d = 0; d < kBlock; ++d) {
      const __m512bh value = broadcast_pair(v + i * 2 * kLanes + d * 2);
      MLA_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        acc[d][g] = _mm512_dpbf16_ps(acc[d][g], weights[g], value);
      }
    }
  }
  MLA_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    MLA_UNROLL
    for (int d = 0; d < kBlock; ++d) {
      _mm512_store_ps(o + g * o_stride + d * kLanes, acc[d][g]);
    }
  }
}

template <int kGroups>
MLA_TARGET_BF16 void value_tile(const Shape& shape, const Scratch& scratch, const Tile& tile,
                                const RowStates& rows, std::int64_t group) {
  const std::int64_t o_stride = shape.rank * kLanes;
  for (std::int64_t d = 0; d < shape.rank; d += kBlock) {
    const std::uint16_t* panel = scratch.v + d / kLanes * kPanelStride + d % kLanes * 2;
    value_block<kGroups>(panel + tile.begin * kLanes, scratch.p + tile.begin * kLanes,
                         (tile.end - tile.begin) / 2, rows.rescale + group * kLanes,
                         scratch.o + group * o_stride + d * kLanes, o_stride);
    fetch_ahead(tile.ahead);
  }
}

/// The keys whose values are not finite, for exactly the rows that see them.
MLA_TARGET_BF16 void add_nonfinite_values(const Shape& shape, const Scratch& scratch,
                                          const Tile& tile, const RowStates& rows,
                                          std::int64_t group, const std::uint16_t* p) {
  const LaneRange range = lane_range(rows, group, tile);
  float* o = scratch.o + group * shape.rank * kLanes;
  for (std::int64_t n = 0; n < tile.num_nonfinite; ++n) {
    const std::int64_t k = tile.nonfinite[n];
    const __mmask16 seen = visible_lanes(range, tile, k);
    if (seen == 0) continue;
    const __m512i pair = _mm512_load_si512(p + k / 2 * 2 * kLanes);
    const __m512 weight = _mm512_castsi512_ps(
        k % 2 == 0 ? _mm512_slli_epi32(pair, 16)
                   : _mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xFFFF0000U))));
    for (std::int64_t d = 0; d < shape.rank; ++d) {
      std::uint16_t bits;
      std::memcpy(&bits, tile.rows[k] + d * 2, sizeof(bits));
      const __m512 value = _mm512_set1_ps(numeric::bf16_to_float(bits));
      float* at = o + panel_slot(d, shape.rank) * kLanes;
      const __m512 sum = _mm512_load_ps(at);
      _mm512_store_ps(at, _mm512_mask3_fmadd_ps(weight, value, sum, seen));
    }
  }
}

/// One tile against kGroups groups.
template <int kGroups>
MLA_TARGET_BF16 void run_pass(const ScoreRule& rule, const Shape& shape, const Scratch& scratch,
                              const Tile& tile, RowStates* rows, std::int64_t group) {
  bool touched = false;
  for (std::int64_t g = 0; g < kGroups; ++g) touched |= touches(*rows, group + g, tile);
  if (!touched) return;
  score_tile<kGroups>(shape, scratch, tile, group);
  for (std::int64_t g = 0; g < kGroups; ++g) {
    const std::int64_t offset = g * kKeyTile * kLanes;
    softmax_group(rule, rows, group + g, tile, scratch.scores + offset, scratch.p + offset);
  }
  value_tile<kGroups>(shape, scratch, tile, *rows, group);
  if (tile.num_nonfinite == 0) return;
  for (std::int64_t g = 0; g < kGroups; ++g) {
    add_nonfinite_values(shape, scratch, tile, *rows, group + g, scratch.p + g * kKeyTile * kLanes);
  }
}

/// 16 dims of O / sum, transposed to [16 rows][16 dims].
MLA_TARGET_BF16 void normalise_panel(const float* o, __m512 sum, float* panel) {
  const __mmask16 seen = _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  for (std::int64_t j = 0; j < kLanes; ++j) {
    const __m512 value = _mm512_load_ps(o + j * kLanes);
    _mm512_store_ps(panel + j * kLanes, _mm512_maskz_div_ps(seen, value, sum));
  }
  transpose_16x16(panel, kLanes * 4, panel, kLanes * 4);
}

MLA_TARGET_BF16 void store_out(const SplitJob& job, const Shape& shape, const Scratch& scratch,
                               const RowStates& rows) {
  alignas(64) float panels[2][kLanes * kLanes];
  for (std::int64_t i = 0; i < job.num_rows; i += kLanes) {
    const std::int64_t count = std::min(kLanes, job.num_rows - i);
    const __m512 sum = _mm512_load_ps(rows.sum + i);
    const float* o = scratch.o + i * shape.rank;
    for (std::int64_t d = 0; d < shape.rank; d += 2 * kLanes) {
      const bool whole = d + 2 * kLanes <= shape.rank;
      normalise_panel(o + d * kLanes, sum, panels[0]);
      if (whole) normalise_panel(o + (d + kLanes) * kLanes, sum, panels[1]);
      for (std::int64_t r = 0; r < count; ++r) {
        float* out = job.out + (i + r) * shape.rank + d;
        const __m512 even = _mm512_load_ps(panels[0] + r * kLanes);
        if (whole) {
          store_panels(even, _mm512_load_ps(panels[1] + r * kLanes), out);
        } else {
          _mm512_storeu_ps(out, even);
        }
      }
    }
  }
}

MLA_TARGET_BF16 void run_many_rows(const CallView& call, const SplitJob& job, std::byte* memory) {
  const Shape shape = make_shape(call.kv_lora_rank, call.qk_rope_head_dim);
  Scratch scratch;
  carve(shape, memory, &scratch);
  const ScoreRule rule = make_score_rule(call);
  RowStates rows;
  init_rows(job, &rows);
  pack_q(call, job, shape, scratch);
  std::memset(scratch.zeros, 0, static_cast<std::size_t>(shape.padded) * 2);
  std::memset(scratch.o, 0, static_cast<std::size_t>(rows.num_groups * kLanes * shape.rank) * 4);
  Lookahead ahead;
  init_lookahead(call, shape, (rows.num_groups + 2) / 3 * (shape.rank / kBlock), &ahead);
  Tile tile;
  tile.ahead = &ahead;
  for (std::int64_t first = job.key_begin / kKeyTile * kKeyTile; first < job.key_end;
       first += kKeyTile) {
    load_tile(call, job, shape, scratch, rows, first, kBlock, false, &tile);
    std::int64_t group = 0;
    while (group < rows.num_groups) {
      const std::int64_t left = rows.num_groups - group;
      if (left == 1) {
        run_pass<1>(rule, shape, scratch, tile, &rows, group);
        group += 1;
      } else if (left == 2 || left == 4) {  // 4 groups: two passes of 2, not 3 and 1
        run_pass<2>(rule, shape, scratch, tile, &rows, group);
        group += 2;
      } else {
        run_pass<3>(rule, shape, scratch, tile, &rows, group);
        group += 3;
      }
    }
  }
  store_out(job, shape, scratch, rows);
  store_lse(job, rows);
}

void run_split(const CallView& call, const SplitJob& job, std::byte* scratch) {
  if (job.few_rows) {
    avx512_kernels()->run_split(call, job, scratch);
  } else {
    run_many_rows(call, job, scratch);
  }
}

std::size_t scratch_bytes(std::int64_t kv_lora_rank, std::int64_t qk_rope_head_dim) {
  return std::max(scratch_size(kv_lora_rank, qk_rope_head_dim),
                  avx512_kernels()->scratch_bytes(kv_lora_rank, qk_rope_head_dim));
}

}  // namespace

const KernelTable* avx512bf16_kernels() noexcept {
  const KernelTable* base = avx512_kernels();
  if (base == nullptr || !cpu_has_avx512_bf16()) return nullptr;
  static const KernelTable table{"avx512bf16", kKeyTile,        scratch_bytes,
                                 run_split,    base->store_row, base->merge_row};
  return &table;
}

}  // namespace mla::cpu

#else

namespace mla::cpu {
const KernelTable* avx512bf16_kernels() noexcept {
  return nullptr;
}
}  // namespace mla::cpu

#endif
