// The softmax of an S^T tile [keys][16 rows] of the bf16 kernels: vertical vector operations only.
#pragma once

#include "cpu/bf16_tile.hpp"

#if defined(MLA_CPU_BF16)

namespace mla::cpu::bf16 {

/// The lanes that see key k of the tile.
struct LaneRange {
  __m512i begin;
  __m512i end;
};

MLA_INLINE_BF16 LaneRange lane_range(const RowStates& rows, std::int64_t group, const Tile& tile) {
  alignas(64) std::int32_t begin[kLanes];
  alignas(64) std::int32_t end[kLanes];
  for (std::int64_t r = 0; r < kLanes; ++r) {
    const std::int64_t b = rows.key_begin[group * kLanes + r] - tile.first;
    const std::int64_t e = rows.key_end[group * kLanes + r] - tile.first;
    begin[r] = static_cast<std::int32_t>(b < 0 ? 0 : (b > kKeyTile ? kKeyTile : b));
    end[r] = static_cast<std::int32_t>(e < 0 ? 0 : (e > kKeyTile ? kKeyTile : e));
  }
  return {_mm512_load_si512(begin), _mm512_load_si512(end)};
}

MLA_INLINE_BF16 __mmask16 visible_lanes(const LaneRange& range, const Tile& tile, std::int64_t k) {
  const __m512i key = _mm512_set1_epi32(static_cast<std::int32_t>(k));
  const __mmask16 from = _mm512_cmple_epi32_mask(range.begin, key);
  const __mmask16 seen = _mm512_mask_cmplt_epi32_mask(from, key, range.end);
  return tile.valid[k] ? seen : static_cast<__mmask16>(0);
}

/// Soft cap, ALiBi and scales that are not positive: dot products become scores in log2 units.
MLA_TARGET_BF16 inline void transform_scores(const ScoreRule& rule, const RowStates& rows,
                                             std::int64_t group, const Tile& tile, float* scores) {
  const std::int64_t lane0 = group * kLanes;
  const __m512i position_low = _mm512_load_si512(rows.position + lane0);
  const __m512i position_high = _mm512_load_si512(rows.position + lane0 + 8);
  const __m512 slope = _mm512_load_ps(rows.alibi_log2 + lane0);
  const __m512 scale = _mm512_set1_ps(rule.scale);
  const __m512 cap = _mm512_set1_ps(rule.soft_cap);
  const __m512 log2e = _mm512_set1_ps(kLog2E);
  for (std::int64_t k = tile.begin; k < tile.end; ++k) {
    __m512 s = _mm512_mul_ps(_mm512_load_ps(scores + k * kLanes), scale);
    if (rule.soft_cap > 0.0F) s = _mm512_mul_ps(cap, tanh(_mm512_div_ps(s, cap)));
    s = _mm512_mul_ps(s, log2e);
    if (rule.alibi && tile.valid[k]) {
      const __m512i global = _mm512_set1_epi64(tile.global[k]);
      const __m256 low = _mm512_cvtepi64_ps(_mm512_sub_epi64(global, position_low));
      const __m256 high = _mm512_cvtepi64_ps(_mm512_sub_epi64(global, position_high));
      const __m512 distance = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
      s = _mm512_fmadd_ps(slope, distance, s);
    }
    _mm512_store_ps(scores + k * kLanes, s);
  }
}

/// scores -> weights p (bf16 pairs of keys), running maximum, sum and rescale factor of 16 rows.
/// The output is divided by the sum of the rounded weights, so that its weights add up to 1; the
/// lse is made from the sum of the exact ones. Returns whether some row's earlier sums must be
/// rescaled.
template <bool kMasked>
MLA_TARGET_BF16 inline bool softmax_tile(float softmax_scale, RowStates* rows, std::int64_t group,
                                         const Tile& tile, float* scores, std::uint16_t* p) {
  alignas(64) static constexpr std::uint16_t kInterleave[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const std::int64_t lane0 = group * kLanes;
  const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const __m512 scale = _mm512_set1_ps(softmax_scale);

  // Two maxima halve the dependency chain; a maximum does not depend on the order.
  __m512 even = none;
  __m512 odd = none;
  LaneRange range{};
  if constexpr (kMasked) range = lane_range(*rows, group, tile);
  for (std::int64_t k = tile.begin; k < tile.end; k += 2) {
    __m512 s0 = _mm512_load_ps(scores + k * kLanes);
    __m512 s1 = _mm512_load_ps(scores + (k + 1) * kLanes);
    if constexpr (kMasked) {
      s0 = _mm512_mask_blend_ps(visible_lanes(range, tile, k), none, s0);
      s1 = _mm512_mask_blend_ps(visible_lanes(range, tile, k + 1), none, s1);
      _mm512_store_ps(scores + k * kLanes, s0);
      _mm512_store_ps(scores + (k + 1) * kLanes, s1);
    }
    even = _mm512_max_ps(even, s0);
    odd = _mm512_max_ps(odd, s1);
  }
  const __m512 old_max = _mm512_load_ps(rows->max_log2 + lane0);
  const __m512 tile_max = _mm512_mul_ps(_mm512_max_ps(even, odd), scale);
  const __m512 new_max = _mm512_max_ps(old_max, tile_max);
  // A row without keys so far keeps its zeros: factor 1, and a shift that cannot make -inf - -inf.
  const __mmask16 fresh = _mm512_cmp_ps_mask(old_max, none, _CMP_EQ_OQ);
  const __mmask16 unseen = _mm512_cmp_ps_mask(new_max, none, _CMP_EQ_OQ);
  const __m512 shift = _mm512_mask_blend_ps(unseen, new_max, _mm512_setzero_ps());
  const __m512 one = _mm512_set1_ps(1.0F);
  const __m512 rescale = _mm512_mask_blend_ps(fresh, exp2(_mm512_sub_ps(old_max, shift)), one);

  const __m512i interleave = _mm512_load_si512(kInterleave);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
  __m512 sum0 = _mm512_setzero_ps();
  __m512 sum1 = _mm512_setzero_ps();
  __m512 exact0 = _mm512_setzero_ps();
  __m512 exact1 = _mm512_setzero_ps();
  for (std::int64_t k = tile.begin; k < tile.end; k += 2) {
    const __m512 s0 = _mm512_load_ps(scores + k * kLanes);
    const __m512 s1 = _mm512_load_ps(scores + (k + 1) * kLanes);
    const __m512 p0 = exp2(_mm512_fmsub_ps(s0, scale, shift));
    const __m512 p1 = exp2(_mm512_fmsub_ps(s1, scale, shift));
    exact0 = _mm512_add_ps(exact0, p0);
    exact1 = _mm512_add_ps(exact1, p1);
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(p1, p0);
    const __m512i pair = _mm512_permutexvar_epi16(interleave, halves);
    _mm512_store_si512(p + k * kLanes, pair);
    sum0 = _mm512_add_ps(sum0, _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)));
    sum1 = _mm512_add_ps(sum1, _mm512_castsi512_ps(_mm512_and_si512(pair, upper)));
  }
  const __m512 sum = _mm512_load_ps(rows->sum + lane0);
  const __m512 exact = _mm512_load_ps(rows->exact_sum + lane0);
  _mm512_store_ps(rows->sum + lane0, _mm512_fmadd_ps(sum, rescale, _mm512_add_ps(sum0, sum1)));
  _mm512_store_ps(rows->exact_sum + lane0,
                  _mm512_fmadd_ps(exact, rescale, _mm512_add_ps(exact0, exact1)));
  _mm512_store_ps(rows->max_log2 + lane0, new_max);
  _mm512_store_ps(rows->rescale + lane0, rescale);
  return _mm512_cmp_ps_mask(rescale, one, _CMP_NEQ_UQ) != 0;
}

/// The softmax of one group, with whatever masking and score transformation the tile needs.
MLA_TARGET_BF16 inline bool softmax_group(const ScoreRule& rule, RowStates* rows,
                                          std::int64_t group, const Tile& tile, float* scores,
                                          std::uint16_t* p) {
  if (rule.in_place) transform_scores(rule, *rows, group, tile, scores);
  return fully_visible(*rows, group, tile)
             ? softmax_tile<false>(rule.softmax_scale, rows, group, tile, scores, p)
             : softmax_tile<true>(rule.softmax_scale, rows, group, tile, scores, p);
}

/// lse of all rows, natural log.
inline void store_lse(const SplitJob& job, const RowStates& rows) {
  for (std::int64_t i = 0; i < job.num_rows; ++i) {
    job.lse[i] = rows.sum[i] == 0.0F
                     ? -std::numeric_limits<float>::infinity()
                     : static_cast<float>(static_cast<double>(rows.max_log2[i]) * kLn2 +
                                          std::log(static_cast<double>(rows.exact_sum[i])));
  }
}

}  // namespace mla::cpu::bf16

#endif  // MLA_CPU_BF16
