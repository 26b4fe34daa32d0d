// AMX tiles in plain loops, with the arithmetic of TDPBF16PS: even and odd products are summed
// apart from zero, added to each other, then to the accumulator; f32 rounding to nearest, denormal
// inputs and results are zero.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/numeric.hpp"

namespace mla::testing {

class EmulatedTiles {
 public:
  EmulatedTiles() { std::memset(tiles_, 0xFF, sizeof(tiles_)); }  // NaN until first written

  template <int kTile>
  void zero() {
    std::memset(tiles_[kTile], 0, sizeof(tiles_[kTile]));
  }
  template <int kTile>
  void load(const void* memory, std::int64_t stride) {
    for (int row = 0; row < 16; ++row) {
      std::memcpy(tiles_[kTile][row], static_cast<const std::byte*>(memory) + row * stride, 64);
    }
  }
  template <int kTile>
  void store(void* memory, std::int64_t stride) const {
    for (int row = 0; row < 16; ++row) {
      std::memcpy(static_cast<std::byte*>(memory) + row * stride, tiles_[kTile][row], 64);
    }
  }
  template <int kSum, int kA, int kB>
  void dot() {
    for (int m = 0; m < 16; ++m) {
      float even[16] = {};
      float odd[16] = {};
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < 16; ++n) {
          even[n] = flush(even[n] + bf16(kA, m, 2 * k) * bf16(kB, k, 2 * n));
          odd[n] = flush(odd[n] + bf16(kA, m, 2 * k + 1) * bf16(kB, k, 2 * n + 1));
        }
      }
      for (int n = 0; n < 16; ++n) {
        float sum;
        std::memcpy(&sum, tiles_[kSum][m] + 4 * n, 4);
        sum = flush(flush(sum) + flush(even[n] + odd[n]));
        std::memcpy(tiles_[kSum][m] + 4 * n, &sum, 4);
      }
    }
  }

 private:
  static float flush(float value) {
    return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0F, value)
                                                                : value;
  }
  float bf16(int tile, int row, int column) const {
    std::uint16_t bits;
    std::memcpy(&bits, tiles_[tile][row] + 2 * column, 2);
    return flush(numeric::bf16_to_float(bits));  // a product of two is exact in f32
  }

  std::byte tiles_[8][16][64];
};

}  // namespace mla::testing
