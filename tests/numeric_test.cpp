// Conversions against an independent double implementation: the value of a code comes from its
// fields, the code of a value from a search among the values of all codes.
#include "core/numeric.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "testkit/rng.hpp"

namespace mla {
namespace {

/// Fields of a binary format. e4m3fn has no infinity: its all-ones exponent holds numbers.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  std::uint32_t sign_bit() const { return 1U << (exponent_bits + mantissa_bits); }
  std::uint32_t largest() const {  // code of the largest finite value
    const std::uint32_t top = sign_bit() - 1;
    return has_infinity ? top - (1U << mantissa_bits) : top - 1;
  }
  /// The value of a non-negative finite code.
  double value(std::uint32_t code) const {
    const int exponent = static_cast<int>(code >> mantissa_bits);
    const auto mantissa = static_cast<double>(code & ((1U << mantissa_bits) - 1));
    if (exponent == 0) return std::ldexp(mantissa, 1 - bias() - mantissa_bits);
    return std::ldexp(mantissa + std::ldexp(1.0, mantissa_bits), exponent - bias() - mantissa_bits);
  }
};

constexpr Format kBF16{8, 7, true};
constexpr Format kF16{5, 10, true};
constexpr Format kE4M3{4, 3, false};

/// Round to nearest, ties to the even code; beyond the largest value to infinity, or saturating.
std::uint32_t nearest_code(const Format& format, float value) {
  const double magnitude = std::fabs(static_cast<double>(value));
  const std::uint32_t sign = std::signbit(value) ? format.sign_bit() : 0U;
  std::uint32_t low = 0;
  std::uint32_t high = format.largest();
  if (magnitude >= format.value(high)) {
    if (!format.has_infinity) return sign | high;
    const double next = 2 * format.value(high) - format.value(high - 1);
    const bool rounds_up = magnitude >= (format.value(high) + next) / 2;  // the tie: largest is odd
    return sign | (rounds_up ? high + 1 : high);
  }
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (format.value(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - format.value(low);
  const double above = format.value(high) - magnitude;
  if (below != above) return sign | (below < above ? low : high);
  return sign | (low % 2 == 0 ? low : high);
}

template <class Encode>
void expect_rounds_to_nearest(const Format& format, Encode encode, float value) {
  for (float signed_value : {value, -value}) {
    ASSERT_EQ(static_cast<std::uint32_t>(encode(signed_value)), nearest_code(format, signed_value))
        << std::hexfloat << signed_value;
  }
}

/// Every code, every midpoint of neighbours and the floats next to both; then random bit patterns.
template <class Encode>
void expect_encoder(const Format& format, Encode encode) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (std::uint32_t code = 0; code <= format.largest(); ++code) {
    const auto exact = static_cast<float>(format.value(code));
    const double next = code < format.largest() ? format.value(code + 1)
                                                : 2 * format.value(code) - format.value(code - 1);
    const auto middle = static_cast<float>((format.value(code) + next) / 2);
    for (float center : {exact, middle}) {
      expect_rounds_to_nearest(format, encode, center);
      expect_rounds_to_nearest(format, encode, std::nextafter(center, infinity));
      expect_rounds_to_nearest(format, encode, std::nextafter(center, 0.0F));
    }
    if (testing::Test::HasFatalFailure()) return;
  }
  for (float value :
       {infinity, std::numeric_limits<float>::max(), std::numeric_limits<float>::min(),
        std::numeric_limits<float>::denorm_min(), 0.0F}) {
    expect_rounds_to_nearest(format, encode, value);
  }
  testkit::Rng rng(7);
  for (int i = 0; i < 200000; ++i) {
    const float value = numeric::bits_to_float(static_cast<std::uint32_t>(rng.next() >> 32));
    if (std::isnan(value)) continue;
    expect_rounds_to_nearest(format, encode, std::fabs(value));
    if (testing::Test::HasFatalFailure()) return;
  }
}

template <class Decode>
void expect_decoder(const Format& format, Decode decode) {
  for (std::uint32_t code = 0; code < 2 * format.sign_bit(); ++code) {
    const std::uint32_t magnitude = code & (format.sign_bit() - 1);
    const float found = decode(code);
    if (magnitude <= format.largest()) {
      const double value = format.value(magnitude);
      ASSERT_EQ(static_cast<double>(found), code == magnitude ? value : -value) << "code " << code;
    } else if (format.has_infinity && magnitude == format.largest() + 1) {
      ASSERT_TRUE(std::isinf(found)) << "code " << code;
    } else {
      ASSERT_TRUE(std::isnan(found)) << "code " << code;
    }
    if (!std::isnan(found)) {
      ASSERT_EQ(std::signbit(found), code != magnitude) << "code " << code;
    }
  }
}

/// Every code survives the way to float and back.
template <class Decode, class Encode>
void expect_round_trip(const Format& format, Decode decode, Encode encode) {
  for (std::uint32_t code = 0; code < 2 * format.sign_bit(); ++code) {
    const float value = decode(code);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(decode(encode(value)))) << "code " << code;
    } else {
      ASSERT_EQ(static_cast<std::uint32_t>(encode(value)), code);
    }
  }
}

