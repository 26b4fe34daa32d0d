// A small random generator whose streams are the same on every machine and standard library, so that a
// seed in a repro line means the same data everywhere.
#pragma once

#include <cstdint>

namespace mla::testkit {

/// xoshiro256** seeded through splitmix64. `stream` separates the uses of one seed.
class Rng {
 public:
  explicit Rng(std::uint64_t seed, std::uint64_t stream = 0) noexcept {
    std::uint64_t x = seed + stream * 0xD1B54A32D192ED03ULL;
    for (std::uint64_t& word : state_) {
      x += 0x9E3779B97F4A7C15ULL;
      std::uint64_t z = x;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
      word = z ^ (z >> 31);
    }
  }

  std::uint64_t next() noexcept {
    const std::uint64_t result = rotate(state_[1] * 5, 7) * 9;
    const std::uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = rotate(state_[3], 45);
    return result;
  }

  /// Uniform in [0, count); count > 0. The modulo bias is below count / 2^64.
  std::int64_t below(std::int64_t count) noexcept {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(count));
  }
  /// Uniform in [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) noexcept {
    return low + below(high - low + 1);
  }
  /// True once in `count` calls on average.
  bool one_in(std::int64_t count) noexcept { return below(count) == 0; }

  /// Mean 0, variance 1, near normal: the sum of four 16-bit uniforms. Integer arithmetic up to one
  /// exact conversion, so it does not depend on a libm.
  float normal() noexcept {
    const std::uint64_t bits = next();
    const std::int64_t sum = static_cast<std::int64_t>((bits & 0xFFFF) + ((bits >> 16) & 0xFFFF) +
                                                       ((bits >> 32) & 0xFFFF) + (bits >> 48));
    constexpr float kInverseDeviation = 1.0F / 37837.227F;  // 65536 * sqrt(4 / 12)
    return static_cast<float>(sum - 131070) * kInverseDeviation;
  }

 private:
  static std::uint64_t rotate(std::uint64_t x, int k) noexcept { return (x << k) | (x >> (64 - k)); }
  std::uint64_t state_[4];
};

}  // namespace mla::testkit
