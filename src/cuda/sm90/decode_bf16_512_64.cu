// sm90 kernels: bf16, latent 512, rope 64.
#include "cuda/sm90/instantiate.cuh"

namespace mla::sm90 {

LaunchKernel kernel_bf16_512_64(int rows, bool plain) { return kernel_of<__nv_bfloat16, 8, 1>(rows, plain); }

}  // namespace mla::sm90
