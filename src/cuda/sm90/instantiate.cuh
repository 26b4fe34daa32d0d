// Launch and lookup of the instantiations of one element type.
#pragma once

#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/launch.hpp"

namespace mla::sm90 {

template <class T>
cudaError_t launch_kernel(const TensorMaps& maps, const KernelParams& params, int num_ctas,
                          cudaStream_t stream) {
  // The limit belongs to the function on the current device; setting it again is cheap and
  // harmless.
  const cudaError_t limit = cudaFuncSetAttribute(
      decode_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes);
  if (limit != cudaSuccess) return limit;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_ctas));
  config.blockDim = dim3(T::kThreads);
  config.dynamicSmemBytes = T::kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, decode_kernel<T>, maps, params);
}

/// The kernels of one width: three row-block sizes, with and without the rare paths.
template <class Element, int kLatentChunks, int kRopeChunks, bool kPlain>
LaunchKernel kernel_of_rows(int rows) {
  switch (rows) {
    case 16: return launch_kernel<Traits<Element, 16, kLatentChunks, kRopeChunks, kPlain>>;
    case 32: return launch_kernel<Traits<Element, 32, kLatentChunks, kRopeChunks, kPlain>>;
    default: return launch_kernel<Traits<Element, 64, kLatentChunks, kRopeChunks, kPlain>>;
  }
}
template <class Element, int kLatentChunks, int kRopeChunks>
LaunchKernel kernel_of(int rows, bool plain) {
  return plain ? kernel_of_rows<Element, kLatentChunks, kRopeChunks, true>(rows)
               : kernel_of_rows<Element, kLatentChunks, kRopeChunks, false>(rows);
}

}  // namespace mla::sm90
