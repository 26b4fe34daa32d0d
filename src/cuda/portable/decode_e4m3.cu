// Kernels for a cache of e4m3.
#include "cuda/portable/instantiate.cuh"

namespace mla::portable {

Kernel kernel_e4m3(int rows) {
  return kernel_of<__half, CacheKind::kE4M3>(rows);
}

}  // namespace mla::portable
