#include "io/safetensors_header.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "core/diagnostics.hpp"

namespace mla::io {
namespace {

constexpr FileDtype kFileDtypes[] = {
    {"BF16", 16, DType::kBF16},   {"F16", 16, DType::kF16},     {"F32", 32, DType::kF32},
    {"F8_E4M3", 8, DType::kE4M3}, {"I32", 32, DType::kI32},     {"U8", 8, DType::kU8},
    {"BOOL", 8, DType::kNone},    {"F4", 4, DType::kNone},      {"F6_E2M3", 6, DType::kNone},
    {"F6_E3M2", 6, DType::kNone}, {"F8_E5M2", 8, DType::kNone}, {"F8_E8M0", 8, DType::kNone},
    {"I8", 8, DType::kNone},      {"I16", 16, DType::kNone},    {"U16", 16, DType::kNone},
    {"U32", 32, DType::kNone},    {"F64", 64, DType::kNone},    {"I64", 64, DType::kNone},
    {"U64", 64, DType::kNone},    {"C64", 64, DType::kNone},
};

constexpr std::size_t kMessageBytes = 64;

/// Receives the events of the JSON parser. Every event is legal in one place only, so nesting never
/// gets deeper than the format and nothing but the header's own content is kept.
class HeaderHandler {
 public:
  using Json = nlohmann::json;

  bool null() { return unexpected("null"); }
  bool boolean(bool value) { return unexpected(value ? "true" : "false"); }
  bool number_integer(Json::number_integer_t value) { return unexpected(std::to_string(value)); }
  bool number_float(Json::number_float_t, const std::string& token) {
    return unexpected(token.substr(0, kMessageBytes));
  }
  bool binary(Json::binary_t&) { return unexpected("binary data"); }

  bool number_unsigned(Json::number_unsigned_t value) {
    if (place_ == Place::kShape) {
      if (current_.rank == kMaxFileRank) return unexpected(text("more than ", kMaxFileRank));
      if (value > static_cast<std::uint64_t>(INT64_MAX)) return unexpected(std::to_string(value));
      current_.shape[current_.rank++] = static_cast<std::int64_t>(value);
      return true;
    }
    if (place_ == Place::kOffsets) {
      if (num_offsets_ == 2) return unexpected("more than 2");
      (num_offsets_++ == 0 ? current_.begin : current_.end) = value;
      return true;
    }
    return unexpected(std::to_string(value));
  }

  bool string(std::string& value) {
    if (place_ == Place::kMetadata) {
      header.metadata[key_] = std::move(value);
      return true;
    }
    if (place_ == Place::kTensor && key_ == "dtype") {
      current_.dtype = find_file_dtype(value);
      return current_.dtype != nullptr ? true : unexpected(quote(value));
    }
    return unexpected(text("the string ", quote(value)));
  }

  bool start_object(std::size_t) {
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
      return true;
    }
    if (place_ != Place::kTop) return unexpected("an object");
    place_ = name_ == "__metadata__" ? Place::kMetadata : Place::kTensor;
    if (place_ == Place::kMetadata && std::exchange(has_metadata_, true)) {
      return fail("header", "'__metadata__' twice", "each name once");
    }
    current_ = HeaderTensor{};
    fields_ = 0;
    return true;
  }

  bool key(std::string& value) {
    key_ = std::move(value);
    switch (place_) {
      case Place::kTop: name_ = key_; return true;
      case Place::kMetadata:
        if (header.metadata.count(key_) != 0) {
          return fail("header", text("metadata key ", quote(key_), " twice"), "each key once");
        }
        return true;
      case Place::kTensor: return tensor_field();
      default: return unexpected("a key");
    }
  }

  bool end_object() {
    if (place_ == Place::kTensor && !finish_tensor()) return false;
    place_ = place_ == Place::kTop ? Place::kDone : Place::kTop;
    return true;
  }

  bool start_array(std::size_t) {
    if (place_ == Place::kTensor && key_ == "shape") {
      place_ = Place::kShape;
    } else if (place_ == Place::kTensor && key_ == "data_offsets") {
      place_ = Place::kOffsets;
      num_offsets_ = 0;
    } else {
      return unexpected("an array");
    }
    return true;
  }

  bool end_array() {
    if (place_ == Place::kOffsets && num_offsets_ != 2) {
      return unexpected(std::to_string(num_offsets_));
    }
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string& token, const Json::exception&) {
    return fail("header", text("invalid JSON at byte ", position, " near ", quote(token)),
                "a JSON object in UTF-8 with numbers that fit");
  }

  Header header;
  std::string argument, found, needed;  ///< why parsing stopped

 private:
  enum class Place { kStart, kTop, kMetadata, kTensor, kShape, kOffsets, kDone };

  bool fail(std::string where, std::string what, std::string expected) {
    argument = std::move(where);
    found = std::move(what);
    needed = std::move(expected);
    return false;
  }

  bool unexpected(std::string what) {
    const std::string tensor = tensor_name();
    switch (place_) {
      case Place::kStart:
      case Place::kDone: return fail("header", std::move(what), "one JSON object");
      case Place::kTop:
        if (name_ == "__metadata__") return fail(name_, std::move(what), "an object of strings");
        return fail(tensor, std::move(what), "an object with dtype, shape and data_offsets");
      case Place::kMetadata:
        return fail(text("metadata ", quote(key_)), std::move(what), "a string");
      case Place::kShape:
        return fail(tensor + ": shape", std::move(what),
                    text("at most ", kMaxFileRank, " integers from 0 to ", INT64_MAX));
      case Place::kOffsets:
        return fail(tensor + ": data_offsets", std::move(what), "2 integers, begin and end");
      case Place::kTensor: break;
    }
    if (key_ == "dtype") {
      return fail(tensor + ": dtype", std::move(what), "a type of the safetensors format");
    }
    return fail(tensor + ": " + key_, std::move(what), "an array of integers");
  }

