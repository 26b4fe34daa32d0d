#include "gpu_calls.hpp"

#include <cstring>

#include "core/diagnostics.hpp"

namespace mla::cli {
namespace {

using testkit::Batch;
using testkit::Buffer;

constexpr std::size_t kAlignment = 256;

std::size_t round_up(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::vector<std::int32_t> integers_of(const Buffer& buffer) {
  std::vector<std::int32_t> values(buffer.size() / sizeof(std::int32_t));
  if (!values.empty()) std::memcpy(values.data(), buffer.data(), buffer.size());
  return values;
}

Status copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
            cudaStream_t stream) {
  if (bytes == 0) return {};
  return cuda_status("cudaMemcpyAsync", cudaMemcpyAsync(to, from, bytes, kind, stream));
}

}  // namespace

GpuCalls::GpuCalls(std::unique_ptr<Batch> batch, const PagePool& pool)
    : batch_(std::move(batch)), pool_(pool) {
  logical_table_ = integers_of(batch_->block_table);
  logical_indices_ = integers_of(batch_->indices);
  for (const auto& pages : batch_->pages) pages_ += static_cast<std::int64_t>(pages.size());
  const auto add = [this](const Buffer& buffer, TensorView DecodeTensors::*view, bool output) {
    if (buffer.size() == 0) return;
    if (output) slot_bytes_ += Buffer::kGuardBytes;
    parts_.push_back({&buffer, view, slot_bytes_, output});
    slot_bytes_ = round_up(slot_bytes_ + buffer.size() + (output ? Buffer::kGuardBytes : 0));
  };
  add(batch_->q, &DecodeTensors::q, false);
  add(batch_->q_nope, &DecodeTensors::q_nope, false);
  add(batch_->q_pe, &DecodeTensors::q_pe, false);
  add(batch_->block_table, &DecodeTensors::block_table, false);
  add(batch_->seq_lens, &DecodeTensors::seq_lens, false);
  add(batch_->query_start_loc, &DecodeTensors::query_start_loc, false);
  add(batch_->causal_seqlens_kv_global, &DecodeTensors::causal_seqlens_kv_global, false);
  add(batch_->sinks, &DecodeTensors::sinks, false);
  add(batch_->alibi_slopes, &DecodeTensors::alibi_slopes, false);
  add(batch_->indices, &DecodeTensors::indices, false);
  add(batch_->out, &DecodeTensors::out, true);
  add(batch_->lse, &DecodeTensors::lse, true);
}

std::int32_t GpuCalls::page_of(int call, std::int64_t page, std::int64_t modulus) const noexcept {
  return static_cast<std::int32_t>(pool_.page_at(call * pages_ + page) % modulus);
}

std::vector<std::int32_t> GpuCalls::table_of(int call, std::int64_t modulus) const {
  std::vector<std::int32_t> table = logical_table_;
  if (batch_->source.k > 0) return table;  // poison, and not read
  const std::int64_t stride = batch_->tensors.block_table.stride[0];
  for (std::size_t b = 0; b < batch_->pages.size(); ++b) {
    auto entry = table.begin() + static_cast<std::ptrdiff_t>(b) * stride;
    for (std::int32_t page : batch_->pages[b]) *entry++ = page_of(call, page, modulus);
  }
  return table;
}

std::vector<std::int32_t> GpuCalls::indices_of(int call, std::int64_t modulus) const {
  std::vector<std::int32_t> indices = logical_indices_;
  const std::int64_t page_size = batch_->source.page;
  for (std::int32_t& slot : indices) {
    if (slot < 0 || slot > pages_ * page_size) continue;
    // The slot behind the last one is no key, here as there.
    const std::int64_t page = slot / page_size;
    const std::int64_t there = page == pages_ ? modulus : page_of(call, page, modulus);
    slot = static_cast<std::int32_t>(there * page_size + slot % page_size);
  }
  return indices;
}

Status GpuCalls::upload(cudaStream_t stream) const {
  for (const Part& part : parts_) {
    const std::size_t guard = part.output ? Buffer::kGuardBytes : 0;
    MLA_RETURN_IF_ERROR(copy(slots_ + part.offset - guard, part.buffer->data() - guard,
                             part.buffer->size() + 2 * guard, cudaMemcpyHostToDevice, stream));
  }
  for (int call = 1; call < count_; ++call) {
    MLA_RETURN_IF_ERROR(copy(slots_ + static_cast<std::size_t>(call) * slot_bytes_, slots_,
                             slot_bytes_, cudaMemcpyDeviceToDevice, stream));
  }
  for (int call = 0; call < count_; ++call) {
    std::byte* slot = slots_ + static_cast<std::size_t>(call) * slot_bytes_;
    for (const Part& part : parts_) {
      std::vector<std::int32_t> values;
      if (part.buffer == &batch_->block_table) values = table_of(call, pool_.num_pages());
      if (part.buffer == &batch_->indices) values = indices_of(call, pool_.num_pages());
      if (values.empty()) continue;
      MLA_RETURN_IF_ERROR(copy(slot + part.offset, values.data(),
                               values.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice,
                               stream));
      MLA_RETURN_IF_ERROR(synchronise(stream));  // before the vector goes
    }
  }
  return synchronise(stream);
}

Status GpuCalls::copy_outputs(cudaStream_t stream, cudaMemcpyKind kind) const {
  constexpr std::size_t kGuard = Buffer::kGuardBytes;
  for (const Part& part : parts_) {
    if (!part.output) continue;
    std::byte* host = part.buffer->data() - kGuard;
    std::byte* device = slots_ + part.offset - kGuard;
    const bool down = kind == cudaMemcpyDeviceToHost;
    MLA_RETURN_IF_ERROR(copy(down ? host : device, down ? device : host,
                             part.buffer->size() + 2 * kGuard, kind, stream));
  }
  return synchronise(stream);
}

Status GpuCalls::poison_first(cudaStream_t stream) const {
  batch_->poison_outputs();
  return copy_outputs(stream, cudaMemcpyHostToDevice);
}

Status GpuCalls::download_first(cudaStream_t stream) const {
  return copy_outputs(stream, cudaMemcpyDeviceToHost);
}

DecodeTensors GpuCalls::device_tensors(int call) const {
  DecodeTensors tensors = batch_->tensors;
  tensors.kv_cache = pool_.device_cache();
  std::byte* slot = slots_ + static_cast<std::size_t>(call) * slot_bytes_;
  for (const Part& part : parts_) {
    TensorView& view = tensors.*part.view;
    view.data = slot + part.offset + (static_cast<std::byte*>(view.data) - part.buffer->data());
  }
  return tensors;
}

void GpuCalls::name_host_pages() {
  const std::int64_t modulus = pool_.host_cache().shape[0];
  batch_->tensors.kv_cache = pool_.host_cache();
  const auto put = [](const std::vector<std::int32_t>& values, const Buffer& buffer) {
    if (!values.empty()) std::memcpy(buffer.data(), values.data(), buffer.size());
  };
  put(table_of(0, modulus), batch_->block_table);
  put(indices_of(0, modulus), batch_->indices);
}

}  // namespace mla::cli
