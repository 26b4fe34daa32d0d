// sm90 kernels: bf16, latent 512, rope 0.
#include "cuda/sm90/instantiate.cuh"

namespace mla::sm90 {

LaunchKernel kernel_bf16_512_0(int rows, bool plain) { return kernel_of<__nv_bfloat16, 8, 0>(rows, plain); }

}  // namespace mla::sm90
