// Ends of pieces: O^T fragments to out, or to f32 partials; partials of cut results to out.
#pragma once

#include "cuda/sm90/line.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/sm90/traits.cuh"
#include "mla/tensor.hpp"

namespace mla::sm90 {

__device__ __forceinline__ float scale_of(float value, const float* pointer) {
  return pointer != nullptr ? __ldg(pointer) : value;
}

/// The sink joins the denominator: weight of the attention part, and the total lse (natural log).
__device__ __noinline__ inline float join_finite_sink(float sink, float& lse) {
  if (lse == -INFINITY) {
    lse = sink;
    return 0.0F;
  }
  const float m = fmaxf(lse, sink);
  const float total = m + __logf(__expf(lse - m) + __expf(sink - m));
  const float weight = __expf(lse - total);
  lse = total;
  return weight;
}
__device__ __forceinline__ float join_sink(const float* sinks, int head, float& lse) {
  if (sinks == nullptr) return 1.0F;
  const float sink = __ldg(sinks + head);
  if (!(fabsf(sink) <= 3.402823466e38F)) return 1.0F;  // not finite: no sink
  return join_finite_sink(sink, lse);
}

__device__ __forceinline__ void store_element(const KernelParams& p, int64_t offset, float value) {
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

/// 16-bit output through a staging tile of [row][kStageDims], so that rows leave as 16-byte vectors. One
/// value warpgroup; `stage` is its half of a P buffer that the scores may not write yet.
template <class T>
__device__ void store_staged(const KernelParams& p, const Piece<T::kRows>& piece,
                             const Stats<T::kRows>& stats,
                             const float (&o)[T::kValueChunks][T::kRows / 2], int member, char* stage,
                             int warp, int lane) {
  constexpr int kSteps = 64 / T::kStageDims;      // of one chunk
  constexpr int kPitch = T::kStageDims * 2;       // bytes of a staged row
  constexpr int kVectors = T::kStageDims / 8;     // 16-byte vectors of a staged row
  const uint32_t stage_address = ptx::smem_address(stage);
  const int thread = warp * 32 + lane;
  const bool is_f16 = static_cast<DType>(p.out_dtype) == DType::kF16;
  const auto swizzled = [](int row, int vector) {
    return row * kPitch + ((vector ^ (kVectors == 8 ? row & 7 : row >> 1 & 3)) << 4);
  };
#pragma unroll
  for (int c = 0; c < T::kValueChunks; ++c) {
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      ptx::named_barrier_sync(kStageBarrier + member, 128);
      if (warp / (4 / kSteps) == step) {  // the warps that hold these dims
#pragma unroll
        for (int j = 0; j < T::kRows / 8; ++j) {
          const float f0 = stats.final_scale[column_of(j, 0, lane)];
          const float f1 = stats.final_scale[column_of(j, 1, lane)];
          const int vector = 2 * (warp % (4 / kSteps)) + (lane >> 3 & 1);
          ptx::stmatrix_x2_trans(stage_address + swizzled(8 * j + lane % 8, vector),
                                 pack_output(o[c][4 * j] * f0, o[c][4 * j + 1] * f1, is_f16),
                                 pack_output(o[c][4 * j + 2] * f0, o[c][4 * j + 3] * f1, is_f16));
        }
      }
      ptx::named_barrier_sync(kStageBarrier + member, 128);
      const int dim = T::value_dim(member, c) + step * T::kStageDims;
#pragma unroll 1
      for (int idx = thread; idx < piece.num_rows * kVectors; idx += 128) {
        const int r = idx / kVectors;
        const int v = idx % kVectors;
        const int64_t offset = row_offset(p.out_stride, piece.row_token[r], piece.row_head[r]) + dim + v * 8;
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + offset) =
            *reinterpret_cast<const uint4*>(stage + swizzled(r, v));
      }
    }
  }
  // Scores' ordinary writes follow these reads in the same buffer; the tensor cores read those.
  ptx::named_barrier_sync(kStageBarrier + member, 128);
}

/// Output element by element from a partial of this CTA.
template <class T>
__device__ __noinline__ void store_elements(const KernelParams& p, const Piece<T::kRows>& piece,
                                            const float* partial, int thread) {
  for (int idx = thread; idx < T::kLatent * T::kRows; idx += T::kValueThreads) {
    const int r = idx / T::kLatent;
    const int dim = idx % T::kLatent;
    if (r >= piece.num_rows) continue;
    const int64_t offset = row_offset(p.out_stride, piece.row_token[r], piece.row_head[r]);
    store_element(p, offset + dim, __ldcg(partial + dim * T::kRows + r));
  }
}

/// A normalised partial: [dim][row] f32, as the accumulators lie.
template <class T>
__device__ void store_partial(float* partial, const Stats<T::kRows>& stats,
                              const float (&o)[T::kValueChunks][T::kRows / 2], int member, int warp,
                              int lane) {
#pragma unroll
  for (int c = 0; c < T::kValueChunks; ++c) {
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const int column = column_of(j, 0, lane);
      const float f0 = stats.final_scale[column];
      const float f1 = stats.final_scale[column + 1];
      const int dim = T::value_dim(member, c) + 16 * warp + lane / 4;
      float* target = partial + dim * T::kRows + column;
      __stcg(reinterpret_cast<float2*>(target), float2{o[c][4 * j] * f0, o[c][4 * j + 1] * f1});
      __stcg(reinterpret_cast<float2*>(target + 8 * T::kRows),
             float2{o[c][4 * j + 2] * f0, o[c][4 * j + 3] * f1});
    }
  }
}

/// Rows behind the last request.
template <int kThreads>
__device__ __noinline__ void store_padding(const KernelParams& p, int latent, int thread) {
  if (p.query_start_loc == nullptr) return;
  const int64_t first = __ldg(p.query_start_loc + p.num_requests);
  const int64_t num_rows = (p.num_tokens - first) * p.num_heads;
  for (int64_t r = blockIdx.x; r < num_rows; r += gridDim.x) {
    const int token = static_cast<int>(first + r / p.num_heads);
    const int head = static_cast<int>(r % p.num_heads);
    for (int d = thread; d < latent; d += kThreads) {
      store_element(p, row_offset(p.out_stride, token, head) + d, 0.0F);
    }
    if (thread == 0) {
      float lse = -INFINITY;
      join_sink(p.sinks, head, lse);
      if (p.lse != nullptr) p.lse[row_offset(p.lse_stride, token, head)] = lse * p.lse_factor;
    }
  }
}

}  // namespace mla::sm90
