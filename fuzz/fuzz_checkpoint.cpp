// libFuzzer target: model checkpoints from memory. The input is a u16 length, so many bytes of
// config.json, and the bytes of the weights file.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "model/checkpoint.hpp"
#include "mutate.hpp"

namespace {

constexpr std::size_t kPrefix = 2;

std::size_t config_bytes(const std::uint8_t* data, std::size_t size) {
  if (size < kPrefix) return 0;
  const std::size_t wanted = data[0] + std::size_t{256} * data[1];
  return wanted < size - kPrefix ? wanted : size - kPrefix;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < kPrefix) return 0;
  const std::size_t length = config_bytes(data, size);
  // Copies, so that a memory checker sees both ends of both parts.
  const std::vector<char> config(data + kPrefix, data + kPrefix + length);
  const std::vector<std::uint8_t> weights(data + kPrefix + length, data + size);
  const auto checkpoint = mla::model::parse_checkpoint(
      std::string_view(config.data(), config.size()), std::as_bytes(std::span(weights)));
  if (!checkpoint.ok()) {
    if (checkpoint.status().message().empty()) std::abort();
    if (checkpoint.status().code() == mla::StatusCode::kInternal) std::abort();
  }
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  if (size < kPrefix || config_bytes(data, size) == 0 || seed % 4 == 0)
    return LLVMFuzzerMutate(data, size, max_size);
  const std::size_t length = config_bytes(data, size);
  const std::size_t begin = kPrefix + length;
  if (seed % 4 == 1) {  // the config keeps its length, so that the weights stay where they are
    LLVMFuzzerMutate(data + kPrefix, length, length);
    return size;
  }
  return begin +
         mla::fuzz::mutate_safetensors(data + begin, size - begin, max_size - begin, seed / 4);
}
