// OutputFile: a file that appears complete or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "mla/status.hpp"

struct stat;

namespace mla::io {

/// kIo, "operation: path: found <text of errno>, needed ...".
Status io_error(const char* operation, const std::string& path, int error_number,
                const std::string& needed);

/// Writes to a temporary file beside `path` and renames it in `commit`. Without a successful commit
/// nothing at `path` changes and the temporary file is removed.
///
/// A `path` that exists and is not a regular file (a device, a pipe) is written directly.
class OutputFile {
 public:
  /// kIo: the folder or the existing file is not writable. `operation` must outlive the object.
  static Result<OutputFile> create(const char* operation, const std::string& path);

  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  /// Appends bytes; small pieces are collected.
  Status write(std::span<const std::byte> bytes);

  /// Writes what is left to stable storage and gives the file its name.
  Status commit();

 private:
  OutputFile() = default;
  Status write_through(std::span<const std::byte> bytes);
  Status open_temporary(const struct stat* existing);
  void discard() noexcept;

  const char* operation_ = "";
  std::string path_;            // as the caller spelled it, for messages
  std::string final_path_;      // symbolic links resolved
  std::string temporary_path_;  // empty: written directly
  int fd_ = -1;
  std::uint64_t written_ = 0;
  std::vector<std::byte> pending_;
};

}  // namespace mla::io
