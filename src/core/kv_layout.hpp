// Where a token lies in the paged latent cache, and what its bytes mean.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/portability.hpp"
#include "mla/problem.hpp"

namespace mla {

/// The 656-byte token record of `fp8_ds_mla`.
namespace fp8_ds_mla {
inline constexpr std::int64_t kRank = 512;            ///< latent values, e4m3
inline constexpr std::int64_t kRope = 64;             ///< rotary values, bf16
inline constexpr std::int64_t kScaleGroup = 128;      ///< latent values that share an f32 scale
inline constexpr std::int64_t kNumScales = kRank / kScaleGroup;
inline constexpr std::int64_t kScaleOffset = kRank;   ///< bytes from the token's start
inline constexpr std::int64_t kRopeOffset = kScaleOffset + kNumScales * 4;
inline constexpr std::int64_t kTokenBytes = kRopeOffset + kRope * 2;
static_assert(kTokenBytes == 656);
}  // namespace fp8_ds_mla

/// Byte addresses of tokens; every product is 64-bit.
struct KvLayout {
  const std::byte* base = nullptr;
  std::int64_t num_pages = 0;
  std::int64_t page_size = 0;
  std::int64_t page_stride_bytes = 0;
  std::int64_t token_stride_bytes = 0;

  MLA_HOST_DEVICE const std::byte* token(std::int64_t page, std::int64_t offset) const noexcept {
    return base + page * page_stride_bytes + offset * token_stride_bytes;
  }
  /// The token of slot page * page_size + offset.
  MLA_HOST_DEVICE const std::byte* slot(std::int64_t slot) const noexcept {
    return token(slot / page_size, slot % page_size);
  }
  MLA_HOST_DEVICE std::int64_t num_slots() const noexcept { return num_pages * page_size; }
};

}  // namespace mla
