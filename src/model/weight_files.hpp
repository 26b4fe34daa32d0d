// WeightFiles: the tensors of a checkpoint by name, from one safetensors file or several shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors.hpp"
#include "mla/status.hpp"

namespace mla::model {

class WeightFiles {
 public:
  /// DIR/model.safetensors, else every shard of DIR/model.safetensors.index.json.
  static Result<WeightFiles> open(const std::filesystem::path& directory);
  /// One file in memory, which must outlive the object.
  static Result<WeightFiles> parse(std::span<const std::byte> bytes);

  /// The named tensor in f32. kInvalidArgument: no such tensor, or another shape than `shape`.
  /// kUnsupported: a type other than f32, f16 and bf16. Allocates only once all of that is right,
  /// so never more than twice the file's bytes.
  Result<std::vector<float>> read(const std::string& name,
                                  const std::vector<std::int64_t>& shape) const;

 private:
  const io::SafetensorsEntry* find(const std::string& name) const;

  std::vector<io::SafetensorsFile> files_;
  std::map<std::string, std::size_t> shard_of_;  ///< empty for a single file
};

}  // namespace mla::model
