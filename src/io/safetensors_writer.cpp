#include <algorithm>
#include <exception>
#include <new>
#include <nlohmann/json.hpp>
#include <set>

#include "core/diagnostics.hpp"
#include "io/output_file.hpp"
#include "io/safetensors.hpp"
#include "io/safetensors_header.hpp"

namespace mla::io {
namespace {

/// The data starts at a multiple of this, and so does the widest tensor.
constexpr std::size_t kDataAlignment = 64;

/// The JSON form of a string. False when it is not UTF-8.
bool json_string(const std::string& raw, std::string* result) {
  // dump() throws on a string that is not UTF-8; replacing tells it from the text that came back.
  const std::string strict =
      nlohmann::json(raw).dump(-1, ' ', false, nlohmann::json::error_handler_t::ignore);
  const std::string replaced =
      nlohmann::json(raw).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  *result = strict;
  return strict == replaced;
}

Status check_tensor(const char* operation, const NamedTensor& tensor, std::uint64_t* bytes) {
  const TensorView& view = tensor.view;
  const std::string argument = text("tensor ", quote(tensor.name));
  if (!view.given()) return bad_argument(operation, argument, "no type", "a tensor");
  if (view.rank < 0 || view.rank > TensorView::kMaxRank) {
    return bad_argument(operation, argument, text("rank ", view.rank),
                        text("0 to ", TensorView::kMaxRank));
  }
  const unsigned bits = static_cast<unsigned>(dtype_bytes(view.dtype)) * 8;
  if (!tensor_bytes(view.shape, static_cast<std::size_t>(view.rank), bits, bytes)) {
    return bad_argument(operation, argument,
                        shape_text(view.shape, static_cast<std::size_t>(view.rank)),
                        "extents from 0 whose product fits 63 bits");
  }
  if (*bytes > 0 && view.data == nullptr) {
    return bad_argument(operation, argument, "a null pointer", text(*bytes, " bytes"));
  }
  return {};
}

/// The elements in row-major order, in the longest runs that lie contiguous in memory.
Status write_elements(OutputFile& file, const TensorView& view) {
  const std::int64_t element = static_cast<std::int64_t>(dtype_bytes(view.dtype));
  int outer = view.rank;
  std::int64_t run = 1;
  while (outer > 0 && (view.stride[outer - 1] == run || view.shape[outer - 1] == 1)) {
    run *= view.shape[--outer];
  }
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.shape[axis] == 0) return {};
  }
  std::int64_t at[TensorView::kMaxRank] = {};
  const std::byte* base = static_cast<const std::byte*>(view.data);
  for (;;) {
    std::int64_t offset = 0;
    for (int axis = 0; axis < outer; ++axis) offset += at[axis] * view.stride[axis];
    MLA_RETURN_IF_ERROR(
        file.write({base + offset * element, static_cast<std::size_t>(run * element)}));
    int axis = outer - 1;
    while (axis >= 0 && ++at[axis] == view.shape[axis]) at[axis--] = 0;
    if (axis < 0) return {};
  }
}

/// The length, the JSON text and its padding. `order` lists the tensors as their data will lie.
Result<std::string> make_header(const char* operation, const std::vector<NamedTensor>& tensors,
                                const std::vector<std::size_t>& order,
                                const std::vector<std::uint64_t>& bytes, const Metadata& metadata) {
  std::string json = "{";
  std::string key, value;
  if (!metadata.empty()) {
    json += "\"__metadata__\":";
    char separator = '{';
    for (const auto& [raw_key, raw_value] : metadata) {
      if (!json_string(raw_key, &key) || !json_string(raw_value, &value)) {
        return bad_argument(operation, text("metadata ", quote(raw_key)), "other bytes", "UTF-8");
      }
      json += text(separator, key, ":", value);
      separator = ',';
    }
    json += "}";
  }
  std::uint64_t begin = 0;
  for (std::size_t i : order) {
    const NamedTensor& tensor = tensors[i];
    if (!json_string(tensor.name, &key)) {
      return bad_argument(operation, text("tensor ", quote(tensor.name)), "other bytes", "UTF-8");
    }
    if (json.size() > 1) json += ',';
    json += text(key, ":{\"dtype\":\"", safetensors_dtype(tensor.view.dtype), "\",\"shape\":",
                 shape_text(tensor.view.shape, static_cast<std::size_t>(tensor.view.rank)),
                 ",\"data_offsets\":[", begin, ",", begin + bytes[i], "]}");
    begin += bytes[i];
  }
  json += '}';
  while ((sizeof(std::uint64_t) + json.size()) % kDataAlignment != 0) json += ' ';
  if (json.size() > kMaxHeaderBytes) {
    return bad_argument(operation, "header", text(json.size(), " bytes"),
                        text("at most ", kMaxHeaderBytes));
  }
  std::string header;
  for (unsigned i = 0; i < sizeof(std::uint64_t); ++i) {
    header += static_cast<char>((static_cast<std::uint64_t>(json.size()) >> (8 * i)) & 0xFFU);
  }
  return header + json;
}

Status write_file(const std::string& path, const std::vector<NamedTensor>& tensors,
                  const Metadata& metadata, const char* operation) {
  std::set<std::string> names{"__metadata__"};
  std::vector<std::uint64_t> bytes(tensors.size());
  std::vector<std::size_t> order(tensors.size());
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    order[i] = i;
    if (!names.insert(tensors[i].name).second) {
      return bad_argument(operation, text("tensor ", quote(tensors[i].name)), "a name in use",
                          "each name once and none '__metadata__'");
    }
    MLA_RETURN_IF_ERROR(check_tensor(operation, tensors[i], &bytes[i]));
    if (__builtin_add_overflow(total, bytes[i], &total) || total > INT64_MAX) {
      return bad_argument(operation, "tensors", "more than 63 bits of bytes", "a smaller sum");
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return dtype_bytes(tensors[a].view.dtype) > dtype_bytes(tensors[b].view.dtype);
  });
  Result<std::string> header = make_header(operation, tensors, order, bytes, metadata);
  if (!header.ok()) return header.status();

  Result<OutputFile> file = OutputFile::create(operation, path);
  if (!file.ok()) return file.status();
  MLA_RETURN_IF_ERROR(file->write(std::as_bytes(std::span(*header))));
  for (std::size_t i : order) MLA_RETURN_IF_ERROR(write_elements(*file, tensors[i].view));
  return file->commit();
}

}  // namespace

Status write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                         const Metadata& metadata, const char* operation) {
  try {
    return write_file(path, tensors, metadata, operation);
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory,
            text(operation, ": ", path, ": found too little memory, needed room for the header")};
  } catch (const std::exception& error) {
    return {StatusCode::kInternal,
            text(operation, ": ", path, ": found ", error.what(), ", needed no exception")};
  }
}

}  // namespace mla::io
