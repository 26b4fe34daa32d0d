#include "testkit/runner.hpp"

#include "core/diagnostics.hpp"
#include "core/stages.hpp"

#if MLA_HAS_CUDA
#include "testkit/device_mirror.hpp"
#else
namespace mla::testkit {
class DeviceMirror {};
}  // namespace mla::testkit
#endif

namespace mla::testkit {

Runner::Runner(const DecodePlan& plan, const DecodeTensors& tensors) : plan_(plan), tensors_(tensors) {}
Runner::~Runner() = default;

Result<std::unique_ptr<Runner>> Runner::make(const DecodePlan& plan, const DecodeTensors& tensors,
                                             std::size_t guard_bytes) {
  std::unique_ptr<Runner> runner(new Runner(plan, tensors));
  if (plan.options().device == DeviceKind::kCpu) {
    runner->workspace_ = Buffer(plan.workspace_bytes(), 0);
    return runner;
  }
  MLA_RETURN_IF_ERROR(validate_tensors(plan.problem(), tensors));
  MLA_RETURN_IF_ERROR(validate_contents(plan.problem(), tensors));
#if MLA_HAS_CUDA
  Result<std::unique_ptr<DeviceMirror>> mirror =
      DeviceMirror::make(tensors, plan.workspace_bytes(), guard_bytes);
  if (!mirror.ok()) return mirror.status();
  runner->mirror_ = std::move(*mirror);
  return runner;
#else
  (void)guard_bytes;
  return Status(StatusCode::kUnsupported, "runner: this build has no CUDA");
#endif
}

Status Runner::run() {
#if MLA_HAS_CUDA
  if (mirror_ != nullptr) {
    MLA_RETURN_IF_ERROR(mirror_->upload_outputs());
    MLA_RETURN_IF_ERROR(
        mla::run(plan_, mirror_->tensors(), mirror_->workspace(), plan_.workspace_bytes()));
    return mirror_->download_outputs();
  }
#endif
  return mla::run(plan_, tensors_, workspace_.data(), workspace_.size());
}

}  // namespace mla::testkit
