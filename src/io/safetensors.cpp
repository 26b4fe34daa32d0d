#include "io/safetensors.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <numeric>
#include <utility>

#include "core/diagnostics.hpp"
#include "io/mapped_file.hpp"
#include "io/safetensors_header.hpp"

namespace mla::io {

struct SafetensorsFile::State {
  MappedFile file;
  std::string source;
  std::string operation;
  Metadata metadata;
  std::vector<SafetensorsEntry> entries;
  std::vector<std::size_t> by_name;                // indices into `entries`
  std::vector<std::vector<std::uint64_t>> copies;  // of misaligned tensors
};

namespace {

constexpr std::uint64_t kLengthBytes = 8;

std::uint64_t load_u64_le(const std::byte* bytes) noexcept {
  std::uint64_t value = 0;
  for (unsigned i = 0; i < kLengthBytes; ++i) {
    value |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  }
  return value;
}

/// The tensors cover [0, data_bytes) without overlaps and holes.
Status check_coverage(const std::vector<HeaderTensor>& tensors, std::uint64_t data_bytes,
                      const std::string& source, const char* operation) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(tensors[a].begin, tensors[a].end) <
           std::pair(tensors[b].begin, tensors[b].end);
  });
  std::uint64_t covered = 0;
  for (std::size_t i : order) {
    const HeaderTensor& tensor = tensors[i];
    if (tensor.end > data_bytes || tensor.begin != covered) {
      const std::string needed =
          tensor.end > data_bytes
              ? text("an end within the ", data_bytes, " bytes of data in the file")
              : text("begin = ", covered, " (tensors lie without ",
                     tensor.begin < covered ? "overlap" : "holes", ")");
      return bad_argument(operation,
                          text(source, ": tensor ", quote(tensor.name), ": data_offsets"),
                          text("[", tensor.begin, ",", tensor.end, "]"), needed);
    }
    covered = tensor.end;
  }
  if (covered != data_bytes) {
    return bad_argument(operation, source, text(data_bytes, " bytes of data"),
                        text(covered, ", the end of the last tensor"));
  }
  return {};
}

/// Bytes aligned for `type`: the file's own, or a copy when the format's order put them elsewhere.
std::span<const std::byte> aligned_bytes(std::span<const std::byte> bytes, DType type,
                                         std::vector<std::vector<std::uint64_t>>& copies) {
  const std::size_t alignment = type == DType::kNone ? 1 : dtype_bytes(type);
  if (bytes.empty()) {
    alignas(std::uint64_t) static constexpr std::byte kNoBytes[sizeof(std::uint64_t)] = {};
    return {kNoBytes, 0};
  }
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignment == 0) return bytes;
  std::vector<std::uint64_t>& copy = copies.emplace_back(bytes.size() / sizeof(std::uint64_t) + 1);
  std::memcpy(copy.data(), bytes.data(), bytes.size());
  return {reinterpret_cast<const std::byte*>(copy.data()), bytes.size()};
}

/// The header's text and the data behind it.
struct Parts {
  std::string_view json;
  std::span<const std::byte> data;
};

Result<Parts> split_file(std::span<const std::byte> bytes, const std::string& source,
                         const char* operation) {
  if (bytes.size() < kLengthBytes) {
    return bad_argument(operation, source, text(bytes.size(), " bytes"),
                        text("at least ", kLengthBytes, ", the length of the header"));
  }
  const std::uint64_t length = load_u64_le(bytes.data());
  const std::string argument = source + ": header length";
  if (length > kMaxHeaderBytes) {
    return bad_argument(operation, argument, length, text("at most ", kMaxHeaderBytes));
  }
  if (length > bytes.size() - kLengthBytes) {
    return bad_argument(operation, argument, length,
                        text("at most ", bytes.size() - kLengthBytes, ", the rest of the file"));
  }
  const std::span<const std::byte> header = bytes.subspan(kLengthBytes, length);
  return Parts{{reinterpret_cast<const char*>(header.data()), header.size()},
               bytes.subspan(kLengthBytes + length)};
}

}  // namespace

