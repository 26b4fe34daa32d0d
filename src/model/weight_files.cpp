#include "model/weight_files.hpp"

#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/diagnostics.hpp"
#include "core/numeric.hpp"
#include "io/mapped_file.hpp"

namespace mla::model {
namespace {

constexpr const char* kOperation = "load_checkpoint";
constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

/// A shard's name may not lead out of the checkpoint's folder.
bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string("/\\\0", 3)) == std::string::npos;
}

/// tensor name -> shard file name
Result<std::map<std::string, std::string>> read_index(const std::string& path) {
  const Result<io::MappedFile> file = io::MappedFile::open(kOperation, path);
  if (!file.ok()) return file.status();
  const std::span<const std::byte> bytes = file->bytes();
  const std::string_view json(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const nlohmann::json root = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object() || !root.contains("weight_map") || !root["weight_map"].is_object()) {
    return bad_argument(kOperation, path, "no weight_map", "a JSON object with a weight_map");
  }
  std::map<std::string, std::string> index;
  for (const auto& [tensor, shard] : root["weight_map"].items()) {
    if (!shard.is_string() || !is_plain_file_name(shard.get<std::string>())) {
      return bad_argument(
          kOperation,
          text(path, ": weight_map[",
               nlohmann::json(tensor).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace),
               "]"),
          "no plain file name", "the name of a shard beside the index");
    }
    index.emplace(tensor, shard.get<std::string>());
  }
  return index;
}

template <class Bits, class Convert>
void convert(std::span<const std::byte> bytes, std::vector<float>& out, Convert to_float) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    Bits bits;
    std::memcpy(&bits, bytes.data() + i * sizeof(Bits), sizeof(Bits));
    out[i] = to_float(bits);
  }
}

}  // namespace

Result<WeightFiles> WeightFiles::parse(std::span<const std::byte> bytes) {
  Result<io::SafetensorsFile> file = io::SafetensorsFile::parse(bytes, "weights", kOperation);
  if (!file.ok()) return file.status();
  WeightFiles weights;
  weights.files_.push_back(*std::move(file));
  return weights;
}

Result<WeightFiles> WeightFiles::open(const std::filesystem::path& directory) {
  WeightFiles weights;
  std::error_code error;
  const std::filesystem::path index_path = directory / kIndexFile;
  if (std::filesystem::exists(directory / kSingleFile, error) ||
      !std::filesystem::exists(index_path, error)) {
    Result<io::SafetensorsFile> file =
        io::SafetensorsFile::open((directory / kSingleFile).string(), kOperation);
    if (!file.ok()) return file.status();
    weights.files_.push_back(*std::move(file));
    return weights;
  }
  const Result<std::map<std::string, std::string>> index = read_index(index_path.string());
  if (!index.ok()) return index.status();
  std::map<std::string, std::size_t> opened;
  for (const auto& [tensor, shard] : *index) {
    const auto [place, is_new] = opened.emplace(shard, weights.files_.size());
    if (is_new) {
      Result<io::SafetensorsFile> file =
          io::SafetensorsFile::open((directory / shard).string(), kOperation);
      if (!file.ok()) return file.status();
      weights.files_.push_back(*std::move(file));
    }
    weights.shard_of_.emplace(tensor, place->second);
  }
  if (weights.files_.empty()) {
    return bad_argument(kOperation, index_path.string(), "an empty weight_map", "tensors");
  }
  return weights;
}

const io::SafetensorsEntry* WeightFiles::find(const std::string& name) const {
  if (shard_of_.empty()) return files_.front().find(name);
  const auto shard = shard_of_.find(name);
  return shard == shard_of_.end() ? nullptr : files_[shard->second].find(name);
}

Result<std::vector<float>> WeightFiles::read(const std::string& name,
                                             const std::vector<std::int64_t>& shape) const {
  const io::SafetensorsEntry* entry = find(name);
  std::string needed = "[";
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    needed += text(axis > 0 ? "," : "", shape[axis]);
  }
  needed += "]";
  if (entry == nullptr) return bad_argument(kOperation, name, "no such tensor", needed);
  if (entry->shape != shape) return bad_argument(kOperation, name, entry->to_string(), needed);
  if (entry->type != DType::kF32 && entry->type != DType::kF16 && entry->type != DType::kBF16) {
    return Status(StatusCode::kUnsupported, text(kOperation, ": ", name, ": found ",
                                                 entry->to_string(), ", needed F32, F16 or BF16"));
  }
  std::vector<float> values(entry->bytes.size() / dtype_bytes(entry->type));
  switch (entry->type) {
    case DType::kF16: convert<std::uint16_t>(entry->bytes, values, numeric::f16_to_float); break;
    case DType::kBF16: convert<std::uint16_t>(entry->bytes, values, numeric::bf16_to_float); break;
    default: convert<std::uint32_t>(entry->bytes, values, numeric::bits_to_float); break;
  }
  return values;
}

}  // namespace mla::model
