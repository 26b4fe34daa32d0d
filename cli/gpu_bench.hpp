// Timing of one problem on a CUDA row: a graph that chains calls on different, cold pages.
// Compiled with CUDA only.
#pragma once

#include <memory>
#include <string>

#include "cuda_handles.hpp"
#include "gpu_calls.hpp"
#include "gpu_clock.hpp"
#include "gpu_measurement.hpp"
#include "mla/decode.hpp"
#include "mla/status.hpp"
#include "page_pool.hpp"

namespace mla::cli {

/// Measures on one device. Memory grows to what the largest problem needs and is kept.
class GpuBench {
 public:
  /// kUnsupported: there is no such device.
  static Result<std::unique_ptr<GpuBench>> make(int device_index);

  const GpuInfo& info() const noexcept { return info_; }

  /// Checks the first call of the graph, before and inside the graph; a wrong result is reported in
  /// `GpuMeasurement::check`. kUnsupported: the row does not serve the problem, or it does not
  /// fit the device's memory.
  Result<GpuMeasurement> measure(const testkit::Case& problem, const PlanOptions& options);

 private:
  explicit GpuBench(int device_index) : clock_(device_index) {}
  Status place(GpuCalls& calls, GpuMeasurement& found);
  Status check_first(const DecodePlan& plan, GpuCalls& calls, GpuMeasurement& found);
  Status capture(const DecodePlan& plan, const GpuCalls& calls, CudaGraphExec& graph) const;
  Status check_graph(GpuCalls& calls, const CudaGraphExec& graph, GpuMeasurement& found) const;
  Status time_graph(const CudaGraphExec& graph, GpuMeasurement& found) const;

  GpuInfo info_;
  GpuClock clock_;
  CudaStream stream_;
  PagePool pool_;
  DeviceMemory memory_;  // inputs and outputs of all calls
  DeviceMemory workspace_;
};

}  // namespace mla::cli
