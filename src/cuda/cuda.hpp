// What the CUDA backends share on the host: status conversion and the properties of a device.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "mla/status.hpp"

namespace mla::cuda {

/// A failed runtime call as a Status: "operation: call: found <name> (<text>), needed success". Clears
/// the runtime's sticky "last error", so that one failure is reported once.
Status to_status(const char* operation, const char* call, cudaError_t error);

/// Constant properties of a device, read once per device.
struct DeviceProperties {
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int num_multiprocessors = 0;
  int shared_bytes_per_block = 0;  ///< opt-in limit
};

/// kUnsupported when there is no driver or no such device.
Result<DeviceProperties> device_properties(int device_index);

}  // namespace mla::cuda
