// sm90 kernels: f16, latent 512, rope 0.
#include "cuda/sm90/instantiate.cuh"

namespace mla::sm90 {

LaunchKernel kernel_f16_512_0(int rows, bool plain) { return kernel_of<__half, 8, 0>(rows, plain); }

}  // namespace mla::sm90
