// What the AVX512_BF16 and the AMX kernel share of a split: scratch, Q packing, tile loading,
// softmax and the row statistics. They differ only in how the two products are formed.
//
// Rows are lanes. Layouts (bf16 unless said, [..][2] is a pair of neighbours along the reduction):
//   q      [groups][padded D / 2][16 rows][2]      packed once per split
//   keys   [kKeyTile][padded D]                    only where the cache cannot be read in place
//   v      [L / 16][kKeyTile / 2][16 dims][2]      packed once per tile, shared by all groups
//   scores [kMaxPassGroups][kKeyTile][16 rows]     f32, S^T
//   p      [kMaxPassGroups][kKeyTile / 2][16 rows][2]
//   o      [groups][L][16 rows], AMX: [groups][L / 16][16 rows][16 dims]   f32
// The dims of v and o are permuted within blocks of 32 (panel_slot).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/numeric.hpp"
#include "cpu/bf16_common.hpp"
#include "cpu/kernel.hpp"

#if defined(MLA_CPU_BF16)

namespace mla::cpu::bf16 {

inline constexpr std::int64_t kKeyTile = 128;
inline constexpr std::int64_t kMaxGroups = kMaxRows / kLanes;
inline constexpr std::int64_t kMaxPassGroups = 4;  ///< groups that one pass over a tile serves
/// Values between two 16-dim panels of v; the odd line keeps panels out of one another's L1 sets.
inline constexpr std::int64_t kPanelStride = kKeyTile * kLanes + 32;

/// Sizes that depend on shapes alone.
struct Shape {
  std::int64_t rank;      ///< L
  std::int64_t rope;      ///< R
  std::int64_t dim;       ///< D
  std::int64_t padded;    ///< D rounded up to 32: whole AMX steps
  std::int64_t q_stride;  ///< bf16 values of one packed group
};

inline Shape make_shape(std::int64_t rank, std::int64_t rope) {
  const std::int64_t padded = round_up(rank + rope, 32);
  return {rank, rope, rank + rope, padded, padded * kLanes};
}

struct Scratch {
  std::uint16_t* q;
  std::uint16_t* keys;
  std::uint16_t* zeros;  ///< [padded D], the row of a key that is not there
  std::uint16_t* v;
  std::uint16_t* p;
  std::uint16_t* p_rows;  ///< AMX: p transposed to [kMaxPassGroups][16 rows][kKeyTile]
  float* scores;
  float* o;
};

/// Lays the arrays out from `base`; returns the bytes used. `base` may be null to ask for the size.
inline std::size_t carve(const Shape& shape, std::byte* base, Scratch* scratch) {
  std::size_t used = 0;
  const auto take = [&](std::int64_t count, std::size_t element) {
    std::byte* at = base == nullptr ? nullptr : base + used;
    used += (static_cast<std::size_t>(count) * element + 63) / 64 * 64;
    return at;
  };
  const auto take_bf16 = [&](std::int64_t count) {
    return reinterpret_cast<std::uint16_t*>(take(count, 2));
  };
  const auto take_f32 = [&](std::int64_t count) {
    return reinterpret_cast<float*>(take(count, 4));
  };
  scratch->q = take_bf16(kMaxGroups * shape.q_stride);
  scratch->keys = take_bf16(kKeyTile * shape.padded);
  scratch->zeros = take_bf16(shape.padded);
  scratch->v = take_bf16(shape.rank / kLanes * kPanelStride);
  scratch->p = take_bf16(kMaxPassGroups * kKeyTile * kLanes);
  scratch->p_rows = take_bf16(kMaxPassGroups * kKeyTile * kLanes);
  scratch->scores = take_f32(kMaxPassGroups * kKeyTile * kLanes);
  scratch->o = take_f32(kMaxRows * shape.rank);
  return used;
}

inline std::size_t scratch_size(std::int64_t rank, std::int64_t rope) {
  Scratch scratch;
  return carve(make_shape(rank, rope), nullptr, &scratch);
}

/// Rows of a split by lane: what the softmax needs of them, and their running statistics.
struct RowStates {
  alignas(64) float max_log2[kMaxRows];   ///< running maximum, log2 units; -inf: no key yet
  alignas(64) float sum[kMaxRows];        ///< sum of the weights as the product with V sees them
  alignas(64) float exact_sum[kMaxRows];  ///< sum of the weights before their rounding to bf16
  alignas(64) float rescale[kMaxRows];    ///< factor of the sums so far, set by each tile
  alignas(64) std::int64_t key_begin[kMaxRows];
  alignas(64) std::int64_t key_end[kMaxRows];
  alignas(64) std::int64_t position[kMaxRows];
  alignas(64) float alibi_log2[kMaxRows];
  std::int64_t num_groups = 0;
  // Of the real rows of a group: the union and the intersection of their key ranges.
  std::int64_t union_begin[kMaxGroups], union_end[kMaxGroups];
  std::int64_t common_begin[kMaxGroups], common_end[kMaxGroups];
};

/// How dot products become scores in log2 units.
struct ScoreRule {
  float scale;     ///< bmm1_scale
  float soft_cap;  ///< 0: off
  bool alibi;
  bool in_place;        ///< scores are transformed before the softmax, which then scales by 1
  float softmax_scale;  ///< what the softmax multiplies with; positive
};

inline ScoreRule make_score_rule(const CallView& call) {
  const float scale_log2 = call.bmm1_scale * kLog2E;
  // The softmax takes the maximum before it scales, which only a positive factor allows.
  const bool in_place =
      call.logits_soft_cap > 0.0F || call.uses_alibi_slopes || !(scale_log2 > 0.0F);
  return {call.bmm1_scale, call.logits_soft_cap, call.uses_alibi_slopes, in_place,
          in_place ? 1.0F : scale_log2};
}

/// Addresses of the tile after the current one, so that its bytes come into L2 while this one is
/// computed. Steps of the value product fetch a few rows each.
struct Lookahead {
  std::int64_t first = -1;  ///< the tile that `rows` belongs to; -1: none
  std::int64_t next = 0;    ///< rows [next, end) are still to be fetched
  std::int64_t end = 0;
  std::int64_t rows_per_step = 0;
  std::int64_t row_bytes = 0;
  const std::byte* rows[kKeyTile];
};

MLA_INLINE_BF16 void fetch_ahead(Lookahead* ahead) {
  const std::int64_t left = ahead->end - ahead->next;
  const std::int64_t count = left < ahead->rows_per_step ? left : ahead->rows_per_step;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::byte* row = ahead->rows[ahead->next++];
    if (row == nullptr) continue;
    for (std::int64_t at = 0; at < ahead->row_bytes; at += 64) _mm_prefetch(row + at, _MM_HINT_T1);
  }
}

