// The merge of two states, the only LSE arithmetic that partials go through.
#include "core/lse.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "testkit/rng.hpp"

namespace mla {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
const float kDead[] = {-kInfinity, kInfinity, kNaN, -kNaN};

TEST(Lse, OnlyFiniteNumbersCount) {
  for (float dead : kDead) EXPECT_EQ(clean_lse(dead), -kInfinity);
  for (float live :
       {0.0F, -60000.0F, 1e4F, std::numeric_limits<float>::max(),
        std::numeric_limits<float>::lowest(), std::numeric_limits<float>::denorm_min()}) {
    EXPECT_EQ(clean_lse(live), live);
  }
}

TEST(Lse, TwoEmptyStatesAreEmpty) {
  for (float a : kDead) {
    for (float b : kDead) {
      const MergeWeights<float> weights = merge_weights(a, b);
      EXPECT_EQ(weights.weight_a, 0.0F);
      EXPECT_EQ(weights.weight_b, 0.0F);
      EXPECT_EQ(weights.lse, -kInfinity);
    }
  }
}

TEST(Lse, AnEmptyStateIsTheIdentityInBothOrders) {
  for (float dead : kDead) {
    for (float live : {0.3F, -60000.0F, 88.5F, -0.0F, 1e30F}) {
      const MergeWeights<float> right = merge_weights(live, dead);
      EXPECT_EQ(right.weight_a, 1.0F);
      EXPECT_EQ(right.weight_b, 0.0F);
      EXPECT_EQ(right.lse, live);
      const MergeWeights<float> left = merge_weights(dead, live);
      EXPECT_EQ(left.weight_a, 0.0F);
      EXPECT_EQ(left.weight_b, 1.0F);
      EXPECT_EQ(left.lse, live);
    }
  }
}

TEST(Lse, WeightsFollowTheFormula) {
  testkit::Rng rng(3);
  for (int i = 0; i < 20000; ++i) {
    const float scale = i % 3 == 0 ? 1.0F : i % 3 == 1 ? 30.0F : 1e4F;
    const float a = rng.normal() * scale;
    const float b = rng.normal() * scale;
    const MergeWeights<float> weights = merge_weights(a, b);
    const double m = std::max(static_cast<double>(a), static_cast<double>(b));
    const double wa = std::exp(static_cast<double>(a) - m);
    const double wb = std::exp(static_cast<double>(b) - m);
    EXPECT_NEAR(weights.weight_a, wa / (wa + wb), 4e-7);
    EXPECT_NEAR(weights.weight_b, wb / (wa + wb), 4e-7);
    const double lse = m + std::log(wa + wb);
    EXPECT_NEAR(weights.lse, lse, 4e-7 + 2e-7 * std::fabs(lse));
    const MergeWeights<float> swapped = merge_weights(b, a);
    EXPECT_EQ(weights.weight_a, swapped.weight_b);
    EXPECT_EQ(weights.weight_b, swapped.weight_a);
    EXPECT_EQ(weights.lse, swapped.lse);
  }
}

TEST(Lse, EqualStatesShareEqually) {
  for (double lse : {-6e4, -1.0, 0.0, 5.5, 1e4}) {
    const MergeWeights<double> weights = merge_weights(lse, lse);
    EXPECT_EQ(weights.weight_a, 0.5);
    EXPECT_EQ(weights.weight_b, 0.5);
    EXPECT_DOUBLE_EQ(weights.lse, lse + std::log(2.0));
  }
}

TEST(Lse, ExtremeDistancesStayFinite) {
  const float largest = std::numeric_limits<float>::max();
  const MergeWeights<float> weights = merge_weights(largest, -largest);
  EXPECT_EQ(weights.weight_a, 1.0F);
  EXPECT_EQ(weights.weight_b, 0.0F);
  EXPECT_EQ(weights.lse, largest);
}

}  // namespace
}  // namespace mla
