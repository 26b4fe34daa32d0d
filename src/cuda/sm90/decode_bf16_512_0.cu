// sm90 kernels: bf16, latent 512, rope 0.
#include "cuda/sm90/instantiate.cuh"

namespace mla::sm90 {

LaunchKernel kernel_bf16_512_0(int rows) { return kernel_of_rows<__nv_bfloat16, 8, 0>(rows); }

}  // namespace mla::sm90
