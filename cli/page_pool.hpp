// The pages that a GPU bench reads: one large pool in device memory, in random order, so that no
// key of a timed call is in a cache. Compiled with CUDA only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda_handles.hpp"
#include "mla/tensor.hpp"
#include "testkit/problem_gen.hpp"

namespace mla::cli {

/// Pages of random, finite keys. The pool repeats one block of pages that also lies in host memory,
/// so that the oracle sees the keys of any page without a copy.
class PagePool {
 public:
  /// Makes the pool one of pages as `problem` has them. Memory is allocated once; it is filled
  /// again only when the format, widths, page size or strides are others than before. `stream` is
  /// synchronised.
  Status prepare(const testkit::Case& problem, cudaStream_t stream);

  /// Device pages: [pages, page_size, width].
  const TensorView& device_cache() const noexcept { return device_cache_; }
  /// The block: device page p has the keys of host page p % host_cache().shape[0].
  const TensorView& host_cache() const noexcept { return host_cache_; }
  std::int64_t num_pages() const noexcept { return device_cache_.shape[0]; }
  std::size_t page_bytes() const noexcept { return page_bytes_; }

  /// The page at place `i` of the random order, which repeats after num_pages().
  std::int32_t page_at(std::int64_t i) const noexcept {
    return order_[static_cast<std::size_t>(i % num_pages())];
  }

 private:
  Status fill(cudaStream_t stream);

  std::string made_for_;
  std::unique_ptr<testkit::Batch> block_;
  TensorView device_cache_, host_cache_;
  std::size_t page_bytes_ = 0;
  std::vector<std::int32_t> order_;
  DeviceMemory memory_;
};

}  // namespace mla::cli
