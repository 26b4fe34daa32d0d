// Owners of CUDA objects, for the GPU bench. Every call that can fail returns a Status.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

#include "cuda/cuda.hpp"
#include "mla/status.hpp"

namespace mla::cli {

/// A failed call as a Status; `call` names it.
inline Status cuda_status(const char* call, cudaError_t error) {
  return cuda::to_status("bench", call, error);
}

/// Waits for the stream.
inline Status synchronise(cudaStream_t stream) {
  return cuda_status("cudaStreamSynchronize", cudaStreamSynchronize(stream));
}

/// Owns one object of the runtime.
template <class Object, cudaError_t (*kDestroy)(Object)>
class CudaHandle {
 public:
  CudaHandle() noexcept = default;
  ~CudaHandle() { reset(); }
  CudaHandle(CudaHandle&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  CudaHandle& operator=(CudaHandle&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  CudaHandle(const CudaHandle&) = delete;
  CudaHandle& operator=(const CudaHandle&) = delete;

  Object get() const noexcept { return object_; }
  /// Where a creating call writes; what was held is destroyed.
  Object* receive() noexcept {
    reset();
    return &object_;
  }

 private:
  void reset() noexcept {
    if (object_ != nullptr) kDestroy(object_);
    object_ = nullptr;
  }
  Object object_ = nullptr;
};

using CudaStream = CudaHandle<cudaStream_t, cudaStreamDestroy>;
using CudaEvent = CudaHandle<cudaEvent_t, cudaEventDestroy>;
using CudaGraph = CudaHandle<cudaGraph_t, cudaGraphDestroy>;
using CudaGraphExec = CudaHandle<cudaGraphExec_t, cudaGraphExecDestroy>;

/// Device memory, 256-byte aligned.
class DeviceMemory {
 public:
  /// At least `bytes`; what was held is freed unless it is large enough.
  Status reserve(std::size_t bytes) {
    if (bytes <= bytes_) return {};
    bytes_ = 0;
    Status status = cuda_status("cudaMalloc", cudaMalloc(memory_.receive(), bytes));
    if (status.ok()) bytes_ = bytes;
    return status;
  }
  std::byte* data() const noexcept { return static_cast<std::byte*>(memory_.get()); }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  CudaHandle<void*, cudaFree> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace mla::cli
