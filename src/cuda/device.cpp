// Properties of the CUDA devices and conversion of runtime errors.
#include <map>
#include <mutex>

#include "core/diagnostics.hpp"
#include "cuda/cuda.hpp"

namespace mla::cuda {

Status to_status(const char* operation, const char* call, cudaError_t error) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return {StatusCode::kDevice, text(operation, ": ", call, ": found ", cudaGetErrorName(error), " (",
                                    cudaGetErrorString(error), "), needed success")};
}

Result<DeviceProperties> device_properties(int device_index) {
  static std::mutex mutex;
  static std::map<int, DeviceProperties> known;  // constant per device once read
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known.find(device_index); found != known.end()) return found->second;

  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess || count == 0) {
    cudaGetLastError();
    return Status(StatusCode::kUnsupported,
                  text("no CUDA device (", counted == cudaSuccess ? "none found" : cudaGetErrorString(counted), ")"));
  }
  if (device_index >= count) {
    return Status(StatusCode::kUnsupported,
                  text("device_index ", device_index, ", but there are ", count, " CUDA devices"));
  }
  cudaDeviceProp raw{};
  if (const cudaError_t error = cudaGetDeviceProperties(&raw, device_index); error != cudaSuccess) {
    return to_status("device", "cudaGetDeviceProperties", error);
  }
  DeviceProperties properties{raw.name, raw.major, raw.minor, raw.multiProcessorCount,
                              static_cast<int>(raw.sharedMemPerBlockOptin)};
  known.emplace(device_index, properties);
  return properties;
}

}  // namespace mla::cuda
