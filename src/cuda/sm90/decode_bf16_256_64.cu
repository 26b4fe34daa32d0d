// sm90 kernels: bf16, latent 256, rope 64.
#include "cuda/sm90/instantiate.cuh"

namespace mla::sm90 {

LaunchKernel kernel_bf16_256_64(int rows, bool plain) { return kernel_of<__nv_bfloat16, 4, 1>(rows, plain); }

}  // namespace mla::sm90
