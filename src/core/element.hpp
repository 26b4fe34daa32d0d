// Single elements of a TensorView in host memory, for code that is not a fast path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/numeric.hpp"
#include "mla/tensor.hpp"

namespace mla {

/// First element of row (i, j).
inline std::byte* row_address(const TensorView& view, std::int64_t i, std::int64_t j) noexcept {
  return static_cast<std::byte*>(view.data) +
         (i * view.stride[0] + j * view.stride[1]) *
             static_cast<std::int64_t>(dtype_bytes(view.dtype));
}

/// Element `index` of a row of f32, bf16, f16 or e4m3, at any address; exact.
inline float load_element(const std::byte* row, DType dtype, std::int64_t index) noexcept {
  row += index * static_cast<std::int64_t>(dtype_bytes(dtype));
  if (dtype == DType::kE4M3) return numeric::e4m3_to_float(static_cast<std::uint8_t>(*row));
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, row, sizeof(value));
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, row, sizeof(bits));
  return dtype == DType::kBF16 ? numeric::bf16_to_float(bits) : numeric::f16_to_float(bits);
}

/// Writes element `index` of a row of f32, bf16 or f16, rounded to nearest even.
inline void store_element(std::byte* row, DType dtype, std::int64_t index, float value) noexcept {
  row += index * static_cast<std::int64_t>(dtype_bytes(dtype));
  if (dtype == DType::kF32) {
    std::memcpy(row, &value, sizeof(value));
    return;
  }
  const std::uint16_t bits =
      dtype == DType::kBF16 ? numeric::float_to_bf16(value) : numeric::float_to_f16(value);
  std::memcpy(row, &bits, sizeof(bits));
}

/// sum[i] += weight * element i of a row. The type is chosen once a row, so that compilers
/// vectorise.
inline void add_scaled_row(float* sum, const std::byte* row, DType dtype, std::int64_t count,
                           float weight) noexcept {
  const auto add = [&](auto type) {
    for (std::int64_t i = 0; i < count; ++i) sum[i] += weight * load_element(row, type(), i);
  };
  switch (dtype) {
    case DType::kF32: return add(std::integral_constant<DType, DType::kF32>());
    case DType::kF16: return add(std::integral_constant<DType, DType::kF16>());
    case DType::kBF16: return add(std::integral_constant<DType, DType::kBF16>());
    default: return add(std::integral_constant<DType, DType::kE4M3>());
  }
}

/// Writes a row of f32, bf16 or f16, rounded to nearest even.
inline void store_row(std::byte* row, DType dtype, std::int64_t count,
                      const float* values) noexcept {
  const auto store = [&](auto type) {
    for (std::int64_t i = 0; i < count; ++i) store_element(row, type(), i, values[i]);
  };
  switch (dtype) {
    case DType::kF32: return store(std::integral_constant<DType, DType::kF32>());
    case DType::kBF16: return store(std::integral_constant<DType, DType::kBF16>());
    default: return store(std::integral_constant<DType, DType::kF16>());
  }
}

}  // namespace mla
