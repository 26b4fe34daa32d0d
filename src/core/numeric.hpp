// Exact conversions between f32 and the storage types, one documented rounding everywhere:
// round to nearest, ties to even; NaN stays NaN; e4m3 saturates at 448.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/portability.hpp"

namespace mla::numeric {

MLA_HOST_DEVICE inline float bits_to_float(std::uint32_t bits) noexcept {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

MLA_HOST_DEVICE inline std::uint32_t float_to_bits(float value) noexcept {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

MLA_HOST_DEVICE inline float bf16_to_float(std::uint16_t bits) noexcept {
  return bits_to_float(static_cast<std::uint32_t>(bits) << 16);
}

MLA_HOST_DEVICE inline std::uint16_t float_to_bf16(float value) noexcept {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x0040U);  // quiet NaN, payload kept
  }
  const std::uint32_t round_to_even = 0x7FFFU + ((bits >> 16) & 1U);
  return static_cast<std::uint16_t>((bits + round_to_even) >> 16);
}

MLA_HOST_DEVICE inline float f16_to_float(std::uint16_t half) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  if (magnitude >= 0x7C00U) {  // infinity or NaN
    return bits_to_float(sign | 0x7F800000U | ((magnitude & 0x3FFU) << 13));
  }
  // Subnormals and normals alike: the exponent is rebased by an exact multiplication with 2^112.
  const float rebased = bits_to_float(magnitude << 13) * bits_to_float((112U + 127U) << 23);
  return bits_to_float(sign | float_to_bits(rebased));
}

MLA_HOST_DEVICE inline std::uint16_t float_to_f16(float value) noexcept {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<std::uint16_t>(sign | 0x7E00U);
  if (magnitude >= 0x477FF000U) return static_cast<std::uint16_t>(sign | 0x7C00U);  // >= 65520
  if (magnitude < 0x38800000U) {  // below the smallest normal half, 2^-14
    // Adding 0.5 puts the last bit of a half subnormal (2^-24) at the last bit of the float.
    const float shifted = bits_to_float(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign | (float_to_bits(shifted) - 0x3F000000U));
  }
  const std::uint32_t round_to_even = 0x0FFFU + ((magnitude >> 13) & 1U);
  return static_cast<std::uint16_t>(sign | ((magnitude + round_to_even - 0x38000000U) >> 13));
}

MLA_HOST_DEVICE inline float e4m3_to_float(std::uint8_t code) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80U) << 24;
  const std::uint32_t magnitude = code & 0x7FU;
  if (magnitude == 0x7FU) return bits_to_float(sign | 0x7FC00000U);
  const float rebased = bits_to_float(magnitude << 20) * bits_to_float((120U + 127U) << 23);
  return bits_to_float(sign | float_to_bits(rebased));
}

/// Saturating: |value| >= 464 and infinities become 448; NaN becomes 0x7F with the sign kept.
MLA_HOST_DEVICE inline std::uint8_t float_to_e4m3(float value) noexcept {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<std::uint8_t>(sign | 0x7FU);
  if (magnitude >= 0x43E00000U) return static_cast<std::uint8_t>(sign | 0x7EU);  // >= 448
  if (magnitude < 0x3C800000U) {  // below the smallest normal, 2^-6
    // Adding 2^14 puts the last bit of an e4m3 subnormal (2^-9) at the last bit of the float.
    const float shifted = bits_to_float(magnitude) + 16384.0F;
    return static_cast<std::uint8_t>(sign | (float_to_bits(shifted) - 0x46800000U));
  }
  const std::uint32_t round_to_even = 0x7FFFFU + ((magnitude >> 20) & 1U);
  const std::uint32_t rounded = (magnitude + round_to_even - (120U << 23)) >> 20;
  return static_cast<std::uint8_t>(sign | (rounded > 0x7EU ? 0x7EU : rounded));
}

}  // namespace mla::numeric