  std::string tensor_name() const { return text("tensor ", quote(name_)); }

  bool tensor_field() {
    const unsigned bit = key_ == "dtype"          ? 1U
                         : key_ == "shape"        ? 2U
                         : key_ == "data_offsets" ? 4U
                                                  : 0U;
    if (bit == 0) {
      return fail(tensor_name(), text("the field ", quote(key_)),
                  "only dtype, shape and data_offsets");
    }
    if ((fields_ & bit) != 0) return fail(tensor_name(), key_ + " twice", "each field once");
    fields_ |= bit;
    return true;
  }

  bool finish_tensor() {
    if (fields_ != 7U) {
      const char* missing = (fields_ & 1U) == 0   ? "no dtype"
                            : (fields_ & 2U) == 0 ? "no shape"
                                                  : "no data_offsets";
      return fail(tensor_name(), missing, "dtype, shape and data_offsets");
    }
    std::uint64_t bytes = 0;
    const std::int64_t* shape = current_.shape.data();
    const FileDtype& dtype = *current_.dtype;
    if (!tensor_bytes(shape, current_.rank, dtype.bits, &bytes)) {
      return fail(tensor_name() + ": shape",
                  text(dtype.name, " ", shape_text(shape, current_.rank)),
                  "a size in whole bytes that fits 63 bits");
    }
    if (current_.begin > current_.end || current_.end - current_.begin != bytes) {
      return fail(tensor_name() + ": data_offsets",
                  text("[", current_.begin, ",", current_.end, "]"),
                  text("end - begin = ", bytes, " bytes for ", dtype.name, " ",
                       shape_text(shape, current_.rank)));
    }
    current_.name = name_;
    header.tensors.push_back(std::move(current_));
    return true;
  }

  Place place_ = Place::kStart;
  std::string name_;  // of the tensor, or "__metadata__"
  std::string key_;   // the innermost key
  HeaderTensor current_;
  unsigned fields_ = 0;
  unsigned num_offsets_ = 0;
  bool has_metadata_ = false;
};

std::vector<std::size_t> names_in_order(const std::vector<HeaderTensor>& tensors) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return tensors[a].name < tensors[b].name; });
  return order;
}

}  // namespace

const FileDtype* find_file_dtype(std::string_view name) noexcept {
  for (const FileDtype& row : kFileDtypes) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

const char* safetensors_dtype(DType dtype) noexcept {
  for (const FileDtype& row : kFileDtypes) {
    if (dtype != DType::kNone && row.type == dtype) return row.name;
  }
  return "none";
}

bool tensor_bytes(const std::int64_t* shape, std::size_t rank, unsigned bits,
                  std::uint64_t* bytes) noexcept {
  // Zero extents are left out of the product, because strides are made of the others all the same.
  std::int64_t total_bits = bits;
  bool empty = false;
  for (std::size_t axis = 0; axis < rank; ++axis) {
    if (shape[axis] < 0) return false;
    if (shape[axis] == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(total_bits, shape[axis], &total_bits)) {
      return false;
    }
  }
  if (empty) total_bits = 0;
  if (total_bits % 8 != 0) return false;
  *bytes = static_cast<std::uint64_t>(total_bits) / 8;
  return true;
}

std::string quote(std::string_view raw) {
  std::size_t size = raw.size();
  if (size > kMessageBytes) {
    size = kMessageBytes;
    while (size > 0 && (static_cast<unsigned char>(raw[size]) & 0xC0U) == 0x80U) --size;
  }
  std::string result = "'";
  for (char c : raw.substr(0, size)) {
    const unsigned char byte = static_cast<unsigned char>(c);
    result += byte < 0x20 || byte == 0x7F ? '?' : c;
  }
  result += size < raw.size() ? "...'" : "'";
  return result;
}

std::string shape_text(const std::int64_t* shape, std::size_t rank) {
  std::string result = "[";
  for (std::size_t axis = 0; axis < rank; ++axis) {
    if (axis > 0) result += ',';
    result += std::to_string(shape[axis]);
  }
  return result + "]";
}

Result<Header> parse_header(std::string_view json, const std::string& source,
                            const char* operation) {
  // The JSON parser takes a zero byte for the end of its input and skips a byte order mark.
  if (json.empty() || json.front() != '{' || json.find('\0') != std::string_view::npos) {
    return bad_argument(operation, source + ": header", "other bytes",
                        "JSON text that starts with '{' and holds no zero byte");
  }
  HeaderHandler handler;
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &handler)) {
    return bad_argument(operation, source + ": " + handler.argument, handler.found, handler.needed);
  }
  // Sorting, unlike hashing, has no inputs that make it slow.
  handler.header.by_name = names_in_order(handler.header.tensors);
  const std::vector<HeaderTensor>& tensors = handler.header.tensors;
  const std::vector<std::size_t>& order = handler.header.by_name;
  const auto twice = std::adjacent_find(
      order.begin(), order.end(),
      [&](std::size_t a, std::size_t b) { return tensors[a].name == tensors[b].name; });
  if (twice != order.end()) {
    return bad_argument(operation, source + ": header", quote(tensors[*twice].name) + " twice",
                        "each name once");
  }
  return std::move(handler.header);
}

}  // namespace mla::io
