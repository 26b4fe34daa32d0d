// Query rows as the A fragments of QK: in registers for blocks of 16 and 32 rows, in shared memory
// for 64.
//
// Of step s, lane (g, t) holds values of rows g and g + 8: of a 16-bit cache 2t, 2t+1 and 2t+8,
// 2t+9; of e4m3 bytes 4t, 4t+2 and 4t+1, 4t+3 (convert.cuh).
#pragma once

#include "cuda/portable/context.cuh"
#include "cuda/portable/convert.cuh"
#include "mla/tensor.hpp"

namespace mla::portable {

/// One value of a row, any type.
__device__ __forceinline__ float load_query_value(const KernelParams& p, const void* base,
                                                  int64_t offset) {
  switch (static_cast<DType>(p.q_dtype)) {
    case DType::kF16: return __half2float(static_cast<const __half*>(base)[offset]);
    case DType::kE4M3: return e4m3_to_float(static_cast<const uint8_t*>(base)[offset]);
    default: return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[offset]);
  }
}
__device__ __forceinline__ float2 load_query_pair(const KernelParams& p, const void* base,
                                                  int64_t offset) {
  if (!p.q_pair_loads) {
    return {load_query_value(p, base, offset), load_query_value(p, base, offset + 1)};
  }
  if (static_cast<DType>(p.q_dtype) == DType::kF16) {
    return __half22float2(*reinterpret_cast<const __half2*>(static_cast<const __half*>(base) + offset));
  }
  return __bfloat1622float2(
      *reinterpret_cast<const __nv_bfloat162*>(static_cast<const __nv_bfloat16*>(base) + offset));
}

/// Where a row of a piece lies in both operands.
struct QueryRow {
  int64_t nope, pe;
  bool live;
};
template <class T>
__device__ __forceinline__ QueryRow query_row(const KernelParams& p, const Piece<T::kRows>& piece,
                                              int r) {
  const int row = piece.row_begin + min(r, piece.num_rows - 1);
  const int i = p.heads_divisor.divide(row);
  const int head = row - i * p.num_heads;
  return {row_offset(p.q_nope_stride, piece.first_token + i, head),
          row_offset(p.q_pe_stride, piece.first_token + i, head), r < piece.num_rows};
}

/// What is left of a query after its rounding to bf16, for `split_query`.
enum class QueryPart { kRounded, kRest };

/// Two registers of one row: step `step` of the whole width, in units of 16 values; `latent` says
/// of which operand.
template <class T>
__device__ __forceinline__ void load_query_fragment(const Context<T>& c, const QueryRow& row,
                                                    bool latent, int step, float scale,
                                                    QueryPart part, uint32_t& first,
                                                    uint32_t& second) {
  first = second = 0;
  if (!row.live) return;
  const KernelParams& p = c.p;
  const void* base = latent ? p.q_nope : p.q_pe;
  const bool bytes =
      T::kCache == CacheKind::kE4M3 || (T::kCache == CacheKind::kFp8DsMla && latent);
  const int t = c.lane % 4;
  const int64_t offset = (latent ? row.nope : row.pe) + step * 16 + (bytes ? 4 * t : 2 * t);
  const float2 low = load_query_pair(p, base, offset);
  const float2 high = load_query_pair(p, base, offset + (bytes ? 2 : 8));
  float4 x = bytes ? float4{low.x, high.x, low.y, high.y} : float4{low.x, low.y, high.x, high.y};
  x = float4{x.x * scale, x.y * scale, x.z * scale, x.w * scale};
  if (part == QueryPart::kRest) {
    x.x -= __bfloat162float(__float2bfloat16_rn(x.x));
    x.y -= __bfloat162float(__float2bfloat16_rn(x.y));
    x.z -= __bfloat162float(__float2bfloat16_rn(x.z));
    x.w -= __bfloat162float(__float2bfloat16_rn(x.w));
  }
  first = pack<typename T::Element>(x.x, x.y);
  second = pack<typename T::Element>(x.z, x.w);
}

/// A power of two that brings the largest value of a bf16 row into f16's range; a warp a row.
template <class T>
__device__ __noinline__ void scale_query_rows(const Context<T>& c, const Piece<T::kRows>& piece) {
  const KernelParams& p = c.p;
#pragma unroll 1
  for (int r = c.warp; r < T::kRows; r += T::kWarps) {
    const QueryRow row = query_row<T>(p, piece, r);
    float largest = 0.0F;
    for (int d = c.lane; d < p.latent; d += 32)
      largest = fmaxf(largest, fabsf(load_query_value(p, p.q_nope, row.nope + d)));
    for (int d = c.lane; d < p.rope; d += 32)
      largest = fmaxf(largest, fabsf(load_query_value(p, p.q_pe, row.pe + d)));
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, step));
    // 2^e <= largest < 2^(e+1) goes to 2^14; where that is no f32 any more, as far as it is.
    const int exponent = (__float_as_int(largest) >> 23 & 0xFF) - 127;
    const int shift = largest > 0.0F && exponent < 128 ? min(14 - exponent, 126) : 0;
    if (c.lane == 0) c.small().query_scale[r] = __int_as_float((127 - shift) << 23);
  }
}

/// 1 / 2^n, exactly.
__device__ __forceinline__ float inverse_power(float power) {
  return __int_as_float((254 << 23) - __float_as_int(power));
}

}  // namespace mla::portable
