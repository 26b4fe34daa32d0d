// One-instruction wrappers of the Hopper instructions the kernels use.
#pragma once

#include <cuda.h>

#include "cuda/ptx.cuh"

namespace mla::sm90::ptx {

using namespace mla::cuda::ptx;  // NOLINT(google-build-using-namespace)

// mbarrier ----------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t phase) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; "
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(phase)
      : "memory");
  return done != 0;
}
/// The same without waiting.
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t phase) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
      "p; "
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(phase)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t phase) {
  while (!mbarrier_try_wait(barrier, phase)) {
  }
}

// Dependent launches ------------------------------------------------------------------------

/// The next kernel of the stream may start its CTAs as soon as there is room for them.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
/// Waits until the kernels before this one have ended and what they wrote is visible to the grid.
__device__ __forceinline__ void wait_for_dependencies() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Copies ------------------------------------------------------------------------------------

/// One box of a 3-D tensor map to shared memory, completing on an mbarrier.
__device__ __forceinline__ void tma_load_3d(uint32_t smem, const CUtensorMap* map, int x, int y,
                                            int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], [%5];" ::"r"(smem),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
/// The same of a 4-D map, with an L2 policy.
__device__ __forceinline__ void tma_load_4d(uint32_t smem, const CUtensorMap* map, int x, int y,
                                            int z, int w, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, "
      "{%2, %3, %4, %5}], [%6], %7;" ::"r"(smem),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(policy)
      : "memory");
}
/// What is read once leaves L2 first, so that code, tables and partials stay.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/// Ordinary shared-memory writes become visible to the tensor cores and the copy engine.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t smem, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(smem), "r"(a),
               "r"(b)
               : "memory");
}

__device__ __forceinline__ void stmatrix_x4(uint32_t smem, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
/// The transpose of an 8 x 8 matrix of 16-bit values that lies across the warp.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t a) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}

/// The same pointer, but the compiler cannot tell: sums with constants are then not hoisted out of
/// loops, where each would hold two registers.
template <class P>
__device__ __forceinline__ P* opaque(P* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

/// The same value in every lane, and the compiler knows: it goes to a uniform register, once.
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
  return __shfl_sync(~0U, value, 0);
}

// Registers ---------------------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace mla::sm90::ptx
