// The sm90 rows of the backend table.
#include <string>
#include <vector>

#include "core/backend.hpp"
#include "core/diagnostics.hpp"
#include "cuda/cuda.hpp"
#include "cuda/sm90/launch.hpp"

namespace mla::sm90 {
namespace {

std::string missing(int device_index) {
  const Result<cuda::DeviceProperties> device = cuda::device_properties(device_index);
  if (!device.ok()) return device.status().message();
  if (device->compute_major == 9 && device->compute_minor == 0) return {};
  return text("needs a Hopper GPU (compute capability 9.0), found ", device->name, " (",
              device->compute_major, ".", device->compute_minor, ")");
}

std::string rejects(const DecodeProblem& problem, const PlanOptions& options) {
  const bool bf16 = problem.q_dtype == DType::kBF16 && problem.kv_format == KvFormat::kBF16;
  const bool f16 = problem.q_dtype == DType::kF16 && problem.kv_format == KvFormat::kF16;
  if (!bf16 && !f16) {
    return text("serves bf16 q with a bf16 cache and f16 q with an f16 cache, not ",
                to_string(problem.q_dtype), " with ", to_string(problem.kv_format));
  }
  if (problem.sparse()) return "serves dense problems only";
  if (options.num_splits > 0) return "cuts keys by cost and does not take num_splits";
  const std::int64_t latent = problem.kv_lora_rank;
  const std::int64_t rope = problem.qk_rope_head_dim;
  const bool served = (latent == 512 && (rope == 64 || rope == 0)) || (latent == 256 && rope == 64);
  if (!served)
    return text("serves widths (512,64), (512,0) and (256,64), not (", latent, ",", rope, ")");
  return {};
}

}  // namespace

std::vector<const KernelEntry*> backend_rows() {
  static const KernelEntry swapped{"sm90",
                                   "Hopper wgmma, blocks of 16, 32 or 64 query rows, one launch",
                                   DeviceKind::kCuda,
                                   missing,
                                   rejects,
                                   configure,
                                   launch,
                                   false};
  return {&swapped};
}

}  // namespace mla::sm90
