// The tensors of the calls that a timed graph chains. Compiled with CUDA only.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mla/problem.hpp"
#include "page_pool.hpp"
#include "testkit/problem_gen.hpp"

namespace mla::cli {

/// Calls of one problem, each in a slot of its own: inputs and outputs one behind the other,
/// outputs between guard bands. Call i reads the pages that follow those of call i - 1 in the
/// pool's order.
class GpuCalls {
 public:
  GpuCalls(std::unique_ptr<testkit::Batch> batch, const PagePool& pool);

  testkit::Batch& batch() noexcept { return *batch_; }
  std::int64_t pages_per_call() const noexcept { return pages_; }
  std::size_t slot_bytes() const noexcept { return slot_bytes_; }

  /// Where and how many; `slots` is device memory of count * slot_bytes().
  void place(std::byte* slots, int count) noexcept {
    slots_ = slots;
    count_ = count;
  }
  int count() const noexcept { return count_; }

  /// Fills all slots: the same inputs, other pages; outputs are NaN.
  Status upload(cudaStream_t stream) const;
  /// Fills the outputs of call 0 with NaN, guard bands intact, / copies them to the batch.
  /// Synchronises.
  Status poison_first(cudaStream_t stream) const;
  Status download_first(cudaStream_t stream) const;

  /// Call i on device memory.
  DecodeTensors device_tensors(int call) const;
  /// Makes the batch call 0 on host memory: the pool's host pages in its table, for the oracle.
  void name_host_pages();

 private:
  struct Part {
    const testkit::Buffer* buffer;
    TensorView DecodeTensors::*view;
    std::size_t offset;  // of the payload in a slot
    bool output;
  };
  /// `block_table` and `indices` with the pages of call i, taken modulo `modulus`.
  std::vector<std::int32_t> table_of(int call, std::int64_t modulus) const;
  std::vector<std::int32_t> indices_of(int call, std::int64_t modulus) const;
  std::int32_t page_of(int call, std::int64_t page, std::int64_t modulus) const noexcept;
  Status copy_outputs(cudaStream_t stream, cudaMemcpyKind kind) const;

  std::unique_ptr<testkit::Batch> batch_;
  const PagePool& pool_;
  std::vector<Part> parts_;
  std::vector<std::int32_t> logical_indices_;  // as generated: pages 0, 1, 2, ...
  std::vector<std::int32_t> logical_table_;
  std::int64_t pages_ = 0;
  std::size_t slot_bytes_ = 0;
  std::byte* slots_ = nullptr;
  int count_ = 0;
};

}  // namespace mla::cli
