#include "model/paged_cache.hpp"

#include <limits>
#include <random>
#include <utility>

#include "core/diagnostics.hpp"
#include "core/numeric.hpp"

namespace mla::model {

PageAllocator::PageAllocator(std::int64_t num_pages, std::uint64_t seed) {
  free_.resize(static_cast<std::size_t>(num_pages));
  for (std::size_t i = 0; i < free_.size(); ++i) free_[i] = static_cast<std::int32_t>(i);
  // Fisher-Yates by hand: std::shuffle may differ between standard libraries.
  std::mt19937_64 random(seed);
  for (std::size_t i = free_.size(); i > 1; --i) std::swap(free_[i - 1], free_[random() % i]);
}

Status PageAllocator::grow(std::vector<std::int32_t>& pages, std::int64_t num_pages) {
  const std::int64_t missing = num_pages - static_cast<std::int64_t>(pages.size());
  if (missing > num_free()) {
    return {StatusCode::kOutOfMemory,
            text("generate: cache pages: found ", num_free(), " free, needed ", missing)};
  }
  for (std::int64_t i = 0; i < missing; ++i) {
    pages.push_back(free_.back());
    free_.pop_back();
  }
  return {};
}

void PageAllocator::release(std::vector<std::int32_t>& pages) {
  free_.insert(free_.end(), pages.rbegin(), pages.rend());
  pages.clear();
}

Result<PagedCache> PagedCache::create(const PagedCacheShape& shape, std::vector<float> scales) {
  if (shape.format == KvFormat::kFp8DsMla) {
    return Status(StatusCode::kUnsupported, text("generate: cache: found ", to_string(shape.format),
                                                 ", needed bf16, f16 or e4m3"));
  }
  constexpr std::int64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();
  std::int64_t bytes = static_cast<std::int64_t>(dtype_bytes(kv_dtype(shape.format)));
  for (const std::int64_t extent :
       {shape.num_pages, shape.num_layers, shape.page_size, shape.latent_dim}) {
    if (extent < 1 || bytes > kMaxBytes / extent) {
      return Status(StatusCode::kOutOfMemory,
                    text("generate: cache: found ", shape.num_pages, " pages of ", shape.page_size,
                         " tokens, needed a size below 2^63 bytes"));
    }
    bytes *= extent;
  }
  Result<io::PagePool> pool = io::PagePool::create(static_cast<std::size_t>(bytes));
  if (!pool.ok()) return pool.status();
  return PagedCache(shape, std::move(scales), *pool);
}

void PagedCache::store(std::int64_t layer, std::int64_t slot, std::span<const float> row) noexcept {
  const std::int64_t page = slot / shape_.page_size;
  const std::int64_t token =
      (page * shape_.num_layers + layer) * shape_.page_size + slot % shape_.page_size;
  const std::size_t first = static_cast<std::size_t>(token * shape_.latent_dim);
  const float inverse_scale = 1.0F / scale(layer);
  if (shape_.format == KvFormat::kE4M3) {
    auto* codes = reinterpret_cast<std::uint8_t*>(pool_.data()) + first;
    for (std::size_t i = 0; i < row.size(); ++i) {
      codes[i] = numeric::float_to_e4m3(row[i] * inverse_scale);
    }
    return;
  }
  auto* halves = reinterpret_cast<std::uint16_t*>(pool_.data()) + first;
  const bool is_bf16 = shape_.format == KvFormat::kBF16;
  for (std::size_t i = 0; i < row.size(); ++i) {
    const float value = row[i] * inverse_scale;
    halves[i] = is_bf16 ? numeric::float_to_bf16(value) : numeric::float_to_f16(value);
  }
}

TensorView PagedCache::layer_view(std::int64_t layer) const noexcept {
  const DType dtype = kv_dtype(shape_.format);
  const std::int64_t layer_elements = shape_.page_size * shape_.latent_dim;
  std::byte* data =
      pool_.data() + static_cast<std::size_t>(layer * layer_elements) * dtype_bytes(dtype);
  TensorView view =
      TensorView::contiguous(data, dtype, {shape_.num_pages, shape_.page_size, shape_.latent_dim});
  view.stride[0] = shape_.num_layers * layer_elements;
  return view;
}

}  // namespace mla::model
