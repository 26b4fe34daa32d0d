// wgmma m64nNk16 with f32 accumulators: the tensor-core instruction of every kernel here. One text
// per N serves both operand types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mla::sm90 {

/// Shared-memory operand of 128-byte-swizzled rows: the low half of its matrix descriptor, that is
/// the start address and, for MN-major operands, the stride between neighbouring 64-value columns
/// of swizzle atoms. The high half is the same for all: 1024 bytes between groups of eight rows,
/// and the swizzle. Operands further on in the same buffer differ by their distance in bytes / 16.
///
/// Whoever computes an address from the ring's cursor makes it uniform first (ptx::uniform): else
/// every instruction waits for its descriptor to move to a uniform register.
__device__ __forceinline__ uint32_t matrix_operand(uint32_t address, uint32_t leading_bytes = 16) {
  return ((address & 0x3FFFF) >> 4) | (leading_bytes >> 4 << 16);
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// d[64 x N] += A[64 x 16] * B[16 x N], both in shared memory (ss) or A in registers (rs). An
/// operand in shared memory is K-major, or MN-major where its kTranspose is 1. d: the thread's N/2
/// accumulators.
template <int kN, class Element>
struct Wgmma;

// clang-format off
#define MLA_ACC_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MLA_ACC_16(i) MLA_ACC_8(i), MLA_ACC_8(i + 8)
#define MLA_ACC_32(i) MLA_ACC_16(i), MLA_ACC_16(i + 16)
#define MLA_ACC_64(i) MLA_ACC_32(i), MLA_ACC_32(i + 32)
#define MLA_ACC_96(i) MLA_ACC_64(i), MLA_ACC_32(i + 64)
#define MLA_REG_0_7 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MLA_REG_8_15 "%8, %9, %10, %11, %12, %13, %14, %15"
#define MLA_REG_16_31 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MLA_REG_32_47 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MLA_REG_48_63 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MLA_REG_64_79 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define MLA_REG_80_95 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MLA_REG_32 MLA_REG_0_7 ", " MLA_REG_8_15 ", " MLA_REG_16_31
#define MLA_REG_64 MLA_REG_32 ", " MLA_REG_32_47 ", " MLA_REG_48_63
#define MLA_REG_96 MLA_REG_64 ", " MLA_REG_64_79 ", " MLA_REG_80_95
#define MLA_DESCRIPTOR(name, low) ".reg .b64 " name "; mov.b64 " name ", {" low ", 0x40000040}; "

// half: N/2, the number of accumulators; i0 to i5: the numbers of the operands behind them.
#define MLA_WGMMA(kN, half, Element, kType, registers, i0, i1, i2, i3, i4, i5)                     \
  template <>                                                                                      \
  struct Wgmma<kN, Element> {                                                                      \
    template <int kTransposeA, int kTransposeB>                                                    \
    static __device__ __forceinline__ void ss(float* d, uint32_t a, uint32_t b) {                  \
      asm volatile("{ " MLA_DESCRIPTOR("a", "%" #i0) MLA_DESCRIPTOR("b", "%" #i1)                  \
                   "wgmma.mma_async.sync.aligned.m64n" #kN "k16.f32." kType "." kType " {"         \
                   registers "}, a, b, 1, 1, 1, %" #i2 ", %" #i3 "; }"                             \
                   : MLA_ACC_##half(0)                                                             \
                   : "r"(a), "r"(b), "n"(kTransposeA), "n"(kTransposeB));                          \
    }                                                                                              \
    template <int kTransposeB>                                                                     \
    static __device__ __forceinline__ void rs(float* d, const uint32_t* a, uint32_t b) {           \
      asm volatile("{ " MLA_DESCRIPTOR("b", "%" #i4)                                               \
                   "wgmma.mma_async.sync.aligned.m64n" #kN "k16.f32." kType "." kType " {"         \
                   registers "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, b, 1, 1, 1, %" #i5 "; }" \
                   : MLA_ACC_##half(0)                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kTransposeB));        \
    }                                                                                              \
  };
MLA_WGMMA(16, 8, __nv_bfloat16, "bf16", MLA_REG_0_7, 8, 9, 10, 11, 12, 13)
MLA_WGMMA(16, 8, __half, "f16", MLA_REG_0_7, 8, 9, 10, 11, 12, 13)
MLA_WGMMA(32, 16, __nv_bfloat16, "bf16", MLA_REG_0_7 ", " MLA_REG_8_15, 16, 17, 18, 19, 20, 21)
MLA_WGMMA(32, 16, __half, "f16", MLA_REG_0_7 ", " MLA_REG_8_15, 16, 17, 18, 19, 20, 21)
MLA_WGMMA(64, 32, __nv_bfloat16, "bf16", MLA_REG_32, 32, 33, 34, 35, 36, 37)
MLA_WGMMA(64, 32, __half, "f16", MLA_REG_32, 32, 33, 34, 35, 36, 37)
MLA_WGMMA(128, 64, __nv_bfloat16, "bf16", MLA_REG_64, 64, 65, 66, 67, 68, 69)
MLA_WGMMA(128, 64, __half, "f16", MLA_REG_64, 64, 65, 66, 67, 68, 69)
MLA_WGMMA(192, 96, __nv_bfloat16, "bf16", MLA_REG_96, 96, 97, 98, 99, 100, 101)
MLA_WGMMA(192, 96, __half, "f16", MLA_REG_96, 96, 97, 98, 99, 100, 101)
#undef MLA_WGMMA

#undef MLA_ACC_8
#undef MLA_ACC_16
#undef MLA_ACC_32
#undef MLA_ACC_64
#undef MLA_ACC_96
#undef MLA_REG_0_7
#undef MLA_REG_8_15
#undef MLA_REG_16_31
#undef MLA_REG_32_47
#undef MLA_REG_48_63
#undef MLA_REG_64_79
#undef MLA_REG_80_95
#undef MLA_REG_32
#undef MLA_REG_64
#undef MLA_REG_96
#undef MLA_DESCRIPTOR
// clang-format on

}  // namespace mla::sm90
