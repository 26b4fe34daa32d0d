// The public merge of partial states: the faults users met, both bases, aliasing, types, refusals.
#include "mla/merge.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/rows.hpp"
#include "testkit/problem_gen.hpp"
#include "testkit/rng.hpp"

namespace mla {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// A state [T,H,L] in f32.
struct State {
  std::int64_t tokens = 1, heads = 1, rank = 4;
  std::vector<float> out, lse;

  State(std::int64_t t, std::int64_t h, std::int64_t l, float value, float lse_value)
      : tokens(t),
        heads(h),
        rank(l),
        out(static_cast<std::size_t>(t * h * l), value),
        lse(static_cast<std::size_t>(t * h), lse_value) {}
  State(float value, float lse_value) : State(1, 1, 4, value, lse_value) {}
  AttentionState view() const {
    return {TensorView::contiguous(out.data(), DType::kF32, {tokens, heads, rank}),
            TensorView::contiguous(lse.data(), DType::kF32, {tokens, heads})};
  }
};

State merged(const std::vector<State>& states, LseBase base = LseBase::kE) {
  std::vector<AttentionState> views;
  for (const State& state : states) views.push_back(state.view());
  State result(states[0].tokens, states[0].heads, states[0].rank, kNaN, kNaN);
  const Status status =
      merge(views.data(), static_cast<std::int64_t>(views.size()), result.view(), base);
  EXPECT_TRUE(status.ok()) << status.message();
  return result;
}

void expect_state(const State& state, float value, float lse) {
  for (float x : state.out) EXPECT_EQ(x, value);
  for (float x : state.lse) EXPECT_EQ(x, lse);
}

TEST(Merge, B25_TwoEmptyStatesAreEmptyAndStayTheIdentity) {
  const State empty = merged({State(0, -kInfinity), State(0, -kInfinity)});
  expect_state(empty, 0, -kInfinity);
  expect_state(merged({empty, State(7.25F, 0.3F)}), 7.25F, 0.3F);
  expect_state(merged({State(7.25F, 0.3F), empty}), 7.25F, 0.3F);
}

TEST(Merge, B26_NaNAndInfiniteLseCountAsEmpty) {
  for (float dead : {kInfinity, -kInfinity, kNaN}) {
    for (float garbage : {kNaN, kInfinity, 1e30F}) {
      expect_state(merged({State(garbage, dead), State(-2, 5)}), -2, 5);
      expect_state(merged({State(-2, 5), State(garbage, dead)}), -2, 5);
      expect_state(merged({State(garbage, dead), State(garbage, dead)}), 0, -kInfinity);
    }
  }
}

TEST(Merge, B27_ManyEmptyStatesMergeToEmptyAndKeepARealOne) {
  const State empty(kNaN, -kInfinity);
  expect_state(merged({empty, empty, empty}), 0, -kInfinity);
  expect_state(merged({empty, State(3, -60000), empty}), 3, -60000);
  expect_state(merged({empty}), 0, -kInfinity);
}

TEST(Merge, B57_B61_ADeadRankCannotPoisonALivingOne) {
  State living(3, 2, 8, 1.5F, 2.0F);
  const State dead(3, 2, 8, kNaN, -kInfinity);
  expect_state(merged({living, dead, dead}), 1.5F, 2.0F);
  // A weight that underflows to 0 kills a NaN as well.
  expect_state(merged({living, State(3, 2, 8, kNaN, -500.0F)}), 1.5F, 2.0F);
}

TEST(Merge, FollowsTheFormulaInBothBases) {
  testkit::Rng rng(4);
  for (const LseBase base : {LseBase::kE, LseBase::kTwo}) {
    const double unit = base == LseBase::kTwo ? std::log(2.0) : 1.0;
    for (const float spread : {1.0F, 40.0F, 1e4F}) {
      std::vector<State> states;
      for (int s = 0; s < 5; ++s) {
        State state(4, 3, 16, 0, 0);
        for (float& x : state.out) x = rng.normal();
        for (float& x : state.lse) x = rng.one_in(6) ? -kInfinity : rng.normal() * spread;
        states.push_back(state);
      }
      const State found = merged(states, base);
      for (std::size_t row = 0; row < 12; ++row) {
        double m = -std::numeric_limits<double>::infinity();
        for (const State& s : states) m = std::max(m, static_cast<double>(s.lse[row]) * unit);
        double sum = 0;
        std::vector<double> value(16, 0.0);
        for (const State& s : states) {
          const double weight = std::exp(static_cast<double>(s.lse[row]) * unit - m);
          sum += weight;
          for (std::size_t d = 0; d < 16; ++d) {
            value[d] += weight * static_cast<double>(s.out[row * 16 + d]);
          }
        }
        // An f32 lse of 1e4 has steps of 1e-3, and so do the exponents.
        const double step = 3e-7 * std::max(1.0, std::fabs(m));
        EXPECT_NEAR(found.lse[row] * unit, m + std::log(sum), 2e-6 + 2 * step);
        for (std::size_t d = 0; d < 16; ++d) {
          EXPECT_NEAR(found.out[row * 16 + d], value[d] / sum, 2e-6 + 4 * step);
        }
      }
    }
  }
}

TEST(Merge, TheBaseMatters) {
  // B20: weights 1 and 2 in natural units are not those of base 2.
  const State natural = merged({State(0, 0), State(1, 1)}, LseBase::kE);
  const State binary = merged({State(0, 0), State(1, 1)}, LseBase::kTwo);
  EXPECT_NEAR(natural.out[0], std::exp(1.0) / (1 + std::exp(1.0)), 1e-6);
  EXPECT_NEAR(binary.out[0], 2.0 / 3.0, 1e-6);
  EXPECT_NEAR(natural.lse[0], std::log(1 + std::exp(1.0)), 1e-6);
  EXPECT_NEAR(binary.lse[0], std::log2(3.0), 1e-6);
}

TEST(Merge, TheResultMayBeOneOfTheStates) {
  for (const std::size_t target : {0U, 1U, 2U}) {
    std::vector<State> states{State(1, 0.5F), State(-3, 1.25F), State(8, -2.0F)};
    const State apart = merged(states);
    std::vector<AttentionState> views;
    for (const State& state : states) views.push_back(state.view());
    ASSERT_TRUE(merge(views.data(), 3, views[target]).ok());
    EXPECT_EQ(states[target].out, apart.out);
    EXPECT_EQ(states[target].lse, apart.lse);
  }
}

TEST(Merge, StatesMayHave16BitsAndAnyStrides) {
  // Two states as slices of one [T, 2, H, L] bf16 tensor, merged into f16.
  std::vector<std::uint16_t> packed(2 * 2 * 3 * 8);
  std::vector<float> lse(2 * 3 * 2);
  for (std::size_t i = 0; i < packed.size(); ++i) {
    const auto value = static_cast<float>(static_cast<int>(i % 17) - 8);
    testkit::encode(DType::kBF16, &value, 1, reinterpret_cast<std::byte*>(&packed[i]));
  }
  for (std::size_t i = 0; i < lse.size(); ++i) lse[i] = static_cast<float>(i % 5) * 0.5F;
  std::vector<AttentionState> states(2);
  for (std::size_t s = 0; s < 2; ++s) {
    states[s].out = TensorView::contiguous(packed.data() + s * 24, DType::kBF16, {2, 3, 8});
    states[s].out.stride[0] = 48;
    states[s].lse = TensorView::contiguous(lse.data() + s, DType::kF32, {2, 3});
    states[s].lse.stride[0] = 6;
    states[s].lse.stride[1] = 2;
  }
  std::vector<std::uint16_t> out(2 * 3 * 8);
  std::vector<float> out_lse(2 * 3);
  ASSERT_TRUE(merge(states.data(), 2,
                    {TensorView::contiguous(out.data(), DType::kF16, {2, 3, 8}),
                     TensorView::contiguous(out_lse.data(), DType::kF32, {2, 3})})
                  .ok());
  for (std::size_t row = 0; row < 6; ++row) {
    const std::size_t first = row / 3 * 48 + row % 3 * 8;
    const double a = std::exp(static_cast<double>(lse[row * 2]));
    const double b = std::exp(static_cast<double>(lse[row * 2 + 1]));
    for (std::size_t d = 0; d < 8; ++d) {
      const double va = static_cast<double>(static_cast<int>((first + d) % 17) - 8);
      const double vb = static_cast<double>(static_cast<int>((first + 24 + d) % 17) - 8);
      const double found =
          testkit::decode(DType::kF16, reinterpret_cast<std::byte*>(&out[row * 8 + d]));
      EXPECT_NEAR(found, (a * va + b * vb) / (a + b), 8 * 0x1p-11);
    }
    EXPECT_NEAR(out_lse[row], std::log(a + b), 1e-6);
  }
}

TEST(Merge, NoRowsAreNoWork) {
  const State none(0, 3, 8, 0, 0);
  const AttentionState view = none.view();
  EXPECT_TRUE(merge(&view, 1, view).ok());
}

TEST(Merge, BadArgumentsAreRefused) {
  const State a(1, 0), b(2, 0);
  State target(kNaN, kNaN);
  std::vector<AttentionState> views{a.view(), b.view()};
  const auto expect = [&](const Status& status, const std::string& sentence) {
    EXPECT_TRUE(test::refused(status, StatusCode::kInvalidArgument, sentence));
  };
  expect(merge(views.data(), 0, target.view()), "merge: count: found 0, needed at least 1");
  expect(merge(views.data(), -1, target.view()), "merge: count: found -1, needed at least 1");
  expect(merge(nullptr, 2, target.view()), "merge: states: found a null pointer, needed states");
  expect(merge(views.data(), 2, target.view(), static_cast<LseBase>(10)),
         "merge: lse_base: found 10, needed e or 2");
  views[1].out.shape[2] = 3;
  expect(merge(views.data(), 2, target.view()),
         "merge: states[1].out: found f32 [1,1,3], needed bf16, f16 or f32 [1,1,4] with last "
         "stride 1");
  views[1] = b.view();
  views[1].out.rank = 9;
  expect(merge(views.data(), 2, target.view()),
         "merge: states[1].out: found f32 [1,1,4,0], needed bf16, f16 or f32 [1,1,4] with last "
         "stride 1");
  views[1] = b.view();
  views[0].out.dtype = DType::kE4M3;
  expect(merge(views.data(), 2, target.view()),
         "merge: states[0].out: found e4m3 [1,1,4], needed bf16, f16 or f32 [1,1,4] with last "
         "stride 1");
  views[0] = a.view();
  views[0].lse.dtype = DType::kF16;
  expect(merge(views.data(), 2, target.view()),
         "merge: states[0].lse: found f16 [1,1], needed f32 [1,1]");
  views[0] = a.view();
  views[0].lse.data = nullptr;
  expect(merge(views.data(), 2, target.view()),
         "merge: states[0]: found a null pointer, needed memory");
  AttentionState bad_target = target.view();
  bad_target.out.data = nullptr;
  views[0] = a.view();
  expect(merge(views.data(), 2, bad_target), "merge: merged: found a null pointer, needed memory");
  EXPECT_TRUE(std::isnan(target.out[0]));
}

}  // namespace
}  // namespace mla
