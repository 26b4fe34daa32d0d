// Kernels for a cache of f16.
#include "cuda/portable/instantiate.cuh"

namespace mla::portable {

Kernel kernel_f16(int rows) {
  return kernel_of<__half, CacheKind::k16Bit>(rows);
}

}  // namespace mla::portable
