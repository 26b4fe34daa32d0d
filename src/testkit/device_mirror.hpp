// A batch of host tensors copied to a CUDA device: bytes, gaps, poison and guard bands alike.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "mla/decode.hpp"
#include "mla/status.hpp"

namespace mla::testkit {

/// Device copies of every given tensor of a call, and a zeroed device workspace.
class DeviceMirror {
 public:
  /// `guard_bytes` of memory on either side of out and lse are copied along.
  static Result<std::unique_ptr<DeviceMirror>> make(const DecodeTensors& host,
                                                    std::size_t workspace_bytes,
                                                    std::size_t guard_bytes);
  ~DeviceMirror();
  DeviceMirror(const DeviceMirror&) = delete;
  DeviceMirror& operator=(const DeviceMirror&) = delete;

  /// The same call on device memory. Scales given by pointer are mirrored too.
  const DecodeTensors& tensors() const noexcept { return device_; }
  void* workspace() const noexcept { return workspace_; }

  /// Copies out and lse, guards included, from the host / back to the host. Synchronises.
  Status upload_outputs();
  Status download_outputs();

 private:
  struct Copy {
    std::byte* host = nullptr;
    void* device = nullptr;
    std::size_t bytes = 0;
    bool output = false;
  };

  DeviceMirror() = default;
  Status add(const TensorView& host, TensorView& device, bool output, std::size_t guard_bytes);
  Status add_scale(const Scale& host, Scale& device);

  DecodeTensors device_;
  std::vector<Copy> copies_;
  void* workspace_ = nullptr;
};

}  // namespace mla::testkit
