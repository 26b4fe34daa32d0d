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
#define MLA_OPERANDS(low_a, low_b)                               \
  "{ .reg .b64 operand_a, operand_b; mov.b64 operand_a, {" low_a \
  ", 0x40000040}; mov.b64 operand_b, {" low_b ", 0x40000040};\n"

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
/// operand is K-major, or MN-major where its kTranspose is 1; A in registers and B of rs are
/// K-major. d: the thread's N/2 accumulators.
template <int kN, class Element>
struct Wgmma;

#define MLA_WGMMA_16(Element, kType)                                                            \
  template <>                                                                                   \
  struct Wgmma<16, Element> {                                                                   \
    template <int kTransposeA, int kTransposeB>                                                 \
    static __device__ __forceinline__ void ss(float* d, uint32_t a, uint32_t b) {               \
      asm volatile(MLA_OPERANDS("%8", "%9") "wgmma.mma_async.sync.aligned.m64n16k16.f32." kType \
                                            "." kType                                           \
                                            " "                                                 \
                                            "{%0, %1, %2, %3, %4, %5, %6, %7}, "                \
                                            "operand_a, operand_b, 1, 1, 1, %10, %11; }"        \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),    \
                     "+f"(d[6]), "+f"(d[7])                                                     \
                   : "r"(a), "r"(b), "n"(kTransposeA), "n"(kTransposeB));                       \
    }                                                                                           \
  };
MLA_WGMMA_16(__nv_bfloat16, "bf16")
MLA_WGMMA_16(__half, "f16")
#undef MLA_WGMMA_16

#define MLA_WGMMA_32(Element, kType)                                                            \
  template <>                                                                                   \
  struct Wgmma<32, Element> {                                                                   \
    template <int kTransposeA, int kTransposeB>                                                 \
    static __device__ __forceinline__ void ss(float* d, uint32_t a, uint32_t b) {               \
      asm volatile(                                                                             \
          MLA_OPERANDS(                                                                         \
              "%16",                                                                            \
              "%17") "wgmma.mma_async.sync.aligned.m64n32k16.f32." kType "." kType              \
                     " "                                                                        \
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
                     "operand_a, operand_b, 1, 1, 1, %18, %19; }"                               \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),          \
            "+f"(d[13]), "+f"(d[14]), "+f"(d[15])                                               \
          : "r"(a), "r"(b), "n"(kTransposeA), "n"(kTransposeB));                                \
    }                                                                                           \
  };
MLA_WGMMA_32(__nv_bfloat16, "bf16")
MLA_WGMMA_32(__half, "f16")
#undef MLA_WGMMA_32

#define MLA_WGMMA_64(Element, kType)                                                               \
  template <>                                                                                      \
  struct Wgmma<64, Element> {                                                                      \
    template <int kTransposeA, int kTransposeB>                                                    \
    static __device__ __forceinline__ void ss(float* d, uint32_t a, uint32_t b) {                  \
      asm volatile(                                                                                \
          MLA_OPERANDS(                                                                            \
              "%32",                                                                               \
              "%33") "wgmma.mma_async.sync.aligned.m64n64k16.f32." kType "." kType                 \
                     " "                                                                           \
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "     \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, " \
                     "%31}, "                                                                      \
                     "operand_a, operand_b, 1, 1, 1, %34, %35; }"                                  \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),    \
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),             \
            "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),          \
            "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),          \
            "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),          \
            "+f"(d[31])                                                                            \
          : "r"(a), "r"(b), "n"(kTransposeA), "n"(kTransposeB));                                   \
    }                                                                                              \
    static __device__ __forceinline__ void rs(float* d, const uint32_t (&a)[4], uint32_t b) {      \
      asm volatile(                                                                                \
          MLA_OPERANDS(                                                                            \
              "%36",                                                                               \
              "%36") "wgmma.mma_async.sync.aligned.m64n64k16.f32." kType "." kType                 \
                     " "                                                                           \
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "     \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, " \
                     "%31}, "                                                                      \
                     "{%32, %33, %34, %35}, operand_b, 1, 1, 1, 0; }"                              \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),    \
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),             \
            "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),          \
            "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),          \
            "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),          \
            "+f"(d[31])                                                                            \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                                   \
    }                                                                                              \
  };
MLA_WGMMA_64(__nv_bfloat16, "bf16")
MLA_WGMMA_64(__half, "f16")
#undef MLA_WGMMA_64

#define MLA_WGMMA_128(Element, kType)                                                              \
  template <>                                                                                      \
  struct Wgmma<128, Element> {                                                                     \
    template <int kTransposeA, int kTransposeB>                                                    \
    static __device__ __forceinline__ void ss(float* d, uint32_t a, uint32_t b) {                  \
      asm volatile(                                                                                \
          MLA_OPERANDS(                                                                            \
              "%64",                                                                               \
              "%65") "wgmma.mma_async.sync.aligned.m64n128k16.f32." kType "." kType                \
                     " "                                                                           \
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "     \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, " \
                     "%31, "                                                                       \
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
                     "%47, "                                                                       \
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, " \
                     "%63}, "                                                                      \
                     "operand_a, operand_b, 1, 1, 1, %66, %67; }"                                  \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),    \
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),             \
            "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),          \
            "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),          \
            "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),          \
            "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),          \
            "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),          \
            "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),          \
            "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),          \
            "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]),          \
            "+f"(d[61]), "+f"(d[62]), "+f"(d[63])                                                  \
          : "r"(a), "r"(b), "n"(kTransposeA), "n"(kTransposeB));                                   \
    }                                                                                              \
  };
MLA_WGMMA_128(__nv_bfloat16, "bf16")
MLA_WGMMA_128(__half, "f16")
#undef MLA_WGMMA_128

#define MLA_WGMMA_192(Element, kType)                                                              \
  template <>                                                                                      \
  struct Wgmma<192, Element> {                                                                     \
    template <int kTransposeA, int kTransposeB>                                                    \
    static __device__ __forceinline__ void ss(float* d, uint32_t a, uint32_t b) {                  \
      asm volatile(                                                                                \
          MLA_OPERANDS(                                                                            \
              "%96",                                                                               \
              "%97") "wgmma.mma_async.sync.aligned.m64n192k16.f32." kType "." kType                \
                     " "                                                                           \
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "     \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, " \
                     "%31, "                                                                       \
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
                     "%47, "                                                                       \
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, " \
                     "%63, "                                                                       \
                     "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, " \
                     "%79, "                                                                       \
                     "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, " \
                     "%95}, "                                                                      \
                     "operand_a, operand_b, 1, 1, 1, %98, %99; }"                                  \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),    \
            "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),             \
            "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),          \
            "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),          \
            "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),          \
            "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),          \
            "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),          \
            "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),          \
            "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),          \
            "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]),          \
            "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]),          \
            "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]),          \
            "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]),          \
            "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]),          \
            "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]),          \
            "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])                        \
          : "r"(a), "r"(b), "n"(kTransposeA), "n"(kTransposeB));                                   \
    }                                                                                              \
  };
MLA_WGMMA_192(__nv_bfloat16, "bf16")
MLA_WGMMA_192(__half, "f16")
#undef MLA_WGMMA_192
#undef MLA_OPERANDS

}  // namespace mla::sm90
