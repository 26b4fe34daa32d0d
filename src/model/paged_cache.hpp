// PagedCache: the latent cache of all layers, [pages, layers, page_size, D], and who owns its
// pages.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "io/page_pool.hpp"
#include "mla/problem.hpp"
#include "mla/status.hpp"

namespace mla::model {

/// Hands out page ids. Freed pages are reused last-in first-out.
class PageAllocator {
 public:
  /// Pages 0 .. num_pages-1 are free, in an order that `seed` shuffles: neighbouring tokens then
  /// lie in far pages, as they do in a server that has been running for a while.
  PageAllocator(std::int64_t num_pages, std::uint64_t seed);

  std::int64_t num_free() const noexcept { return static_cast<std::int64_t>(free_.size()); }

  /// Extends `pages` to `num_pages` pages. kOutOfMemory: not that many are free; `pages` is
  /// unchanged.
  Status grow(std::vector<std::int32_t>& pages, std::int64_t num_pages);

  /// Takes all pages back.
  void release(std::vector<std::int32_t>& pages);

 private:
  std::vector<std::int32_t> free_;
};

struct PagedCacheShape {
  std::int64_t num_pages = 0;
  std::int64_t num_layers = 0;
  std::int64_t page_size = 64;
  std::int64_t latent_dim = 0;  ///< D
  KvFormat format = KvFormat::kBF16;
};

/// The memory. It starts as NaN everywhere, so reading a slot that no token was stored in shows.
class PagedCache {
 public:
  /// `scales` [layers]: a stored value is the value divided by its layer's scale. kUnsupported: a
  /// format other than bf16, f16 and e4m3. kOutOfMemory: the pool does not fit.
  static Result<PagedCache> create(const PagedCacheShape& shape, std::vector<float> scales);

  const PagedCacheShape& shape() const noexcept { return shape_; }
  float scale(std::int64_t layer) const noexcept {
    return scales_[static_cast<std::size_t>(layer)];
  }

  /// Rounds row [D] to the cache's type and stores it at slot page * page_size + offset of a layer.
  void store(std::int64_t layer, std::int64_t slot, std::span<const float> row) noexcept;

  /// [pages, page_size, D] of one layer: a strided view into the pool.
  TensorView layer_view(std::int64_t layer) const noexcept;

 private:
  PagedCache(const PagedCacheShape& shape, std::vector<float> scales, io::PagePool pool)
      : shape_(shape), scales_(std::move(scales)), pool_(std::move(pool)) {}

  PagedCacheShape shape_;
  std::vector<float> scales_;
  io::PagePool pool_;
};

}  // namespace mla::model
