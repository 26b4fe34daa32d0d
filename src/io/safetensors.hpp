// The safetensors format: u64 header length, JSON header, tensor bytes.
//
// A file is validated in full before any view of it is handed out: the header length against the
// file, JSON and UTF-8, duplicate names, types, shapes, and that the tensors cover the data
// exactly, without overlaps and holes. No input makes these functions throw, crash or allocate more
// than a small multiple of the file's own size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/status.hpp"
#include "mla/tensor.hpp"

namespace mla::io {

/// The format's own limit on the header.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
/// Axes of a tensor in a file. A TensorView takes TensorView::kMaxRank.
inline constexpr std::size_t kMaxFileRank = 8;

using Metadata = std::map<std::string, std::string>;

class MappedFile;  // io/mapped_file.hpp

/// One tensor of a file.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;                 ///< the format's spelling, for example "BF16" or "I64"
  DType type = DType::kNone;         ///< kNone when libmla has no such type
  std::vector<std::int64_t> shape;   ///< at most kMaxFileRank axes; the product fits 63 bits
  std::span<const std::byte> bytes;  ///< contiguous; aligned for `type`

  /// "BF16 [2,16,576]", for messages.
  std::string to_string() const;
};

/// A validated file. Cheap to copy; copies share the bytes.
class SafetensorsFile {
 public:
  /// Maps and validates `path`. kIo: it cannot be read; kInvalidArgument: it breaks the format.
  /// Messages start with `operation`.
  static Result<SafetensorsFile> open(const std::string& path,
                                      const char* operation = "read_safetensors");

  /// Validates bytes in memory, which must outlive the object and every view. `source` stands for
  /// the path in messages.
  static Result<SafetensorsFile> parse(std::span<const std::byte> bytes,
                                       const std::string& source = "memory",
                                       const char* operation = "read_safetensors");

  /// In the order of the header.
  std::vector<std::string> names() const;
  const std::vector<SafetensorsEntry>& entries() const noexcept;
  /// Null when there is no such tensor.
  const SafetensorsEntry* find(std::string_view name) const noexcept;
  /// A contiguous view. Refused by name: no such tensor, a type libmla does not have, rank above
  /// TensorView::kMaxRank.
  Result<TensorView> view(std::string_view name) const;

  const Metadata& metadata() const noexcept;
  const std::string& source() const noexcept;

 private:
  struct State;
  SafetensorsFile() = default;
  static Result<SafetensorsFile> build(const MappedFile& file, std::span<const std::byte> bytes,
                                       const std::string& source, const char* operation) noexcept;

  std::shared_ptr<const State> state_;
};

struct NamedTensor {
  std::string name;
  TensorView view;  ///< any strides; written contiguous
};

/// Writes `path` completely or not at all (see OutputFile); a device such as /dev/null is written
/// directly. Equal arguments give equal bytes. Tensors are stored widest type first, so that each
/// is aligned in the file. kInvalidArgument: a name twice, not UTF-8 or "__metadata__", or a view
/// without memory. kIo: path and the system's reason.
Status write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                         const Metadata& metadata = {},
                         const char* operation = "write_safetensors");

/// The format's spelling of a type, for example "F8_E4M3"; "none" for kNone.
const char* safetensors_dtype(DType dtype) noexcept;

}  // namespace mla::io
