// The clock of a GPU while it works. Compiled with CUDA only.
#pragma once

namespace mla::cli {

/// Reads clocks through the driver's management library (NVML), which is looked for at run time.
class GpuClock {
 public:
  explicit GpuClock(int device_index);
  ~GpuClock();
  GpuClock(const GpuClock&) = delete;
  GpuClock& operator=(const GpuClock&) = delete;

  /// The multiprocessors' clock in MHz, now; 0 when it cannot be read.
  unsigned megahertz() const;

 private:
  using Device = struct OpaqueDevice*;
  void* library_ = nullptr;
  Device device_ = nullptr;
  int (*clock_)(Device, int, unsigned*) = nullptr;
  int (*shutdown_)() = nullptr;
};

}  // namespace mla::cli
