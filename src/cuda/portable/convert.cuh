// e4m3 bytes to 16-bit elements, exactly and with integer instructions that every GPU has.
//
// Of four bytes, one call converts bytes 0 and 2, the other bytes 1 and 3: so no byte has to be
// moved. Whoever multiplies keeps the same order on the other side (query.cuh), and of values the
// even bytes are the even columns.
#pragma once

#include "cuda/portable/ptx.cuh"

namespace mla::portable {

/// Sign, exponent and mantissa at their places in an f16: the value times 2^-8, subnormals
/// included. (NaN bytes become 1.875: keys with NaN have no defined result.)
template <class Element>
__device__ __forceinline__ uint32_t even_bytes(uint32_t x);
template <class Element>
__device__ __forceinline__ uint32_t odd_bytes(uint32_t x);

template <>
__device__ __forceinline__ uint32_t even_bytes<__half>(uint32_t x) {
  return (x << 7 & 0x3F803F80U) | (x << 8 & 0x80008000U);
}
template <>
__device__ __forceinline__ uint32_t odd_bytes<__half>(uint32_t x) {
  return (x >> 1 & 0x3F803F80U) | (x & 0x80008000U);
}

/// In a bf16 the same gives the value times 2^-120, too small for f32 sums: multiplied back.
inline constexpr uint32_t kTwoTo120 = 0x7B807B80U;
template <>
__device__ __forceinline__ uint32_t even_bytes<__nv_bfloat16>(uint32_t x) {
  return ptx::multiply_bf16x2((x << 4 & 0x07F007F0U) | (x << 8 & 0x80008000U), kTwoTo120);
}
template <>
__device__ __forceinline__ uint32_t odd_bytes<__nv_bfloat16>(uint32_t x) {
  return ptx::multiply_bf16x2((x >> 4 & 0x07F007F0U) | (x & 0x80008000U), kTwoTo120);
}

/// One e4m3 value, for queries.
__device__ __forceinline__ float e4m3_to_float(uint32_t byte) {
  if ((byte & 0x7FU) == 0x7FU) return __int_as_float(0x7FC00000);
  const float magnitude = __half2float(__ushort_as_half(static_cast<uint16_t>((byte & 0x7FU) << 7)));
  return (byte & 0x80U) != 0 ? -256.0F * magnitude : 256.0F * magnitude;
}

}  // namespace mla::portable