const auto decode_bf16 = [](std::uint32_t code) {
  return numeric::bf16_to_float(static_cast<std::uint16_t>(code));
};
const auto decode_f16 = [](std::uint32_t code) {
  return numeric::f16_to_float(static_cast<std::uint16_t>(code));
};
const auto decode_e4m3 = [](std::uint32_t code) {
  return numeric::e4m3_to_float(static_cast<std::uint8_t>(code));
};

TEST(Numeric, EveryBF16CodeHasItsValue) {
  expect_decoder(kBF16, decode_bf16);
}
TEST(Numeric, EveryF16CodeHasItsValue) {
  expect_decoder(kF16, decode_f16);
}
TEST(Numeric, EveryE4M3CodeHasItsValue) {
  expect_decoder(kE4M3, decode_e4m3);
}

TEST(Numeric, BF16RoundsToNearestEven) {
  expect_encoder(kBF16, numeric::float_to_bf16);
}
TEST(Numeric, F16RoundsToNearestEven) {
  expect_encoder(kF16, numeric::float_to_f16);
}
TEST(Numeric, E4M3RoundsToNearestEvenAndSaturates) {
  expect_encoder(kE4M3, numeric::float_to_e4m3);
}

TEST(Numeric, EveryCodeSurvivesARoundTrip) {
  expect_round_trip(kBF16, decode_bf16, numeric::float_to_bf16);
  expect_round_trip(kF16, decode_f16, numeric::float_to_f16);
  expect_round_trip(kE4M3, decode_e4m3, numeric::float_to_e4m3);
}

TEST(Numeric, NaNStaysNaNWithItsSign) {
  for (std::uint32_t payload : {0x7F800001U, 0x7FC00000U, 0x7FFFFFFFU, 0x7F80FFFFU, 0x7FBFFFFFU}) {
    for (std::uint32_t sign : {0U, 0x80000000U}) {
      const float nan = numeric::bits_to_float(payload | sign);
      EXPECT_TRUE(std::isnan(decode_bf16(numeric::float_to_bf16(nan))));
      EXPECT_TRUE(std::isnan(decode_f16(numeric::float_to_f16(nan))));
      EXPECT_EQ(numeric::float_to_bf16(nan) >> 15, sign >> 31);
      EXPECT_EQ(numeric::float_to_f16(nan) >> 15, sign >> 31);
      EXPECT_EQ(numeric::float_to_e4m3(nan), sign != 0 ? 0xFF : 0x7F);
    }
  }
}

TEST(Numeric, E4M3LargestIs448) {
  EXPECT_EQ(decode_e4m3(0x7E), 448.0F);
  EXPECT_EQ(decode_e4m3(0x01), 0x1p-9F);
  for (float value : {448.0F, 464.0F, 1e30F, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(numeric::float_to_e4m3(value), 0x7E);
    EXPECT_EQ(numeric::float_to_e4m3(-value), 0xFE);
  }
}

}  // namespace
}  // namespace mla
