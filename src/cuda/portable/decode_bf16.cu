// Kernels for a cache of bf16.
#include "cuda/portable/instantiate.cuh"

namespace mla::portable {

Kernel kernel_bf16(int rows) {
  return kernel_of<__nv_bfloat16, CacheKind::k16Bit>(rows);
}

}  // namespace mla::portable
