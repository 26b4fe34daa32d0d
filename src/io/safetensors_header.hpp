// The JSON header of a safetensors file. Private to src/io.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.hpp"

namespace mla::io {

/// A type of the format.
struct FileDtype {
  const char* name;
  unsigned bits;
  DType type;  ///< kNone: libmla has no such type
};

/// Null for a name that the format does not have.
const FileDtype* find_file_dtype(std::string_view name) noexcept;

/// One tensor of the header. Checked in itself: type, rank, extents, and that its offsets span
/// exactly its bytes. Not checked against the other tensors and the file's size.
struct HeaderTensor {
  std::string name;
  const FileDtype* dtype = nullptr;
  std::size_t rank = 0;
  std::array<std::int64_t, kMaxFileRank> shape{};
  std::uint64_t begin = 0;  ///< bytes from the start of the data
  std::uint64_t end = 0;
};

struct Header {
  std::vector<HeaderTensor> tensors;  ///< in the order of the text
  std::vector<std::size_t> by_name;   ///< indices into `tensors`, names ascending and distinct
  Metadata metadata;
};

/// Parses the JSON text. The message starts with "operation: source: ".
Result<Header> parse_header(std::string_view json, const std::string& source,
                            const char* operation);

/// Bytes of a contiguous tensor. False when the product of its non-zero extents, its bits, or any
/// stride leaves 63 bits, an extent is negative, or the bits end inside a byte.
bool tensor_bytes(const std::int64_t* shape, std::size_t rank, unsigned bits,
                  std::uint64_t* bytes) noexcept;

/// A string of a file as it may stand in a message: quoted, without control characters, cut.
std::string quote(std::string_view raw);

/// "[2,16,576]".
std::string shape_text(const std::int64_t* shape, std::size_t rank);

}  // namespace mla::io
