#include "model/sampler.hpp"

#include <algorithm>
#include <cmath>

namespace mla::model {
namespace {

/// The finaliser of SplitMix64: a bijection that spreads every input bit over all output bits.
std::uint64_t mix(std::uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

/// Sum of exp((logit - largest) / temperature).
double partition(std::span<const float> logits, double largest, double temperature) {
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp((logit - largest) / temperature);
  return sum;
}

}  // namespace

std::int32_t argmax(std::span<const float> logits) noexcept {
  return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double uniform(std::uint64_t seed, std::uint64_t request, std::uint64_t position) noexcept {
  const std::uint64_t bits = mix(mix(mix(seed) ^ request) ^ position);
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

std::int32_t sample(std::span<const float> logits, double temperature, double u) {
  const std::int32_t best = argmax(logits);
  if (temperature <= 0.0) return best;
  const double largest = logits[static_cast<std::size_t>(best)];
  double left = u * partition(logits, largest, temperature);
  for (std::size_t token = 0; token < logits.size(); ++token) {
    left -= std::exp((logits[token] - largest) / temperature);
    if (left < 0.0) return static_cast<std::int32_t>(token);
  }
  return best;  // rounding used up the last step
}

double negative_log_likelihood(std::span<const float> logits, std::int32_t token) {
  const double largest = logits[static_cast<std::size_t>(argmax(logits))];
  return largest + std::log(partition(logits, largest, 1.0)) -
         logits[static_cast<std::size_t>(token)];
}

std::vector<std::int32_t> draft_by_lookup(std::span<const std::int32_t> tokens,
                                          std::int64_t max_drafts) {
  constexpr std::size_t kShortestMatch = 2;
  constexpr std::size_t kLongestMatch = 32;
  const std::size_t size = tokens.size();
  std::size_t best_length = kShortestMatch - 1;
  std::size_t best_end = 0;
  // `end` is where an earlier occurrence ends and its continuation begins.
  for (std::size_t end = size; end-- > 1 && best_length < kLongestMatch;) {
    std::size_t length = 0;
    while (length < std::min(end, kLongestMatch) &&
           tokens[end - 1 - length] == tokens[size - 1 - length]) {
      ++length;
    }
    if (length > best_length) {
      best_length = length;
      best_end = end;
    }
  }
  if (best_end == 0) return {};
  const std::size_t count = std::min(size - best_end, static_cast<std::size_t>(max_drafts));
  return {tokens.begin() + static_cast<std::ptrdiff_t>(best_end),
          tokens.begin() + static_cast<std::ptrdiff_t>(best_end + count)};
}

}  // namespace mla::model
