// Score warpgroup: masks and the online softmax of S^T tiles, with a lazily moved maximum.
//
// A thread holds, of a 64-key x kRows tile, keys 16*warp + lane/4 (+8) and columns 8*j + 2*(lane%4) (+1)
// - so kRows/4 columns, two keys each. The maximum m of a column moves only when a score exceeds it by
// more than kSlack: most tiles then need one vote and no exchange. The decision is made per column, so a
// row's arithmetic does not depend on its neighbours in the block.
#pragma once

#include "cuda/sm90/line.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/traits.cuh"

namespace mla::sm90 {

inline constexpr float kSlack = 8.0F;  // log2: P stays below 256
inline constexpr float kLog2E = 1.44269504088896340736F;
inline constexpr float kLn2 = 0.69314718055994530942F;

template <int kRows>
struct SoftmaxState {
  float max[kRows / 4];  // log2 units; the same in every thread that shares the column
  float sum[kRows / 4];  // of this thread's keys only

  __device__ void reset() {
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      max[i] = -INFINITY;
      sum[i] = 0.0F;
    }
  }
};

/// Column of register pair element i of group j.
__device__ __forceinline__ int column_of(int j, int i, int lane) { return 8 * j + 2 * (lane % 4) + i; }

/// Soft cap and ALiBi, and any scale that is not positive: scores become log2 units in place.
template <int kRows>
__device__ void transform_scores(const KernelParams& p, const Stats<kRows>& stats,
                                 const Piece<kRows>& piece, float scale, int first_key, int warp,
                                 int lane, float (&s)[kRows / 2]) {
  for (int half = 0; half < 2; ++half) {
    const int key = first_key + 16 * warp + lane / 4 + 8 * half;
    const auto position = static_cast<int>(p.cp.world > 1 ? global_position(p.cp, key) : key);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = s[4 * j + 2 * half + i] * scale;
        if (p.logits_soft_cap > 0) {
          // cap * tanh(x / cap), tanh(y) = 1 - 2 / (exp(2 y) + 1)
          const float e = ptx::exp2_approx(2.0F * kLog2E * x / p.logits_soft_cap);
          x = p.logits_soft_cap * (1.0F - 2.0F / (e + 1.0F));
        }
        x *= kLog2E;
        const int column = column_of(j, i, lane);
        if (p.alibi_slopes != nullptr) {
          x += stats.slope[column] * static_cast<float>(position - piece.row_position(column));
        }
        s[4 * j + 2 * half + i] = x;
      }
    }
  }
}

/// Scores of keys that a row does not see become -inf, by selection.
template <int kRows>
__device__ void mask_scores(const Piece<kRows>& piece, int first_key, int warp, int lane,
                            float (&s)[kRows / 2]) {
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = column_of(j, i, lane);
      const int begin = piece.row_key_begin[column];
      const int end = piece.row_key_end[column];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = first_key + 16 * warp + lane / 4 + 8 * half;
        if (key < begin || key >= end) s[4 * j + 2 * half + i] = -INFINITY;
      }
    }
  }
}

/// Moves the maxima of the columns that need it and leaves the factors for the value warpgroups in
/// stats.rescale[buffer]. All 128 threads.
template <int kRows>
__device__ void move_maxima(Stats<kRows>& stats, int buffer, float scale_log2, int warp, int lane,
                            const float (&s)[kRows / 2], SoftmaxState<kRows>& state) {
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float column_max = fmaxf(s[4 * j + i], s[4 * j + 2 + i]) * scale_log2;
      for (int step = 4; step < 32; step *= 2) {
        column_max = fmaxf(column_max, __shfl_xor_sync(~0U, column_max, step));
      }
      if (lane < 4) stats.warp_max[warp][column_of(j, i, lane)] = column_max;
    }
  }
  ptx::named_barrier_sync(kScoreBarrier, 128);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = column_of(j, i, lane);
      const float tile_max = fmaxf(fmaxf(stats.warp_max[0][column], stats.warp_max[1][column]),
                                   fmaxf(stats.warp_max[2][column], stats.warp_max[3][column]));
      const float old_max = state.max[2 * j + i];
      const bool moves = tile_max > old_max + kSlack;  // also when old_max is -inf and a key is seen
      const float new_max = moves ? tile_max : old_max;
      const float factor = moves ? ptx::exp2_approx(old_max - new_max) : 1.0F;
      state.max[2 * j + i] = new_max;
      state.sum[2 * j + i] *= factor;
      if (warp == 0 && lane < 4) stats.rescale[buffer][column] = factor;
    }
  }
}

template <class Element>
__device__ __forceinline__ uint32_t pack(float a, float b);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float a, float b) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float a, float b) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}

/// P = exp2(s - m), summed in f32 and stored as [row][64 keys], 128-byte-swizzled.
template <class T>
__device__ void store_probabilities(uint32_t probabilities, float scale_log2, int warp, int lane,
                                    const float (&s)[T::kRows / 2], SoftmaxState<T::kRows>& state) {
#pragma unroll
  for (int j = 0; j < T::kRows / 8; ++j) {
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float m = state.max[2 * j + i % 2];
      // A column that has seen nothing has m = -inf and only -inf scores.
      e[i] = ptx::exp2_approx(fmaf(s[4 * j + i], scale_log2, m == -INFINITY ? 0.0F : -m));
    }
    state.sum[2 * j] += e[0] + e[2];
    state.sum[2 * j + 1] += e[1] + e[3];
    const int row = 8 * j + lane % 8;
    const uint32_t vector = (2 * warp + (lane >> 3 & 1)) ^ (row & 7);
    ptx::stmatrix_x2_trans(probabilities + row * 128 + (vector << 4),
                           pack<typename T::Element>(e[0], e[1]),
                           pack<typename T::Element>(e[2], e[3]));
  }
}

}  // namespace mla::sm90
