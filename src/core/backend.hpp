// The interface of a backend: one KernelEntry per row of the table in registry.cpp.
#pragma once

#include <string>
#include <vector>

#include "core/split.hpp"
#include "mla/decode.hpp"

namespace mla {

/// One way to run a problem. A backend exports its rows through one function; src/core sees nothing
/// else of it.
struct KernelEntry {
  const char* name;
  const char* description;
  DeviceKind device;

  /// Why this row cannot run on this machine (device `device_index`); empty when it can.
  std::string (*missing)(int device_index);

  /// Why this row cannot serve this problem; empty when it can. Asked after `missing` and after the
  /// problem was validated.
  std::string (*rejects)(const DecodeProblem& problem, const PlanOptions& options);

  /// Fills num_workers, the tile geometry and workspace_bytes of a plan.
  Status (*configure)(PlanState& state);

  /// Runs. The tensors were validated against the plan, the workspace is large enough and aligned.
  Status (*launch)(const PlanState& state, const DecodeTensors& tensors, std::byte* workspace,
                   void* stream);

  /// Whether contents of host arrays can be validated before the launch.
  bool host_readable;
};

/// The ordered table: the first row that can run wins.
const std::vector<const KernelEntry*>& backend_table();

/// The first row of the device that serves the problem, or the forced one; never a fallback.
Result<const KernelEntry*> select_backend(const DecodeProblem& problem, const PlanOptions& options);

/// Why this build lacks a row that other builds have; empty: it has it, or none does.
std::string absent_reason(const std::string& name);

/// "cpu", "cuda".
inline const char* device_name(DeviceKind device) noexcept {
  return device == DeviceKind::kCpu ? "cpu" : "cuda";
}

namespace cpu {
std::vector<const KernelEntry*> backend_rows();  // src/cpu/backend.cpp
}  // namespace cpu
namespace sm90 {
std::vector<const KernelEntry*> backend_rows();  // src/cuda/sm90/backend.cpp, in builds with CUDA
}  // namespace sm90
namespace portable {
std::vector<const KernelEntry*> backend_rows();  // src/cuda/portable/backend.cpp, likewise
}  // namespace portable

}  // namespace mla
