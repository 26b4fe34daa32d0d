// Online softmax in base 2 over a tile of scores, rows in lanes, and the score modifiers.
//
// Included once per target by highway_kernels.cpp.
#if defined(MLA_CPU_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLA_CPU_SOFTMAX_INL_H_
#undef MLA_CPU_SOFTMAX_INL_H_
#else
#define MLA_CPU_SOFTMAX_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <limits>

#include "cpu/key_tile.hpp"

HWY_BEFORE_NAMESPACE();
namespace mla::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// The maximum of a row that has seen no key. Finite, so that no difference is (-inf) - (-inf).
inline constexpr float kNoMaximum = std::numeric_limits<float>::lowest();
inline constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

/// 2^x for x <= 0 (and NaN): relative error below 1.5e-7, exactly 1 at 0, exactly 0 below -126.5.
template <class D>
HWY_INLINE hn::Vec<D> exp2_nonpositive(D d, hn::Vec<D> x) {
  const hn::RebindToUnsigned<D> du32;
  // A comparison with NaN is false, so NaN survives; what Max does with it differs by target.
  const auto least = hn::Set(d, -127.0F);
  x = hn::IfThenElse(hn::Lt(x, least), least, x);
  // Adding 1.5 * 2^23 rounds to an integer n, which then lies in the low bits.
  const auto magic = hn::Set(d, 12582912.0F);
  const auto shifted = hn::Add(x, magic);
  const auto fraction = hn::Sub(x, hn::Sub(shifted, magic));
  auto p = hn::Set(d, 0.00015453162942118066F);
  p = hn::MulAdd(p, fraction, hn::Set(d, 0.0013390863364648252F));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0.009618082557285997F));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0.05550357114219126F));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0.2402265076056809F));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0.6931471880262288F));
  p = hn::MulAdd(p, fraction, hn::Set(d, 1.0F));
  // n + 127 in the exponent field; n = -127 gives the factor 0. A product keeps NaN as NaN.
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::BitCast(du32, shifted), hn::Set(du32, 127U)));
  return hn::Mul(p, hn::BitCast(d, exponent));
}

/// Base-2 scores of keys [first, last) of a group from its raw products, in place.
/// `scores` [keys][width]; `distance` [keys]: position of the key; `slope_log2`, `row_position`
/// [width]. Positions are relative to one origin, so that they are exact in f32 where it matters.
template <class D>
HWY_NOINLINE void modify_scores(D d, const ScoreRule& rule, int first, int last, int width,
                                const float* key_position, const float* slope_log2,
                                const float* row_position, float* HWY_RESTRICT scores) {
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto cap = hn::Set(d, rule.cap_log2);
  for (int k = first; k < last; ++k) {
    for (int r = 0; r < width; r += lanes) {
      float* cell = scores + k * width + r;
      auto s = hn::Load(d, cell);
      if (rule.cap_log2 != 0.0F) s = hn::Mul(cap, hn::Tanh(d, s));
      if (rule.uses_alibi) {
        const auto distance = hn::Sub(hn::Set(d, key_position[k]), hn::Load(d, row_position + r));
        s = hn::MulAdd(hn::Load(d, slope_log2 + r), distance, s);
      }
      hn::Store(s, d, cell);
    }
  }
}

/// Scores of keys that a row does not see become -inf: row r sees keys [row_first[r], row_last[r]).
template <class D>
HWY_NOINLINE void mask_scores(D d, int first, int last, int width, const float* row_first,
                              const float* row_last, float* HWY_RESTRICT scores) {
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto minus_inf = hn::Set(d, kMinusInf);
  for (int k = first; k < last; ++k) {
    const auto key = hn::Set(d, static_cast<float>(k));
    for (int r = 0; r < width; r += lanes) {
      float* cell = scores + k * width + r;
      const auto sees =
          hn::And(hn::Ge(key, hn::Load(d, row_first + r)), hn::Lt(key, hn::Load(d, row_last + r)));
      hn::Store(hn::IfThenElse(sees, hn::Load(d, cell), minus_inf), d, cell);
    }
  }
}

/// Replaces scores of keys [first, last) by weights 2^(s - m), moves the running maximum and sum of
/// each row on, and returns in `rescale` what earlier output must be multiplied by.
template <class D>
HWY_NOINLINE void online_softmax(D d, int first, int last, int width, float* HWY_RESTRICT scores,
                                 float* HWY_RESTRICT maximum, float* HWY_RESTRICT sum,
                                 float* HWY_RESTRICT rescale) {
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int r = 0; r < width; r += lanes) {
    const auto old_max = hn::Load(d, maximum + r);
    auto new_max = old_max;
    for (int k = first; k < last; ++k) {
      new_max = hn::Max(new_max, hn::Load(d, scores + k * width + r));
    }
    auto tile_sum = hn::Zero(d);
    int k = first;
    // Four independent exponentials hide each other's latency; the sum keeps its order.
    for (; k + 4 <= last; k += 4) {
      float* HWY_RESTRICT cell = scores + k * width + r;
      const auto w0 = exp2_nonpositive(d, hn::Sub(hn::Load(d, cell), new_max));
      const auto w1 = exp2_nonpositive(d, hn::Sub(hn::Load(d, cell + width), new_max));
      const auto w2 = exp2_nonpositive(d, hn::Sub(hn::Load(d, cell + 2 * width), new_max));
      const auto w3 = exp2_nonpositive(d, hn::Sub(hn::Load(d, cell + 3 * width), new_max));
      hn::Store(w0, d, cell);
      hn::Store(w1, d, cell + width);
      hn::Store(w2, d, cell + 2 * width);
      hn::Store(w3, d, cell + 3 * width);
      tile_sum = hn::Add(hn::Add(hn::Add(hn::Add(tile_sum, w0), w1), w2), w3);
    }
    for (; k < last; ++k) {
      float* cell = scores + k * width + r;
      const auto weight = exp2_nonpositive(d, hn::Sub(hn::Load(d, cell), new_max));
      hn::Store(weight, d, cell);
      tile_sum = hn::Add(tile_sum, weight);
    }
    const auto factor = exp2_nonpositive(d, hn::Sub(old_max, new_max));
    hn::Store(hn::MulAdd(hn::Load(d, sum + r), factor, tile_sum), d, sum + r);
    hn::Store(new_max, d, maximum + r);
    hn::Store(factor, d, rescale + r);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mla::cpu
HWY_AFTER_NAMESPACE();

#endif  // MLA_CPU_SOFTMAX_INL_H_
