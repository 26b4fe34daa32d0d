// Launch and lookup of the instantiations of one element type and cache.
#pragma once

#include "cuda/portable/kernel.cuh"
#include "cuda/portable/launch.hpp"

namespace mla::portable {

template <class T>
cudaError_t launch_kernel(const KernelParams& params, int num_ctas, int shared_bytes,
                          cudaStream_t stream) {
  // The limit belongs to the function on the current device; setting it again is cheap and
  // harmless.
  const cudaError_t limit = cudaFuncSetAttribute(
      decode_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (limit != cudaSuccess) return limit;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_ctas));
  config.blockDim = dim3(T::kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, decode_kernel<T>, params);
}

template <class T>
Kernel make_kernel() {
  return {launch_kernel<T>, [](int stages) { return SharedMap<T>::bytes(stages); }};
}

template <class Element, CacheKind kCache>
Kernel kernel_of(int rows) {
  switch (rows) {
    case 16: return make_kernel<Traits<Element, kCache, 16>>();
    case 32: return make_kernel<Traits<Element, kCache, 32>>();
    default: return make_kernel<Traits<Element, kCache, 64>>();
  }
}

}  // namespace mla::portable
