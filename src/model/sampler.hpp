// Choosing a token from logits, and drafting tokens by prompt look-up.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace mla::model {

/// The largest logit; of equals the lowest token.
std::int32_t argmax(std::span<const float> logits) noexcept;

/// A number in [0, 1) that depends on the three arguments alone: whether a position is reached
/// token by token or as an accepted draft, in whatever batch, it draws the same number.
double uniform(std::uint64_t seed, std::uint64_t request, std::uint64_t position) noexcept;

/// A token with probability proportional to exp(logit / temperature), from u in [0, 1).
/// A temperature of 0 gives argmax.
std::int32_t sample(std::span<const float> logits, double temperature, double u);

/// -log softmax(logits)[token], in nats.
double negative_log_likelihood(std::span<const float> logits, std::int32_t token);

/// Up to `max_drafts` tokens that followed an earlier occurrence of the text's ending: the longest
/// such ending, of those the latest occurrence. Empty when not even two tokens recur.
std::vector<std::int32_t> draft_by_lookup(std::span<const std::int32_t> tokens,
                                          std::int64_t max_drafts);

}  // namespace mla::model
