// MappedFile: the bytes of a regular file, read-only.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "mla/status.hpp"

namespace mla::io {

/// Owns a private read-only mapping of a whole file. Copies share it.
///
/// As with every mapping, a file that another process truncates meanwhile must not be read.
class MappedFile {
 public:
  /// kIo: `path` cannot be opened or mapped, or is not a regular file. The message starts with
  /// `operation`.
  static Result<MappedFile> open(const char* operation, const std::string& path);

  std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::shared_ptr<const void> mapping_;
  std::span<const std::byte> bytes_;
};

}  // namespace mla::io
