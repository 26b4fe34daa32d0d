// One-instruction wrappers of the Hopper instructions the kernels use.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mla::sm90::ptx {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

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

// Named barriers ----------------------------------------------------------------------------

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// The OR of every thread's predicate.
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool predicate) {
  uint32_t result;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; barrier.cta.red.or.pred q, %1, %2, p; "
      "selp.u32 %0, 1, 0, q; }"
      : "=r"(result)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(predicate))
      : "memory");
  return result != 0;
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
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/// Ordinary shared-memory writes become visible to the tensor cores and the copy engine.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Until all but the latest kPending groups of this thread have arrived.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
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
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}
/// The transpose of an 8 x 8 matrix of 16-bit values that lies across the warp.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t a) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}

/// Transposes the 4 x 4 matrix that lies across each quad of lanes, a row a lane: a[k] becomes a[q]
/// of lane k, q being the lane's number in its quad.
__device__ __forceinline__ void quad_transpose(uint32_t (&a)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0U, odd ? a[i] : a[i + 1], 1);
    (odd ? a[i] : a[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0U, upper ? a[i] : a[i + 2], 2);
    (upper ? a[i] : a[i + 2]) = other;
  }
}

/// The same pointer, but the compiler cannot tell: sums with constants are then not hoisted out of
/// loops, where each would hold two registers.
template <class P>
__device__ __forceinline__ P* opaque(P* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

/// Stores that stay in L2: other multiprocessors read them soon.
__device__ __forceinline__ void store_cg(float* target, float value) {
  __stcg(target, value);
}
__device__ __forceinline__ void store_cg(float* target, float a, float b) {
  __stcg(reinterpret_cast<float2*>(target), float2{a, b});
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

// Arithmetic --------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Memory order ------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
/// value = value >= last ? 0 : value + 1, without waiting for it.
__device__ __forceinline__ void increment_release(uint32_t* address, uint32_t last) {
  asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(address), "r"(last) : "memory");
}

}  // namespace mla::sm90::ptx
