// Memory of test tensors: aligned, and for outputs surrounded by guard bands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

namespace mla::testkit {

/// Aligned bytes with guard bands on both sides. `kGuardBytes` before and after the payload hold a
/// pattern that `intact` looks for.
class Buffer {
 public:
  static constexpr std::size_t kAlignment = 256;
  static constexpr std::size_t kGuardBytes = 4096;
  static constexpr unsigned char kGuardPattern = 0xA5;

  Buffer() noexcept = default;
  /// Throws std::bad_alloc. The payload is filled with `fill`.
  Buffer(std::size_t bytes, unsigned char fill) : bytes_(bytes) {
    base_ = static_cast<std::byte*>(
        ::operator new(bytes + 2 * kGuardBytes, std::align_val_t{kAlignment}));
    std::memset(base_, kGuardPattern, kGuardBytes);
    std::memset(data(), fill, bytes);
    std::memset(data() + bytes, kGuardPattern, kGuardBytes);
  }
  ~Buffer() { release(); }
  Buffer(Buffer&& other) noexcept : base_(other.base_), bytes_(other.bytes_) {
    other.base_ = nullptr;
    other.bytes_ = 0;
  }
  Buffer& operator=(Buffer&& other) noexcept {
    if (this != &other) {
      release();
      base_ = other.base_;
      bytes_ = other.bytes_;
      other.base_ = nullptr;
      other.bytes_ = 0;
    }
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const noexcept { return base_ == nullptr ? nullptr : base_ + kGuardBytes; }
  std::size_t size() const noexcept { return bytes_; }
  template <class T>
  T* as() const noexcept {
    return reinterpret_cast<T*>(data());
  }

  void fill(unsigned char value) noexcept {
    if (base_ != nullptr) std::memset(data(), value, bytes_);
  }

  /// Whether both guard bands still hold their pattern.
  bool intact() const noexcept {
    if (base_ == nullptr) return true;
    for (std::size_t i = 0; i < kGuardBytes; ++i) {
      if (static_cast<unsigned char>(base_[i]) != kGuardPattern) return false;
      if (static_cast<unsigned char>(data()[bytes_ + i]) != kGuardPattern) return false;
    }
    return true;
  }

  /// A 64-bit fingerprint of the payload, to see whether somebody wrote to an input.
  std::uint64_t fingerprint() const noexcept {
    std::uint64_t hash = 0x9E3779B97F4A7C15ULL ^ bytes_;
    std::size_t i = 0;
    for (; i + 8 <= bytes_; i += 8) {
      std::uint64_t word;
      std::memcpy(&word, data() + i, sizeof(word));
      hash = (hash ^ word) * 0xFF51AFD7ED558CCDULL;
      hash ^= hash >> 32;
    }
    for (; i < bytes_; ++i) {
      hash = (hash ^ static_cast<std::uint64_t>(data()[i])) * 0xFF51AFD7ED558CCDULL;
    }
    return hash;
  }

 private:
  void release() noexcept {
    if (base_ != nullptr) ::operator delete(base_, std::align_val_t{kAlignment});
  }

  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace mla::testkit
