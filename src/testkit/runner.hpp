// Runs a plan on tensors in host memory, whatever device the plan is for.
#pragma once

#include <memory>

#include "mla/decode.hpp"
#include "mla/status.hpp"
#include "testkit/buffer.hpp"

namespace mla::testkit {

class DeviceMirror;

/// A plan with its workspace. A CUDA plan works on device copies of the tensors; out and lse, and the
/// guard bands around them, travel there before a run and back after it.
class Runner {
 public:
  /// `tensors` is host memory and outlives the runner; `guard_bytes` lie around out and lse. Contents
  /// are validated here for plans whose backend cannot read them.
  static Result<std::unique_ptr<Runner>> make(const DecodePlan& plan, const DecodeTensors& tensors,
                                              std::size_t guard_bytes);
  ~Runner();

  /// One run; the results are in host memory when it returns.
  Status run();
  /// Whether nothing was written beside the workspace (host plans).
  bool workspace_intact() const noexcept { return workspace_.intact(); }

 private:
  Runner(const DecodePlan& plan, const DecodeTensors& tensors);

  DecodePlan plan_;
  DecodeTensors tensors_;
  Buffer workspace_;
  std::unique_ptr<DeviceMirror> mirror_;  // CUDA plans
};

}  // namespace mla::testkit
