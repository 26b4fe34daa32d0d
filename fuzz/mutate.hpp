// A libFuzzer mutator for safetensors bytes: it changes the JSON text or the data, and puts the
// right header length in front, which blind mutation would break nearly always.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace mla::fuzz {

inline constexpr std::size_t kLengthBytes = 8;

/// Mutates one of the two parts in place. Returns the new size.
inline std::size_t mutate_safetensors(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                      unsigned seed) {
  std::uint64_t length = 0;
  if (size >= kLengthBytes) std::memcpy(&length, data, kLengthBytes);
  constexpr unsigned kBlindShare = 8;  // one in so many mutations may break the length
  if (size < kLengthBytes || length > size - kLengthBytes || seed % kBlindShare == 0) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  const std::uint8_t* const begin = data;
  const std::uint8_t* const middle = begin + kLengthBytes + length;
  std::vector<std::uint8_t> header(begin + kLengthBytes, middle);
  std::vector<std::uint8_t> body(middle, begin + size);
  const bool change_header = seed / kBlindShare % 4 != 0;
  std::vector<std::uint8_t>& part = change_header ? header : body;
  const std::size_t old_size = part.size();
  const std::size_t room = old_size + (max_size - size);
  if (room == 0) return size;
  part.resize(room);
  part.resize(LLVMFuzzerMutate(part.data(), old_size, room));
  length = header.size();
  std::memcpy(data, &length, kLengthBytes);
  if (!header.empty()) std::memcpy(data + kLengthBytes, header.data(), header.size());
  if (!body.empty()) std::memcpy(data + kLengthBytes + length, body.data(), body.size());
  return kLengthBytes + header.size() + body.size();
}

}  // namespace mla::fuzz
