// PagePool: memory of any size that holds 0xFF everywhere until it is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "mla/status.hpp"

namespace mla::io {

/// 0xFF.. is a NaN in every storage type of the cache (bf16, f16, f32, e4m3), so a page that nobody
/// placed poisons whatever reads it.
///
/// A large pool maps one small filler over its whole length, copy on write: it costs the filler and
/// the 4 KiB frames that were written, so a pool of terabytes is cheap. Copies share the memory.
class PagePool {
 public:
  /// kOutOfMemory: the address space or the mappings do not suffice.
  static Result<PagePool> create(std::size_t bytes);

  std::byte* data() const noexcept { return static_cast<std::byte*>(memory_.get()); }
  std::size_t size() const noexcept { return size_; }
  const std::shared_ptr<void>& owner() const noexcept { return memory_; }

 private:
  std::shared_ptr<void> memory_;
  std::size_t size_ = 0;
};

}  // namespace mla::io
