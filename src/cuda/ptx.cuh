// One-instruction wrappers that every supported GPU has (sm_80 and later).
#pragma once

#include <cstdint>

namespace mla::cuda::ptx {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
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

// Copies ------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
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
// Fragments ---------------------------------------------------------------------------------

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
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

/// Stores that stay in L2: other multiprocessors read them soon.
__device__ __forceinline__ void store_cg(float* target, float value) {
  __stcg(target, value);
}
__device__ __forceinline__ void store_cg(float* target, float a, float b) {
  __stcg(reinterpret_cast<float2*>(target), float2{a, b});
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

}  // namespace mla::cuda::ptx
