#include "gpu_clock.hpp"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

namespace mla::cli {
namespace {

constexpr int kSuccess = 0;  // NVML_SUCCESS
constexpr int kClockSm = 1;  // NVML_CLOCK_SM
constexpr int kBusIdLength = 32;

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

GpuClock::GpuClock(int device_index) {
  char bus_id[kBusIdLength] = {};
  if (cudaDeviceGetPCIBusId(bus_id, kBusIdLength, device_index) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) return;
  int (*initialise)() = nullptr;
  int (*find_device)(const char*, Device*) = nullptr;
  find(library_, "nvmlInit_v2", initialise);
  find(library_, "nvmlShutdown", shutdown_);
  find(library_, "nvmlDeviceGetHandleByPciBusId_v2", find_device);
  find(library_, "nvmlDeviceGetClockInfo", clock_);
  if (initialise == nullptr || find_device == nullptr || initialise() != kSuccess) {
    shutdown_ = nullptr;
    return;
  }
  if (find_device(bus_id, &device_) != kSuccess) device_ = nullptr;
}

GpuClock::~GpuClock() {
  if (shutdown_ != nullptr) shutdown_();
  if (library_ != nullptr) dlclose(library_);
}

unsigned GpuClock::megahertz() const {
  unsigned clock = 0;
  if (device_ == nullptr || clock_ == nullptr) return 0;
  return clock_(device_, kClockSm, &clock) == kSuccess ? clock : 0;
}

}  // namespace mla::cli
