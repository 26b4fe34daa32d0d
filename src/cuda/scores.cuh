// Scalars that every kernel's softmax shares: scales, soft cap, ALiBi, pairs of 16-bit values.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/call_params.hpp"
#include "cuda/ptx.cuh"

namespace mla::cuda {

inline constexpr float kSlack = 8.0F;  // log2: P stays below 256
inline constexpr float kLog2E = 1.44269504088896340736F;
inline constexpr float kLn2 = 0.69314718055994530942F;

__device__ __forceinline__ float scale_of(float value, const float* pointer) {
  return pointer != nullptr ? __ldg(pointer) : value;
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

/// Soft cap and ALiBi of one score, and any scale that is not positive: the result is in log2
/// units.
__device__ __forceinline__ float transform_score(const CallParams& p, float x, float scale,
                                                 float slope, int distance) {
  x *= scale;
  if (p.logits_soft_cap > 0) {
    // cap * tanh(x / cap), tanh(y) = 1 - 2 / (exp(2 y) + 1)
    const float e = ptx::exp2_approx(2.0F * kLog2E * x / p.logits_soft_cap);
    x = p.logits_soft_cap * (1.0F - 2.0F / (e + 1.0F));
  }
  return x * kLog2E + slope * static_cast<float>(distance);
}

/// What scores are multiplied by, and whether transform_score has to see them.
struct ScoreScale {
  float scale;
  bool transforms;
  float log2;  // to log2 units, after the transform if there is one
};
template <class T>
__device__ __forceinline__ ScoreScale score_scale(const CallParams& p) {
  const float scale = scale_of(p.bmm1_scale, p.bmm1_scale_pointer);
  const bool transforms =
      !T::kPlain && (p.logits_soft_cap > 0 || p.alibi_slopes != nullptr || !(scale > 0.0F));
  return {scale, transforms, transforms ? 1.0F : scale * kLog2E};
}

}  // namespace mla::cuda
