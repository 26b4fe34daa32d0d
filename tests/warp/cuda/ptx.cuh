// Stands in for the instruction wrappers of src/cuda/ptx.cuh where device code runs on the
// host.
#pragma once

#include "cuda/arithmetic.cuh"

namespace mla::cuda::ptx {

inline void prefetch_l2(const void*) {}

}  // namespace mla::cuda::ptx
