// DType and TensorView: a typed, strided pointer. libmla never owns a tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace mla {

/// Element types. The values are part of the C ABI.
enum class DType : int {
  kNone = 0,  ///< no tensor
  kF32 = 1,
  kF16 = 2,   ///< IEEE binary16
  kBF16 = 3,  ///< upper half of a binary32
  kE4M3 = 4,  ///< OCP e4m3fn: no infinity, largest value 448, 0x7F and 0xFF are NaN
  kU8 = 5,    ///< raw bytes (`fp8_ds_mla` caches)
  kI32 = 6,
};

/// Bytes of one element; 0 for kNone.
constexpr std::size_t dtype_bytes(DType dtype) noexcept {
  switch (dtype) {
    case DType::kNone: return 0;
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kF16:
    case DType::kBF16: return 2;
    case DType::kE4M3:
    case DType::kU8: return 1;
  }
  return 0;
}

/// "bf16", "f16", "f32", "e4m3", "u8", "i32" or "none": the spelling of problem strings and messages.
constexpr const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::kNone: return "none";
    case DType::kF32: return "f32";
    case DType::kF16: return "f16";
    case DType::kBF16: return "bf16";
    case DType::kE4M3: return "e4m3";
    case DType::kU8: return "u8";
    case DType::kI32: return "i32";
  }
  return "unknown";
}

/// A tensor that somebody else owns. Strides count elements, not bytes, and may be anything the
/// validator of the call allows. A default TensorView means "not given".
struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kNone;
  int rank = 0;
  std::int64_t shape[kMaxRank] = {};
  std::int64_t stride[kMaxRank] = {};

  bool given() const noexcept { return dtype != DType::kNone; }

  /// A contiguous (row-major) tensor. The const_cast is honest: inputs are never written.
  static TensorView contiguous(const void* data, DType dtype,
                               std::initializer_list<std::int64_t> shape) noexcept {
    TensorView view;
    view.data = const_cast<void*>(data);
    view.dtype = dtype;
    for (std::int64_t extent : shape) {
      if (view.rank == kMaxRank) break;
      view.shape[view.rank++] = extent;
    }
    std::int64_t stride = 1;
    for (int axis = view.rank - 1; axis >= 0; --axis) {
      view.stride[axis] = stride;
      stride *= view.shape[axis];
    }
    return view;
  }
};

}  // namespace mla
