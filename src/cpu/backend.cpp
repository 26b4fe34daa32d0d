// The CPU rows of the backend table, fastest first.
#include <omp.h>

#include <string>
#include <vector>

#include "core/backend.hpp"
#include "core/diagnostics.hpp"
#include "core/element.hpp"
#include "cpu/driver.hpp"
#include "cpu/kernel.hpp"
#include "cpu/reference.hpp"

namespace mla::cpu {
namespace {

std::string serves_all(const DecodeProblem&, const PlanOptions&) { return {}; }

/// The 16-bit dot-product rows keep Q, K and V in bf16, which is exact for bf16 and e4m3 only.
std::string serves_bf16(const DecodeProblem& problem, const PlanOptions&) {
  if (problem.q_dtype == DType::kF16) return "q is f16, which bf16 products would round";
  if (problem.kv_format == KvFormat::kF16) return "the cache is f16, which bf16 products would round";
  if (problem.kv_format == KvFormat::kFp8DsMla) return "fp8_ds_mla scales do not fit bf16 exactly";
  return {};
}

/// One row: an accessor of the instruction set's kernels, and what it needs to run.
template <const KernelTable* (*kKernels)() noexcept>
struct Row {
  static Status configure_plan(PlanState& state) { return configure(state, *kKernels()); }
  static Status launch_plan(const PlanState& state, const DecodeTensors& tensors,
                            std::byte* workspace, void* /*stream*/) {
    return launch(state, *kKernels(), tensors, workspace);
  }
};

std::string missing_avx2(int) { return avx2_kernels() ? "" : "needs a CPU with AVX2 and FMA"; }
std::string missing_avx512(int) { return avx512_kernels() ? "" : "needs a CPU with AVX-512 (F, BW, DQ, VL)"; }
std::string missing_avx512bf16(int) { return avx512bf16_kernels() ? "" : "needs a CPU with AVX512_BF16"; }
std::string missing_amx(int) {
  return amx_kernels() ? "" : "needs a CPU with AMX-BF16 and an operating system that grants it";
}
std::string missing_portable(int) { return portable_kernels() ? "" : "needs a vector unit that Highway knows"; }
std::string missing_nothing(int) { return {}; }

Status configure_reference(PlanState& state) {
  state.num_workers = state.options.num_threads > 0 ? state.options.num_threads : omp_get_max_threads();
  state.workspace_bytes = 0;
  return {};
}

Status launch_reference(const PlanState& state, const DecodeTensors& tensors, std::byte*, void*) {
  const DecodeProblem& problem = state.problem;
  const DType out_dtype = problem.resolved_out_dtype();
  const std::int64_t num_rows = problem.num_tokens * problem.num_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(state.num_workers)
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t token = row / problem.num_heads;
    const std::int64_t head = row % problem.num_heads;
    std::vector<double> value(static_cast<std::size_t>(problem.kv_lora_rank));
    double lse = 0;
    reference_row(problem, tensors, token, head, value.data(), &lse);
    std::byte* out = row_address(tensors.out, token, head);
    for (std::int64_t d = 0; d < problem.kv_lora_rank; ++d) {
      store_element(out, out_dtype, d, static_cast<float>(value[static_cast<std::size_t>(d)]));
    }
    if (!tensors.lse.given()) continue;
    store_element(row_address(tensors.lse, token, head), DType::kF32, 0, static_cast<float>(lse));
  }
  return {};
}

}  // namespace

std::vector<const KernelEntry*> backend_rows() {
  static const KernelEntry amx{
      "cpu_amx",         "AMX bf16 tiles, 16-bit P",   DeviceKind::kCpu,
      missing_amx,       serves_bf16,                  Row<amx_kernels>::configure_plan,
      Row<amx_kernels>::launch_plan, true};
  static const KernelEntry avx512bf16{
      "cpu_avx512bf16",  "AVX-512 bf16 dot products, 16-bit P", DeviceKind::kCpu,
      missing_avx512bf16, serves_bf16,                 Row<avx512bf16_kernels>::configure_plan,
      Row<avx512bf16_kernels>::launch_plan, true};
  static const KernelEntry avx512{
      "cpu_avx512",      "AVX-512 f32",                DeviceKind::kCpu,
      missing_avx512,    serves_all,                   Row<avx512_kernels>::configure_plan,
      Row<avx512_kernels>::launch_plan, true};
  static const KernelEntry avx2{
      "cpu_avx2",        "AVX2 + FMA f32",             DeviceKind::kCpu,
      missing_avx2,      serves_all,                   Row<avx2_kernels>::configure_plan,
      Row<avx2_kernels>::launch_plan, true};
  static const KernelEntry portable{
      "cpu_portable",    "the baseline vector unit (SSE4, NEON, ...), f32", DeviceKind::kCpu,
      missing_portable,  serves_all,                   Row<portable_kernels>::configure_plan,
      Row<portable_kernels>::launch_plan, true};
  static const KernelEntry reference{
      "cpu_reference",   "the oracle: plain loops in f64", DeviceKind::kCpu,
      missing_nothing,   serves_all,                   configure_reference,
      launch_reference,  true};
  return {&amx, &avx512bf16, &avx512, &avx2, &portable, &reference};
}

}  // namespace mla::cpu
