// The host side of the portable kernels: which instantiation, ring, grid and workspace.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda/call.hpp"
#include "cuda/portable/params.hpp"

namespace mla::portable {

/// One instantiation: its launch and its shared memory for a ring of so many stages.
struct Kernel {
  cudaError_t (*launch)(const KernelParams& params, int num_ctas, int shared_bytes,
                        cudaStream_t stream);
  int (*shared_bytes)(int stages);
};

/// The instantiations by row-block size (16, 32 or 64).
Kernel kernel_bf16(int rows);         // decode_bf16.cu
Kernel kernel_f16(int rows);          // decode_f16.cu
Kernel kernel_e4m3(int rows);         // decode_e4m3.cu
Kernel kernel_fp8_ds_mla(int rows);   // decode_fp8_ds_mla.cu

/// What a plan fixes beside the geometry.
struct Setup {
  Geometry geometry;
  Kernel kernel;
  int num_stages = 0;
  int shared_bytes = 0;
};

/// For a device with so many multiprocessors and so much shared memory a CTA.
Setup make_setup(const PlanState& state, int num_multiprocessors, int shared_limit) noexcept;

/// `shared_cap` bounds what the device offers, so that smaller devices can be tested.
Status configure(PlanState& state, int shared_cap);
Status launch(const PlanState& state, const DecodeTensors& tensors, std::byte* workspace,
              void* stream, int shared_cap);

}  // namespace mla::portable
