// The portable CUDA rows of the backend table.
#include <limits>
#include <string>
#include <vector>

#include "core/backend.hpp"
#include "core/diagnostics.hpp"
#include "cuda/cuda.hpp"
#include "cuda/portable/launch.hpp"

namespace mla::portable {
namespace {

constexpr int kBytesPerKilobyte = 1024;
constexpr int kLeastShared = 99 * kBytesPerKilobyte;  // of every card from sm_80 on

std::string missing(int device_index) {
  const Result<cuda::DeviceProperties> device = cuda::device_properties(device_index);
  if (!device.ok()) return device.status().message();
  if (device->compute_major < 8) {
    return text("needs a GPU of compute capability 8.0 or later, found ", device->name, " (",
                device->compute_major, ".", device->compute_minor, ")");
  }
  if (device->shared_bytes_per_block < kLeastShared) {
    return text("needs ", kLeastShared, " bytes of shared memory a block, found ",
                device->shared_bytes_per_block, " on ", device->name);
  }
  return {};
}

std::string rejects(const DecodeProblem& problem, const PlanOptions& options) {
  if (options.num_splits > 0) return "cuts keys by cost and does not take num_splits";
  const std::int64_t latent = problem.kv_lora_rank;
  const std::int64_t rope = problem.qk_rope_head_dim;
  if ((latent != 512 && latent != 256) || (rope != 64 && rope != 0)) {
    return text("serves latents of 512 or 256 and rotary parts of 64 or 0, not (", latent, ",",
                rope, ")");
  }
  return {};
}

/// One row: the same kernels within so much shared memory.
template <int kSharedCap>
struct Row {
  static Status configure_plan(PlanState& state) { return configure(state, kSharedCap); }
  static Status launch_plan(const PlanState& state, const DecodeTensors& tensors,
                            std::byte* workspace, void* stream) {
    return launch(state, tensors, workspace, stream, kSharedCap);
  }
  static KernelEntry entry(const char* name, const char* description) {
    return {name,    description,    DeviceKind::kCuda, missing,
            rejects, configure_plan, launch_plan,       false};
  }
};

}  // namespace

std::vector<const KernelEntry*> backend_rows() {
  static const KernelEntry largest = Row<std::numeric_limits<int>::max()>::entry(
      "cuda", "any card from sm_80 on: mma.sync, ldmatrix, cp.async; one launch");
  // For tests: the first row comes before these wherever they would do.
  static const KernelEntry middle = Row<163 * kBytesPerKilobyte>::entry(
      "cuda_163k", "the same within the shared memory of an A100");
  static const KernelEntry smallest = Row<kLeastShared>::entry(
      "cuda_99k", "the same within the shared memory of an RTX card");
  return {&largest, &middle, &smallest};
}

}  // namespace mla::portable
