// Stands in for the instruction wrappers of src/cuda/sm90/ptx.cuh where device code runs on the
// host.
#pragma once

#include "cuda/sm90/arithmetic.cuh"

namespace mla::sm90::ptx {

inline void prefetch_l2(const void*) {}

}  // namespace mla::sm90::ptx