std::string SafetensorsEntry::to_string() const {
  return dtype + " " + shape_text(shape.data(), shape.size());
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path, const char* operation) {
  Result<MappedFile> file = MappedFile::open(operation, path);
  if (!file.ok()) return file.status();
  return build(*file, file->bytes(), path, operation);
}

Result<SafetensorsFile> SafetensorsFile::parse(std::span<const std::byte> bytes,
                                               const std::string& source, const char* operation) {
  return build(MappedFile(), bytes, source, operation);
}

Result<SafetensorsFile> SafetensorsFile::build(const MappedFile& mapped,
                                               std::span<const std::byte> bytes,
                                               const std::string& source,
                                               const char* operation) noexcept try {
  Result<Parts> parts = split_file(bytes, source, operation);
  if (!parts.ok()) return parts.status();
  Result<Header> header = parse_header(parts->json, source, operation);
  if (!header.ok()) return header.status();
  MLA_RETURN_IF_ERROR(check_coverage(header->tensors, parts->data.size(), source, operation));

  const auto state = std::make_shared<State>();
  state->file = mapped;
  state->source = source;
  state->operation = operation;
  state->metadata = std::move(header->metadata);
  state->by_name = std::move(header->by_name);
  state->entries.reserve(header->tensors.size());
  for (HeaderTensor& tensor : header->tensors) {
    SafetensorsEntry& entry = state->entries.emplace_back();
    entry.name = std::move(tensor.name);
    entry.dtype = tensor.dtype->name;
    entry.type = tensor.dtype->type;
    entry.shape.assign(tensor.shape.begin(),
                       tensor.shape.begin() + static_cast<std::ptrdiff_t>(tensor.rank));
    entry.bytes = aligned_bytes(parts->data.subspan(tensor.begin, tensor.end - tensor.begin),
                                entry.type, state->copies);
  }
  SafetensorsFile file;
  file.state_ = state;
  return file;
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kOutOfMemory,
                text(operation, ": ", source, ": found too little memory, needed more"));
} catch (const std::exception& error) {
  return Status(StatusCode::kInternal,
                text(operation, ": ", source, ": found ", error.what(), ", needed no exception"));
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> result;
  result.reserve(state_->entries.size());
  for (const SafetensorsEntry& entry : state_->entries) result.push_back(entry.name);
  return result;
}

const std::vector<SafetensorsEntry>& SafetensorsFile::entries() const noexcept {
  return state_->entries;
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const noexcept {
  const std::vector<SafetensorsEntry>& all = state_->entries;
  const auto position = std::lower_bound(
      state_->by_name.begin(), state_->by_name.end(), name,
      [&](std::size_t i, std::string_view wanted) { return all[i].name < wanted; });
  if (position == state_->by_name.end() || all[*position].name != name) return nullptr;
  return &all[*position];
}

Result<TensorView> SafetensorsFile::view(std::string_view name) const {
  const std::string argument = text(state_->source, ": tensor ", quote(name));
  const SafetensorsEntry* entry = find(name);
  const char* operation = state_->operation.c_str();
  if (entry == nullptr) return bad_argument(operation, argument, "no such tensor", "one");
  if (entry->type == DType::kNone) {
    return bad_argument(operation, argument, entry->to_string(),
                        "BF16, F16, F32, F8_E4M3, I32 or U8");
  }
  if (entry->shape.size() > TensorView::kMaxRank) {
    return bad_argument(operation, argument, entry->to_string(),
                        text("at most ", TensorView::kMaxRank, " axes"));
  }
  TensorView view;
  view.data = const_cast<std::byte*>(entry->bytes.data());
  view.dtype = entry->type;
  view.rank = static_cast<int>(entry->shape.size());
  std::int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    view.shape[axis] = entry->shape[static_cast<std::size_t>(axis)];
    view.stride[axis] = stride;
    // An empty axis leaves the outer strides as if it had one element.
    if (view.shape[axis] > 0) stride *= view.shape[axis];
  }
  return view;
}

const Metadata& SafetensorsFile::metadata() const noexcept {
  return state_->metadata;
}
const std::string& SafetensorsFile::source() const noexcept {
  return state_->source;
}

}  // namespace mla::io
