// Hand-made files and temporary folders for the tests of src/io.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors.hpp"

namespace mla::io::test {

using Bytes = std::vector<std::byte>;

/// A file made of a JSON text as it is and `data_bytes` bytes 0, 1, 2 ...
inline Bytes raw_file(const std::string& json, std::size_t data_bytes) {
  Bytes file;
  for (unsigned i = 0; i < 8; ++i) {
    file.push_back(static_cast<std::byte>((std::uint64_t{json.size()} >> (8 * i)) & 0xFFU));
  }
  for (char c : json) file.push_back(static_cast<std::byte>(c));
  for (std::size_t i = 0; i < data_bytes; ++i) file.push_back(static_cast<std::byte>(i & 0xFFU));
  return file;
}

inline Bytes read_bytes(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string content((std::istreambuf_iterator<char>(stream)),
                            std::istreambuf_iterator<char>());
  Bytes bytes(content.size());
  std::memcpy(bytes.data(), content.data(), content.size());
  return bytes;
}

inline void write_bytes(const std::string& path, std::span<const std::byte> bytes) {
  std::ofstream stream(path, std::ios::binary);
  stream.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
}

/// A folder that is removed with the fixture.
class FolderTest : public ::testing::Test {
 protected:
  FolderTest() {
    std::string pattern = ::testing::TempDir() + "mla_io_XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
  }
  ~FolderTest() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  std::size_t num_files() const {
    std::size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_)) ++count;
    return count;
  }

  std::string folder_;
};

inline ::testing::AssertionResult mentions(const Status& status, StatusCode code,
                                           const std::vector<std::string>& parts) {
  if (status.code() != code) {
    return ::testing::AssertionFailure()
           << "code " << to_string(status.code()) << ": " << status.message();
  }
  for (const std::string& part : parts) {
    if (status.message().find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << "no \"" << part << "\" in: " << status.message();
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace mla::io::test