/// The keys of one tile as the products read them.
struct Tile {
  std::int64_t first = 0;  ///< local index of key 0, a multiple of kKeyTile
  std::int64_t begin = 0;  ///< keys that are computed, [begin, end): block multiples around the
  std::int64_t end = 0;    ///< part of the split in this tile
  bool all_valid = false;  ///< every key of [begin, end) exists
  std::int64_t num_nonfinite = 0;
  Lookahead* ahead = nullptr;
  const std::byte* rows[kKeyTile];  ///< bf16 values; a key that is not there reads zeros
  bool valid[kKeyTile];
  std::int64_t global[kKeyTile];     ///< global position; ALiBi only
  std::int32_t nonfinite[kKeyTile];  ///< keys with Inf or NaN in V; zero in v
};

inline void init_rows(const SplitJob& job, RowStates* rows) {
  rows->num_groups = (job.num_rows + kLanes - 1) / kLanes;
  for (std::int64_t g = 0; g < rows->num_groups; ++g) {
    rows->union_begin[g] = rows->common_begin[g] = job.key_end;
    rows->union_end[g] = rows->common_end[g] = job.key_begin;
    bool first = true;
    for (std::int64_t i = g * kLanes; i < (g + 1) * kLanes; ++i) {
      const bool real = i < job.num_rows;
      const bool empty = !real || job.rows[i].key_begin >= job.rows[i].key_end;
      rows->max_log2[i] = -std::numeric_limits<float>::infinity();
      rows->sum[i] = 0.0F;
      rows->exact_sum[i] = 0.0F;
      rows->rescale[i] = 1.0F;
      rows->key_begin[i] = empty ? 0 : job.rows[i].key_begin;
      rows->key_end[i] = empty ? 0 : job.rows[i].key_end;
      rows->position[i] = real ? job.rows[i].position : 0;
      rows->alibi_log2[i] = real ? job.rows[i].alibi_slope * kLog2E : 0.0F;
      if (!real) continue;
      const std::int64_t begin = rows->key_begin[i];
      const std::int64_t end = rows->key_end[i];
      if (!empty) {
        rows->union_begin[g] = begin < rows->union_begin[g] ? begin : rows->union_begin[g];
        rows->union_end[g] = end > rows->union_end[g] ? end : rows->union_end[g];
      }
      rows->common_begin[g] =
          first || begin > rows->common_begin[g] ? begin : rows->common_begin[g];
      rows->common_end[g] = first || end < rows->common_end[g] ? end : rows->common_end[g];
      first = false;
    }
  }
}

