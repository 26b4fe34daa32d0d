// Whether the processor and the system offer what the bf16 kernels use.
#pragma once

#include "cpu/bf16_common.hpp"

#if defined(MLA_CPU_BF16)

#include <cpuid.h>

namespace mla::cpu::bf16 {

/// Register state that the system saves (XCR0); 0 when it saves none beyond SSE.
inline std::uint64_t saved_register_state() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & (1U << 27)) == 0) return 0;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

inline bool cpu_has_avx512_bf16() {
  constexpr std::uint64_t kZmmState = 0xE6;  // XMM, YMM, opmask, both ZMM halves
  if ((saved_register_state() & kZmmState) != kZmmState) return false;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const unsigned needed = (1U << 16) | (1U << 17) | (1U << 30) | (1U << 31);  // F, DQ, BW, VL
  if ((b & needed) != needed) return false;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return false;
  return (a & (1U << 5)) != 0;  // AVX512_BF16
}

inline bool cpu_has_amx_bf16() {
  constexpr std::uint64_t kTileState = 3ULL << 17;
  if (!cpu_has_avx512_bf16() || (saved_register_state() & kTileState) != kTileState) return false;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const unsigned needed = (1U << 22) | (1U << 24);  // AMX-BF16, AMX-TILE
  return (d & needed) == needed;
}

}  // namespace mla::cpu::bf16

#endif  // MLA_CPU_BF16
