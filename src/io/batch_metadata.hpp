// The names of a batch file and the strict parsing of its metadata. Private to src/io.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "io/safetensors.hpp"
#include "mla/problem.hpp"

namespace mla::io {

inline constexpr char kBatchFormat[] = "mla-batch-1";

std::span<const char* const> known_batch_keys() noexcept;
std::span<const char* const> known_batch_tensors() noexcept;

/// The known name that `name` was probably meant to be: equal but for one edit, letter case, '-'
/// and
/// '_'. Null when there is none, or the name is too short to tell.
const char* likely_name(std::string_view name, std::span<const char* const> known) noexcept;

/// Reads values of a metadata map. An absent key leaves the value alone.
class MetadataParser {
 public:
  MetadataParser(const Metadata& metadata, std::string source, const char* operation)
      : metadata_(metadata), source_(std::move(source)), operation_(operation) {}

  bool has(const char* key) const { return metadata_.count(key) != 0; }
  Status require(const char* key, const std::string& needed) const;
  Status integer(const char* key, std::int64_t lowest, std::int64_t highest,
                 std::int64_t* value) const;
  Status number(const char* key, float* value) const;
  Status boolean(const char* key, bool* value) const;
  Status lse_base(const char* key, LseBase* value) const;
  Status out_dtype(const char* key, DType* value) const;
  Status format(const char* key) const;

 private:
  const std::string* find(const char* key) const;
  Status refuse(const char* key, const std::string& needed) const;

  const Metadata& metadata_;
  std::string source_;
  const char* operation_;
};

}  // namespace mla::io