/// Q of all rows to [group][pair][16 rows][2]; missing rows and padding are zero.
MLA_TARGET_BF16 inline void pack_q(const CallView& call, const SplitJob& job, const Shape& shape,
                                   const Scratch& scratch) {
  const bool is_e4m3 = call.q_dtype == DType::kE4M3;
  const auto row_bytes = static_cast<std::size_t>(shape.padded) * 2;
  std::uint16_t* staging = scratch.keys;  // not used before the first tile
  for (std::int64_t g = 0; g * kLanes < job.num_rows; ++g) {
    for (std::int64_t r = 0; r < kLanes; ++r) {
      std::uint16_t* row = staging + r * shape.padded;
      const std::int64_t i = g * kLanes + r;
      if (i >= job.num_rows) {
        std::memset(row, 0, row_bytes);
        continue;
      }
      std::memset(row + shape.dim, 0, static_cast<std::size_t>(shape.padded - shape.dim) * 2);
      widen_to_bf16(job.rows[i].q_nope, is_e4m3, shape.rank, row);
      if (shape.rope > 0) widen_to_bf16(job.rows[i].q_pe, is_e4m3, shape.rope, row + shape.rank);
    }
    std::uint16_t* packed = scratch.q + g * shape.q_stride;
    for (std::int64_t d = 0; d < shape.padded; d += 2 * kLanes) {
      transpose_16x16(staging + d, shape.padded * 2, packed + d * kLanes, kLanes * 4);
    }
  }
}

/// Position of a dim of V, O and P V: whole blocks of 32 dims lie as the in-lane unpack
/// instructions leave them, and only the final result is put in order.
inline std::int64_t panel_slot(std::int64_t dim, std::int64_t rank) {
  const std::int64_t block = dim / 32 * 32;
  if (block + 32 > rank) return dim;
  const std::int64_t quad = dim % 32 / 4;
  return block + quad % 2 * 16 + quad / 2 * 4 + dim % 4;
}

/// Stores 32 dims of a row of O, given as two panels.
MLA_INLINE_BF16 void store_panels(__m512 even, __m512 odd, float* out) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  _mm512_storeu_ps(out, _mm512_permutex2var_ps(even, low, odd));
  _mm512_storeu_ps(out + kLanes, _mm512_permutex2var_ps(even, high, odd));
}

/// Interleaves the first L values of two keys into v. With kCheck, returns bit 0 / 1 when key 0 / 1
/// holds a value that is not finite.
template <bool kCheck>
MLA_TARGET_BF16 inline unsigned pack_value_pair(const std::byte* row0, const std::byte* row1,
                                                std::int64_t rank, std::uint16_t* v) {
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
  __m512i largest0 = _mm512_setzero_si512();
  __m512i largest1 = _mm512_setzero_si512();
  std::int64_t d = 0;
  for (; d + 32 <= rank; d += 32) {
    const __m512i a = _mm512_loadu_si512(row0 + d * 2);
    const __m512i b = _mm512_loadu_si512(row1 + d * 2);
    if constexpr (kCheck) {
      largest0 = _mm512_max_epu16(largest0, _mm512_and_si512(a, magnitude));
      largest1 = _mm512_max_epu16(largest1, _mm512_and_si512(b, magnitude));
    }
    std::uint16_t* panel = v + d / kLanes * kPanelStride;
    _mm512_store_si512(panel, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(panel + kPanelStride, _mm512_unpackhi_epi16(a, b));
  }
  if (d < rank) {  // 16 dims are left, which stay in order
    const auto* half0 = reinterpret_cast<const __m256i*>(row0 + d * 2);
    const auto* half1 = reinterpret_cast<const __m256i*>(row1 + d * 2);
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(half0));
    const __m512i b = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(half1)), 16);
    if constexpr (kCheck) {
      largest0 = _mm512_max_epu16(largest0, _mm512_and_si512(a, magnitude));
      largest1 = _mm512_max_epu16(largest1, _mm512_and_si512(b, magnitude));
    }
    _mm512_store_si512(v + d / kLanes * kPanelStride, _mm512_or_si512(a, b));
  }
  if constexpr (!kCheck) return 0;
  const __m512i infinity = _mm512_set1_epi16(0x7F80);
  const unsigned bad0 = _mm512_cmpge_epu16_mask(largest0, infinity) != 0 ? 1U : 0U;
  const unsigned bad1 = _mm512_cmpge_epu16_mask(largest1, infinity) != 0 ? 2U : 0U;
  return bad0 | bad1;
}

