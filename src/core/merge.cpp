// [combine] The public merge of partial states in host memory.
#include "mla/merge.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "core/diagnostics.hpp"
#include "core/element.hpp"
#include "core/lse.hpp"

namespace mla {
namespace {

constexpr const char* kOperation = "merge";
constexpr float kLn2 = 0.69314718055994530942F;

std::string shape_text(const TensorView& view) {
  std::string joined = text(to_string(view.dtype), " [");
  for (int axis = 0; axis < view.rank && axis < TensorView::kMaxRank; ++axis) {
    joined += text(axis > 0 ? "," : "", view.shape[axis]);
  }
  return joined + "]";
}

Status check_state(const std::string& name, const AttentionState& state, const TensorView& like) {
  const TensorView& out = state.out;
  const TensorView& lse = state.lse;
  const bool float_type =
      out.dtype == DType::kF32 || out.dtype == DType::kBF16 || out.dtype == DType::kF16;
  if (!float_type || out.rank != 3 || out.shape[0] != like.shape[0] ||
      out.shape[1] != like.shape[1] || out.shape[2] != like.shape[2] ||
      (out.shape[2] > 1 && out.stride[2] != 1)) {
    return bad_argument(kOperation, name + ".out", shape_text(out),
                        text("bf16, f16 or f32 [", like.shape[0], ",", like.shape[1], ",",
                             like.shape[2], "] with last stride 1"));
  }
  if (lse.dtype != DType::kF32 || lse.rank != 2 || lse.shape[0] != like.shape[0] ||
      lse.shape[1] != like.shape[1]) {
    return bad_argument(kOperation, name + ".lse", shape_text(lse),
                        text("f32 [", like.shape[0], ",", like.shape[1], "]"));
  }
  const bool has_rows = like.shape[0] > 0 && like.shape[1] > 0;
  if (has_rows && (out.data == nullptr || lse.data == nullptr)) {
    return bad_argument(kOperation, name, "a null pointer", "memory");
  }
  return {};
}

}  // namespace

Status merge(const AttentionState* states, std::int64_t count, const AttentionState& merged,
             LseBase lse_base) {
  if (count < 1) return bad_argument(kOperation, "count", count, "at least 1");
  if (states == nullptr) return bad_argument(kOperation, "states", "a null pointer", "states");
  if (lse_base != LseBase::kE && lse_base != LseBase::kTwo) {
    return bad_argument(kOperation, "lse_base", static_cast<int>(lse_base), "e or 2");
  }
  MLA_RETURN_IF_ERROR(check_state("merged", merged, merged.out));
  for (std::int64_t s = 0; s < count; ++s) {
    MLA_RETURN_IF_ERROR(check_state(text("states[", s, "]"), states[s], merged.out));
  }

  const float to_natural = lse_base == LseBase::kTwo ? kLn2 : 1.0F;
  std::vector<float> lses(static_cast<std::size_t>(count));
  std::vector<float> weights(static_cast<std::size_t>(count));
  const std::int64_t width = merged.out.shape[2];
  // A row is summed before it is written: `merged` may be one of the states.
  std::vector<float> row(static_cast<std::size_t>(width));
  for (std::int64_t token = 0; token < merged.out.shape[0]; ++token) {
    for (std::int64_t head = 0; head < merged.out.shape[1]; ++head) {
      const auto given_lse = [&](std::int64_t s) {
        return load_element(row_address(states[s].lse, token, head), DType::kF32, 0);
      };
      for (std::int64_t s = 0; s < count; ++s) {
        lses[static_cast<std::size_t>(s)] = clean_lse(given_lse(s) * to_natural);
      }
      const MergedLse<float> whole = merge_weights(lses.data(), count, weights.data());
      std::fill(row.begin(), row.end(), 0.0F);
      for (std::int64_t s = 0; s < count; ++s) {
        const float weight = weights[static_cast<std::size_t>(s)];
        if (weight == 0.0F) continue;  // an empty state may hold NaN
        add_scaled_row(row.data(), row_address(states[s].out, token, head), states[s].out.dtype,
                       width, weight);
      }
      for (float& value : row) value = whole.sum == 0.0F ? 0.0F : value / whole.sum;
      store_row(row_address(merged.out, token, head), merged.out.dtype, width, row.data());
      // A single real state keeps its lse bit for bit.
      const float lse = whole.only_real >= 0 ? given_lse(whole.only_real) : whole.lse / to_natural;
      store_element(row_address(merged.lse, token, head), DType::kF32, 0, lse);
    }
  }
  return {};
}

}  // namespace mla
