// Vector pieces that the bf16 kernels (AVX512_BF16 and AMX) share: exp2, tanh, e4m3 decoding and
// the 16x16 transpose. Included only by per-ISA code; every function carries its own target.
#pragma once

#if defined(__x86_64__)
#define MLA_CPU_BF16 1

// GCC 12 takes the deliberately undefined operands inside its own intrinsics for mistakes.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

/// Functions that may use AVX512_BF16 instructions. No -march flag is ever set for these files.
#define MLA_TARGET_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define MLA_INLINE_BF16 MLA_TARGET_BF16 __attribute__((always_inline)) inline

/// Unrolls the next loop completely, so that arrays of accumulators live in registers at -O2 too.
#if defined(__clang__)
#define MLA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MLA_UNROLL _Pragma("GCC unroll 32")
#endif

namespace mla::cpu::bf16 {

inline constexpr float kLog2E = 1.44269504088896340736F;
inline constexpr double kLn2 = 0.693147180559945309417;

/// Rows of a group: the f32 lanes of one vector.
inline constexpr std::int64_t kLanes = 16;

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// 2^x with relative error 2.5e-7; exactly 1 at 0, exactly 0 below -149, NaN stays NaN.
MLA_INLINE_BF16 __m512 exp2(__m512 x) {
  // max returns its second operand when one is NaN.
  x = _mm512_max_ps(_mm512_set1_ps(-200.0F), x);
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.338130254e-03F);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.666368515e-03F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550381014e-02F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402234904e-01F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931471806e-01F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0F));
  return _mm512_scalef_ps(p, n);
}

/// tanh with relative error below 1e-6; NaN stays NaN.
MLA_INLINE_BF16 __m512 tanh(__m512 x) {
  const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0F));
  const __m512 a = _mm512_andnot_ps(_mm512_set1_ps(-0.0F), x);
  const __m512 one = _mm512_set1_ps(1.0F);
  const __m512 e = exp2(_mm512_mul_ps(a, _mm512_set1_ps(-2.0F * kLog2E)));
  const __m512 large = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  // Below 0.25 the quotient cancels, and the series is shorter than its rounding error.
  const __m512 a2 = _mm512_mul_ps(a, a);
  __m512 series = _mm512_set1_ps(62.0F / 2835.0F);
  series = _mm512_fmadd_ps(series, a2, _mm512_set1_ps(-17.0F / 315.0F));
  series = _mm512_fmadd_ps(series, a2, _mm512_set1_ps(2.0F / 15.0F));
  series = _mm512_fmadd_ps(series, a2, _mm512_set1_ps(-1.0F / 3.0F));
  const __m512 small = _mm512_fmadd_ps(_mm512_mul_ps(series, a2), a, a);
  const __mmask16 is_small = _mm512_cmp_ps_mask(a, _mm512_set1_ps(0.25F), _CMP_LT_OQ);
  return _mm512_or_ps(_mm512_mask_blend_ps(is_small, large, small), sign);
}

/// bf16 of 2^-9 * i: the subnormal codes of e4m3.
alignas(64) inline constexpr std::uint16_t kE4M3Subnormals[32] = {0x0000, 0x3B00, 0x3B80, 0x3BC0,
                                                                  0x3C00, 0x3C20, 0x3C40, 0x3C60};

/// 32 e4m3 codes to bf16, exactly; the NaN codes become NaN.
MLA_INLINE_BF16 __m512i e4m3_to_bf16(__m256i codes) {
  const __m512i wide = _mm512_cvtepu8_epi16(codes);
  const __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7F));
  const __m512i sign =
      _mm512_and_si512(_mm512_slli_epi16(wide, 8), _mm512_set1_epi16(static_cast<short>(0x8000)));
  __m512i value = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __mmask32 subnormal = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  value = _mm512_mask_permutexvar_epi16(value, subnormal, magnitude,
                                        _mm512_load_si512(kE4M3Subnormals));
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F));
  value = _mm512_mask_mov_epi16(value, nan, _mm512_set1_epi16(0x7FC0));
  return _mm512_or_si512(value, sign);
}

/// Decodes or copies `count` values (a multiple of 16) to bf16.
MLA_INLINE_BF16 void widen_to_bf16(const std::byte* source, bool is_e4m3, std::int64_t count,
                                   std::uint16_t* out) {
  if (!is_e4m3) {
    std::memcpy(out, source, static_cast<std::size_t>(count) * 2);
    return;
  }
  std::int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const auto* codes = reinterpret_cast<const __m256i*>(source + i);
    _mm512_storeu_si512(out + i, e4m3_to_bf16(_mm256_loadu_si256(codes)));
  }
  if (i < count) {
    const auto* codes = reinterpret_cast<const __m128i*>(source + i);
    const __m512i value = e4m3_to_bf16(_mm256_zextsi128_si256(_mm_loadu_si128(codes)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_castsi512_si256(value));
  }
}

/// out[j][i] = in[i][j] for 16x16 words of 32 bits; strides in bytes.
MLA_INLINE_BF16 void transpose_16x16(const void* in, std::int64_t in_stride, void* out,
                                     std::int64_t out_stride) {
  const auto* source = static_cast<const std::byte*>(in);
  auto* target = static_cast<std::byte*>(out);
  __m512i r[16];
  __m512i t[16];
  MLA_UNROLL
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(source + i * in_stride);
  MLA_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  MLA_UNROLL
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4a + c] holds column c + 4 * quarter of rows 4a..4a+3: now transpose the 128-bit quarters.
  MLA_UNROLL
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_i32x4(r[c], r[c + 4], 0x88);
    t[c + 4] = _mm512_shuffle_i32x4(r[c], r[c + 4], 0xDD);
    t[c + 8] = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0x88);
    t[c + 12] = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0xDD);
  }
  MLA_UNROLL
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm512_shuffle_i32x4(t[c], t[c + 8], 0x88);
    r[c + 8] = _mm512_shuffle_i32x4(t[c], t[c + 8], 0xDD);
    r[c + 4] = _mm512_shuffle_i32x4(t[c + 4], t[c + 12], 0x88);
    r[c + 12] = _mm512_shuffle_i32x4(t[c + 4], t[c + 12], 0xDD);
  }
  MLA_UNROLL
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(target + i * out_stride, r[i]);
}

}  // namespace mla::cpu::bf16

#endif  // __x86_64__