/// v of the tile. With kCheck, values that are not finite become zeros there, for a weight of 0
/// must kill them, and their keys are listed: the kernel gives them to the rows that see them.
template <bool kCheck>
MLA_TARGET_BF16 inline void pack_values(const Shape& shape, const Scratch& scratch, Tile* tile) {
  const auto* zeros = reinterpret_cast<const std::byte*>(scratch.zeros);
  tile->num_nonfinite = 0;
  for (std::int64_t k = tile->begin; k < tile->end; k += 2) {
    const std::byte* const* rows = tile->rows + k;
    std::uint16_t* v = scratch.v + k * kLanes;
    const unsigned bad = pack_value_pair<kCheck>(rows[0], rows[1], shape.rank, v);
    if (bad == 0) continue;
    const bool bad0 = (bad & 1U) != 0;
    const bool bad1 = (bad & 2U) != 0;
    if (bad0) tile->nonfinite[tile->num_nonfinite++] = static_cast<std::int32_t>(k);
    if (bad1) tile->nonfinite[tile->num_nonfinite++] = static_cast<std::int32_t>(k + 1);
    pack_value_pair<false>(bad0 ? zeros : rows[0], bad1 ? zeros : rows[1], shape.rank, v);
  }
}

/// Whether every row of the group sees every computed key of the tile.
inline bool fully_visible(const RowStates& rows, std::int64_t group, const Tile& tile) {
  return tile.all_valid && rows.common_begin[group] <= tile.first + tile.begin &&
         rows.common_end[group] >= tile.first + tile.end;
}

/// Whether some row of the group may see a key of the tile.
inline bool touches(const RowStates& rows, std::int64_t group, const Tile& tile) {
  return rows.union_begin[group] < tile.first + tile.end &&
         rows.union_end[group] > tile.first + tile.begin;
}

/// Resolves the keys of the tile at `first`, if the split has one there.
inline void look_ahead(const CallView& call, const SplitJob& job, std::int64_t first,
                       Lookahead* ahead) {
  ahead->first = first;
  ahead->next = 0;
  ahead->end = std::clamp<std::int64_t>(job.key_end - first, 0, kKeyTile);
  if (ahead->end > 0) resolve_keys(call, job.request, first, ahead->end, ahead->rows);
}

/// `steps` is how often the products of a tile call fetch_ahead.
inline void init_lookahead(const CallView& call, const Shape& shape, std::int64_t steps,
                           Lookahead* ahead) {
  ahead->row_bytes = shape.dim * (call.kv_format == KvFormat::kE4M3 ? 1 : 2);
  ahead->rows_per_step = (kKeyTile + steps - 1) / steps;
}

/// Resolves, decodes and packs the keys of the tile at `first` that the split covers. `block` is
/// the granularity of the products; `copy_rows` asks for rows padded to whole steps.
MLA_TARGET_BF16 inline void load_tile(const CallView& call, const SplitJob& job, const Shape& shape,
                                      const Scratch& scratch, const RowStates& rows,
                                      std::int64_t first, std::int64_t block, bool copy_rows,
                                      Tile* tile) {
  const std::int64_t begin = job.key_begin > first ? job.key_begin - first : 0;
  const std::int64_t end = job.key_end - first < kKeyTile ? job.key_end - first : kKeyTile;
  tile->first = first;
  tile->begin = begin / block * block;
  tile->end = round_up(end, block);
  if (tile->ahead->first == first) {
    std::copy(tile->ahead->rows + begin, tile->ahead->rows + end, tile->rows + begin);
  } else {
    resolve_keys(call, job.request, first + begin, end - begin, tile->rows + begin);
  }
  look_ahead(call, job, first + kKeyTile, tile->ahead);
  const bool is_e4m3 = call.kv_format == KvFormat::kE4M3;
  tile->all_valid = begin == tile->begin && end == tile->end;
  for (std::int64_t k = tile->begin; k < tile->end; ++k) {
    tile->valid[k] = k >= begin && k < end && tile->rows[k] != nullptr;
    if (!tile->valid[k]) {
      tile->all_valid = false;
      tile->rows[k] = reinterpret_cast<const std::byte*>(scratch.zeros);
      continue;
    }
    if (call.uses_alibi_slopes) tile->global[k] = global_position(call.cp, first + k);
    if (is_e4m3 || copy_rows) {
      std::uint16_t* row = scratch.keys + k * shape.padded;
      widen_to_bf16(tile->rows[k], is_e4m3, shape.dim, row);
      std::memset(row + shape.dim, 0, static_cast<std::size_t>(shape.padded - shape.dim) * 2);
      tile->rows[k] = reinterpret_cast<const std::byte*>(row);
    }
  }
  // Where all rows see all keys there is nothing to kill. A soft cap makes finite scores of
  // infinite keys; the other rows of the split must not decide how such a row is summed.
  bool check = call.logits_soft_cap > 0.0F;
  for (std::int64_t g = 0; g < rows.num_groups; ++g) check |= !fully_visible(rows, g, *tile);
  if (check) {
    pack_values<true>(shape, scratch, tile);
  } else {
    pack_values<false>(shape, scratch, tile);
  }
}

}  // namespace mla::cpu::bf16

#endif  // MLA_CPU_BF16
