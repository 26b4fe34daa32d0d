#include "testkit/device_mirror.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/cuda.hpp"

namespace mla::testkit {
namespace {

Status check(const char* call, cudaError_t error) { return cuda::to_status("mirror", call, error); }

}  // namespace

DeviceMirror::~DeviceMirror() {
  for (const Copy& copy : copies_) cudaFree(copy.device);
  cudaFree(workspace_);
}

Status DeviceMirror::add(const TensorView& host, TensorView& device, bool output,
                         std::size_t guard_bytes) {
  device = host;
  if (!host.given() || host.data == nullptr) return {};
  std::int64_t lowest = 0;
  std::int64_t highest = 0;  // of the elements' offsets
  for (int axis = 0; axis < host.rank; ++axis) {
    if (host.shape[axis] == 0) return {};
    const std::int64_t reach = (host.shape[axis] - 1) * host.stride[axis];
    (reach < 0 ? lowest : highest) += reach;
  }
  const auto element = static_cast<std::int64_t>(dtype_bytes(host.dtype));
  const auto guard = static_cast<std::int64_t>(output ? guard_bytes : 0);
  Copy copy;
  copy.host = static_cast<std::byte*>(host.data) + lowest * element - guard;
  copy.bytes = static_cast<std::size_t>((highest - lowest + 1) * element + 2 * guard);
  copy.output = output;
  if (Status s = check("cudaMalloc", cudaMalloc(&copy.device, copy.bytes)); !s.ok()) return s;
  copies_.push_back(copy);
  device.data = static_cast<std::byte*>(copy.device) + guard - lowest * element;
  return check("cudaMemcpy", cudaMemcpy(copy.device, copy.host, copy.bytes, cudaMemcpyHostToDevice));
}

Status DeviceMirror::add_scale(const Scale& host, Scale& device) {
  device = host;
  if (host.pointer == nullptr) return {};
  const TensorView view = TensorView::contiguous(host.pointer, DType::kF32, {1});
  TensorView mirrored;
  const Status status = add(view, mirrored, false, 0);
  device.pointer = static_cast<const float*>(mirrored.data);
  return status;
}

Result<std::unique_ptr<DeviceMirror>> DeviceMirror::make(const DecodeTensors& host,
                                                         std::size_t workspace_bytes,
                                                         std::size_t guard_bytes) {
  std::unique_ptr<DeviceMirror> mirror(new DeviceMirror);
  mirror->device_ = host;
  DecodeTensors& device = mirror->device_;
  const std::pair<const TensorView*, TensorView*> inputs[] = {
      {&host.q, &device.q},
      {&host.q_nope, &device.q_nope},
      {&host.q_pe, &device.q_pe},
      {&host.kv_cache, &device.kv_cache},
      {&host.block_table, &device.block_table},
      {&host.seq_lens, &device.seq_lens},
      {&host.query_start_loc, &device.query_start_loc},
      {&host.causal_seqlens_kv_global, &device.causal_seqlens_kv_global},
      {&host.sinks, &device.sinks},
      {&host.alibi_slopes, &device.alibi_slopes},
      {&host.indices, &device.indices}};
  for (const auto& [from, to] : inputs) {
    if (Status s = mirror->add(*from, *to, false, 0); !s.ok()) return s;
  }
  if (Status s = mirror->add(host.out, device.out, true, guard_bytes); !s.ok()) return s;
  if (Status s = mirror->add(host.lse, device.lse, true, guard_bytes); !s.ok()) return s;
  if (Status s = mirror->add_scale(host.bmm1_scale, device.bmm1_scale); !s.ok()) return s;
  if (Status s = mirror->add_scale(host.bmm2_scale, device.bmm2_scale); !s.ok()) return s;
  if (workspace_bytes > 0) {
    if (Status s = check("cudaMalloc", cudaMalloc(&mirror->workspace_, workspace_bytes)); !s.ok()) return s;
    if (Status s = check("cudaMemset", cudaMemset(mirror->workspace_, 0, workspace_bytes)); !s.ok()) return s;
  }
  return mirror;
}

Status DeviceMirror::upload_outputs() {
  for (const Copy& copy : copies_) {
    if (!copy.output) continue;
    Status s = check("cudaMemcpy", cudaMemcpy(copy.device, copy.host, copy.bytes, cudaMemcpyHostToDevice));
    if (!s.ok()) return s;
  }
  return {};
}

Status DeviceMirror::download_outputs() {
  if (Status s = check("cudaDeviceSynchronize", cudaDeviceSynchronize()); !s.ok()) return s;
  for (const Copy& copy : copies_) {
    if (!copy.output) continue;
    Status s = check("cudaMemcpy", cudaMemcpy(copy.host, copy.device, copy.bytes, cudaMemcpyDeviceToHost));
    if (!s.ok()) return s;
  }
  return {};
}

}  // namespace mla::testkit
