// The f32 kernels for every instruction set that Highway dispatches here: AVX-512, AVX2 and one
// portable set. This file compiles itself once per target.
//
// Scalable vectors have no compile-time size, which the register tiles need; SSSE3 adds nothing to
// the other portable targets.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/highway_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/convert-inl.h"
#include "cpu/few_rows-inl.h"
#include "cpu/kernel.hpp"
#include "cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu {
namespace HWY_NAMESPACE {

std::size_t scratch_bytes(std::int64_t kv_lora_rank, std::int64_t qk_rope_head_dim) {
  return std::max(lanes_scratch_bytes(kv_lora_rank, qk_rope_head_dim),
                  few_rows_scratch_bytes(kv_lora_rank, qk_rope_head_dim));
}

void run_split(const CallView& call, const SplitJob& job, std::byte* scratch) {
  if (job.few_rows) {
    run_few_rows(call, job, scratch);
  } else {
    run_lanes(call, job, scratch);
  }
}

const KernelTable* kernels(const char* name) {
  static const KernelTable table{name, kKeyTile, scratch_bytes, run_split, store_row, merge_row};
  return &table;
}

}  // namespace HWY_NAMESPACE
}  // namespace mla::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace mla::cpu {
namespace {

[[maybe_unused]] bool machine_has(std::int64_t target) noexcept {
  return (static_cast<std::int64_t>(hwy::SupportedTargets()) & target) != 0;
}

}  // namespace

const KernelTable* avx512_kernels() noexcept {
#if HWY_TARGETS & HWY_AVX3
  if (machine_has(HWY_AVX3)) return N_AVX3::kernels("avx512");
#endif
  return nullptr;
}

const KernelTable* avx2_kernels() noexcept {
#if HWY_TARGETS & HWY_AVX2
  if (machine_has(HWY_AVX2)) return N_AVX2::kernels("avx2");
#endif
  return nullptr;
}

const KernelTable* portable_kernels() noexcept {
#if HWY_TARGETS & HWY_SSE4
  if (machine_has(HWY_SSE4)) return N_SSE4::kernels("portable");
#endif
  return HWY_STATIC_DISPATCH(kernels)("portable");
}

}  // namespace mla::cpu

#endif  // HWY_ONCE
