// sm90 kernels: f16, latent 256, rope 64.
#include "cuda/sm90/instantiate.cuh"

namespace mla::sm90 {

LaunchKernel kernel_f16_256_64(int rows) { return kernel_of_rows<__half, 4, 1>(rows); }

}  // namespace mla::sm90
