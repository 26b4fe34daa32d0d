// Integer arithmetic of code that runs once a launch.
#pragma once

namespace mla::cuda {

/// a / b for 0 <= a, 0 < b and a quotient below 2^22. The usual instruction sequence is four times
/// as long, and code that runs once costs what its fetch does.
__device__ __forceinline__ int divide(int a, int b) {
  const int q = __float2int_rz(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  const int remainder = a - q * b;
  return q + (remainder >= b ? 1 : 0) - (remainder < 0 ? 1 : 0);
}

}  // namespace mla::cuda
