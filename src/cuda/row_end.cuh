// Ends of rows: lse and factors; single elements and padding rows of the output.
#pragma once

#include "cuda/piece.cuh"
#include "cuda/scores.cuh"
#include "mla/tensor.hpp"

namespace mla::cuda {

/// A row's lse (natural log) and the weight of its attention part.
struct JoinedRow {
  float lse;
  float weight;
};

/// The sink joins the denominator.
__device__ __noinline__ inline JoinedRow join_finite_sink(float sink, float lse) {
  if (lse == -INFINITY) return {sink, 0.0F};
  const float m = fmaxf(lse, sink);
  const float total = m + __logf(__expf(lse - m) + __expf(sink - m));
  return {total, __expf(lse - total)};
}
__device__ __forceinline__ JoinedRow join_sink(const float* sinks, int head, float lse) {
  if (sinks == nullptr) return {lse, 1.0F};
  const float sink = __ldg(sinks + head);
  if (!(fabsf(sink) <= 3.402823466e38F)) return {lse, 1.0F};  // not finite: no sink
  return join_finite_sink(sink, lse);
}

/// A row, or a piece of one, that saw no key. A sum that is not a number is not empty: it is handed
/// on.
__device__ __forceinline__ bool saw_nothing(float sum) {
  return sum == 0.0F;
}

/// The end of row r of a piece, `max` in log2 units. Of a whole result: writes lse and returns the
/// factor of O. Of a cut one: O stays as it is, and what the merge needs to know goes along.
template <class T>
__device__ __forceinline__ float finish_row(const CallParams& p, const Piece<T::kRows>& piece,
                                            int r, float max, float sum) {
  if (!piece.whole) {
    const bool live = r < piece.num_rows;
    __stcg(p.partial_stats + piece.partial_slot * T::kRows + r,
           float2{live ? max : -INFINITY, live ? sum : 0.0F});
    return 0.0F;
  }
  if (r >= piece.num_rows) return 0.0F;
  const bool empty = saw_nothing(sum);
  const JoinedRow joined =
      join_sink(p.sinks, piece.row_head[r], empty ? -INFINITY : (max + __log2f(sum)) * kLn2);
  if (p.lse != nullptr) p.lse[piece.row_lse[r]] = joined.lse * p.lse_factor;
  return empty
             ? 0.0F
             : joined.weight * scale_of(p.bmm2_scale, p.bmm2_scale_pointer) * __fdividef(1.0F, sum);
}

/// Where a cut piece's O goes: [row][dim] f32.
template <class T>
__device__ __forceinline__ float* partial_of(const CallParams& p, const Piece<T::kRows>& piece) {
  return p.partial_out + static_cast<int64_t>(piece.partial_slot) * T::kLatent * T::kRows;
}

__device__ __noinline__ inline void store_element(const CallParams& p, int64_t offset,
                                                  float value) {
  switch (static_cast<DType>(p.out_dtype)) {
    case DType::kF32: static_cast<float*>(p.out)[offset] = value; return;
    case DType::kF16: static_cast<__half*>(p.out)[offset] = __float2half_rn(value); return;
    default: static_cast<__nv_bfloat16*>(p.out)[offset] = __float2bfloat16_rn(value); return;
  }
}

/// Two floats as 16-bit values of the output type.
__device__ __forceinline__ uint32_t pack_output(float a, float b, bool is_f16) {
  return is_f16 ? pack<__half>(a, b) : pack<__nv_bfloat16>(a, b);
}
__device__ __forceinline__ bool output_is_f16(const CallParams& p) {
  return static_cast<DType>(p.out_dtype) == DType::kF16;
}

/// Rows behind the last request; `token_end` is given.
template <int kThreads>
__device__ __noinline__ void store_padding(const CallParams& p, int latent, int thread) {
  const int64_t first = __ldg(p.token_end);
  const int64_t num_rows = (p.num_tokens - first) * p.num_heads;
  for (int64_t r = blockIdx.x; r < num_rows; r += gridDim.x) {
    const int token = static_cast<int>(first + r / p.num_heads);
    const int head = static_cast<int>(r % p.num_heads);
    for (int d = thread; d < latent; d += kThreads) {
      store_element(p, row_offset(p.out_stride, token, head) + d, 0.0F);
    }
    if (thread == 0) {
      const float lse = join_sink(p.sinks, head, -INFINITY).lse;
      if (p.lse != nullptr) p.lse[row_offset(p.lse_stride, token, head)] = lse * p.lse_factor;
    }
  }
}

}  // namespace mla::cuda
