#include "model/rope.hpp"

#include <algorithm>
#include <cmath>

namespace mla::model {
namespace {

constexpr double kTwoPi = 6.283185307179586476925286766559;

/// The (real-valued) dimension whose wave makes `rotations` turns within the original context.
double correction_dim(double rotations, const ModelConfig& config) {
  const double dim = static_cast<double>(config.qk_rope_head_dim);
  const double context = static_cast<double>(config.yarn.original_max_position_embeddings);
  return dim * std::log(context / (rotations * kTwoPi)) / (2.0 * std::log(config.rope_theta));
}

/// How far each frequency is interpolated: 0 keeps it (fast waves), 1 divides it by the factor
/// (slow waves), with a linear ramp between the two correction dimensions.
std::vector<double> interpolation_ramp(const ModelConfig& config) {
  double low = correction_dim(config.yarn.beta_fast, config);
  double high = correction_dim(config.yarn.beta_slow, config);
  if (config.yarn.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(config.qk_rope_head_dim - 1));
  if (low == high) high += 0.001;  // as transformers does: a step instead of a division by zero
  std::vector<double> ramp(static_cast<std::size_t>(config.qk_rope_head_dim / 2));
  for (std::size_t i = 0; i < ramp.size(); ++i) {
    ramp[i] = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
  }
  return ramp;
}

double yarn_attention_factor(const YarnConfig& yarn) {
  if (yarn.attention_factor > 0.0) return yarn.attention_factor;
  if (yarn.mscale > 0.0 && yarn.mscale_all_dim > 0.0) {
    return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim);
  }
  return yarn_mscale(yarn.factor, 1.0);
}

}  // namespace

double yarn_mscale(double factor, double mscale) noexcept {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double softmax_scale(const ModelConfig& config) noexcept {
  double scale = 1.0 / std::sqrt(static_cast<double>(config.qk_head_dim()));
  if (config.yarn.enabled && config.yarn.mscale_all_dim > 0.0) {
    const double mscale = yarn_mscale(config.yarn.factor, config.yarn.mscale_all_dim);
    scale *= mscale * mscale;
  }
  return scale;
}

Rope::Rope(const ModelConfig& config)
    : inv_freq_(static_cast<std::size_t>(config.qk_rope_head_dim / 2)),
      interleave_(config.rope_interleave) {
  const double dim = static_cast<double>(config.qk_rope_head_dim);
  for (std::size_t i = 0; i < inv_freq_.size(); ++i) {
    inv_freq_[i] = std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / dim);
  }
  if (!config.yarn.enabled) return;
  attention_factor_ = yarn_attention_factor(config.yarn);
  const std::vector<double> ramp = interpolation_ramp(config);
  for (std::size_t i = 0; i < inv_freq_.size(); ++i) {
    inv_freq_[i] *= (1.0 - ramp[i]) + ramp[i] / config.yarn.factor;
  }
}

void Rope::angles(std::int64_t position, float* cos_sin) const {
  const std::size_t half = inv_freq_.size();
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * inv_freq_[i];
    cos_sin[i] = static_cast<float>(std::cos(angle) * attention_factor_);
    cos_sin[half + i] = static_cast<float>(std::sin(angle) * attention_factor_);
  }
}

void Rope::rotate(const float* cos_sin, float* x) const noexcept {
  const std::size_t half = inv_freq_.size();
  const std::size_t first_step = interleave_ ? 2 : 1;
  const std::size_t partner = interleave_ ? 1 : half;
  for (std::size_t i = 0; i < half; ++i) {
    float& a = x[first_step * i];
    float& b = x[first_step * i + partner];
    const float cosine = cos_sin[i];
    const float sine = cos_sin[half + i];
    const float rotated = a * cosine - b * sine;
    b = b * cosine + a * sine;
    a = rotated;
  }
}

}  // namespace mla::model
