// sm90 kernels: f16, latent 512, rope 64.
#include "cuda/sm90/instantiate.cuh"

namespace mla::sm90 {

LaunchKernel kernel_f16_512_64(int rows, bool plain) { return kernel_of<__half, 8, 1>(rows, plain); }

}  // namespace mla::sm90
