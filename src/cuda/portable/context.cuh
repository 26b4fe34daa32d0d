// What the stages of the kernel share.
#pragma once

#include "cuda/portable/ptx.cuh"
#include "cuda/portable/traits.cuh"
#include "cuda/scores.cuh"

namespace mla::portable {

template <class T>
struct Context {
  const KernelParams& p;
  char* shared;
  int thread, warp, lane;

  __device__ SmallShared<T>& small() const {
    return *reinterpret_cast<SmallShared<T>*>(shared + SharedMap<T>::kSmall);
  }
  /// Fragments: one uint4 (P, Q) or float4 (scores) of every lane.
  __device__ uint4* query() const { return reinterpret_cast<uint4*>(shared); }
  __device__ float4* scores() const {
    return reinterpret_cast<float4*>(shared + SharedMap<T>::kScores);
  }
  __device__ uint4* probabilities(int version) const {
    return reinterpret_cast<uint4*>(shared + SharedMap<T>::kProbabilities +
                                    version * T::kProbabilityBytes);
  }
  __device__ char* stage(int slot) const {
    return shared + SharedMap<T>::kRing + slot * T::kStageBytes;
  }

  // QK's share of this warp.
  __device__ int width_part() const { return warp % T::kWidthParts; }
  __device__ int key_group() const { return warp / T::kWidthParts % T::kKeyGroups; }
  __device__ int row_group() const { return warp / (T::kWidthParts * T::kKeyGroups); }

  // Steps of 16 values, by part.
  __device__ int latent_steps() const { return p.latent / (16 * T::kWidthParts); }
  __device__ bool full_latent() const { return p.latent == kMaxLatent; }
  __device__ bool has_rope() const { return p.rope != 0; }
};

}  // namespace mla::portable
