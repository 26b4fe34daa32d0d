// Kernels for a cache of fp8_ds_mla.
#include "cuda/portable/instantiate.cuh"

namespace mla::portable {

Kernel kernel_fp8_ds_mla(int rows) {
  return kernel_of<__nv_bfloat16, CacheKind::kFp8DsMla>(rows);
}

}  // namespace mla::portable
