// Rotary position embedding, with YaRN context extension.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.hpp"

namespace mla::model {

/// 0.1 * mscale * ln(factor) + 1 for factors above 1, else 1.
double yarn_mscale(double factor, double mscale) noexcept;

/// The factor of the softmax: 1/sqrt(qk_head_dim), times yarn_mscale(factor, mscale_all_dim)^2 when
/// YaRN is on and mscale_all_dim is given.
double softmax_scale(const ModelConfig& config) noexcept;

/// The rotation angles of one model and what YaRN multiplies cosine and sine with.
class Rope {
 public:
  explicit Rope(const ModelConfig& config);

  /// [R/2] angle per position, highest frequency first.
  const std::vector<double>& inv_freq() const noexcept { return inv_freq_; }
  double attention_factor() const noexcept { return attention_factor_; }

  /// cosine [R/2] then sine [R/2] of one position, attention factor included.
  void angles(std::int64_t position, float* cos_sin) const;

  /// Rotates x [R] in place by what `angles` wrote. Pairs keep their places (transformers moves the
  /// even elements to the front; the scores are the same, since query and key are moved alike).
  void rotate(const float* cos_sin, float* x) const noexcept;

 private:
  std::vector<double> inv_freq_;
  double attention_factor_ = 1.0;
  bool interleave_ = true;
};

}  // namespace mla::model
