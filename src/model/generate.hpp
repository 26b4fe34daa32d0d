// generate() and score(): text from a checkpoint, and how well it predicts a text.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "mla/status.hpp"
#include "model/checkpoint.hpp"
#include "model/engine.hpp"

namespace mla::model {

using Tokens = std::vector<std::int32_t>;

/// Sees a layer's attention of a decode step (a step without prompt chunks), counted from 0.
using StepHook = std::function<void(std::int64_t decode_step, std::int64_t layer,
                                    const DecodeProblem&, const DecodeTensors&)>;

struct GenerateOptions {
  EngineOptions engine;
  std::int64_t max_tokens = 128;  ///< new tokens per request
  double temperature = 0.0;       ///< 0: greedy
  std::uint64_t seed = 0;
  std::int64_t speculate = 0;  ///< most tokens drafted per request and step; never changes the text
  std::int64_t max_batch = 0;  ///< most requests decoded together; the others wait. 0: all
  std::function<void(std::int64_t done, std::int64_t total)> progress;  ///< new tokens
  StepHook hook;
};

enum class FinishReason { kLength, kEndOfText };
const char* to_string(FinishReason reason) noexcept;

struct Generation {
  Tokens tokens;  ///< the new ones, without the end-of-text token
  FinishReason finish = FinishReason::kLength;
};

struct GenerateStats {
  std::int64_t prompt_tokens = 0;
  std::int64_t generated_tokens = 0;
  std::int64_t drafted_tokens = 0;
  std::int64_t accepted_tokens = 0;
  std::int64_t prefill_steps = 0;  ///< steps with a prompt chunk in them
  std::int64_t decode_steps = 0;   ///< all others
  double prefill_seconds = 0.0;
  double decode_seconds = 0.0;
  std::int64_t tokens_in_decode_steps = 0;  ///< generated in decode steps
  std::int64_t num_pages = 0;
  std::int64_t peak_pages = 0;
  AttentionStats attention;
  std::string backend;
};

struct GenerateResult {
  std::vector<Generation> generations;  ///< in the order of the prompts
  GenerateStats stats;
};

/// Decodes all prompts as one continuous batch: prompt chunks, single tokens and drafts of
/// different requests share each step, a request leaves when it is done and its pages serve the
/// next. The text of a request depends neither on the requests around it nor on `speculate`.
///
/// kInvalidArgument: an option out of range, an empty prompt, a token outside the vocabulary, a
/// prompt that leaves no room in max_position_embeddings. Otherwise as Engine.
Result<GenerateResult> generate(const Checkpoint& checkpoint, const std::vector<Tokens>& prompts,
                                const GenerateOptions& options);

/// The same on `world` threads, each a rank that runs the model with its part of every sequence's
/// cache, `interleave` tokens at a time. They share `num_threads`, and the hook is not called.
/// Statistics are rank 0's.
Result<GenerateResult> generate_sharded(const Checkpoint& checkpoint,
                                        const std::vector<Tokens>& prompts,
                                        const GenerateOptions& options, int world,
                                        std::int64_t interleave);

struct ScoreOptions {
  EngineOptions engine;
  std::int64_t window = 0;  ///< tokens of one context; 0: max_position_embeddings
  std::function<void(std::int64_t done, std::int64_t total)> progress;  ///< tokens
  /// Sees the logits after each token.
  std::function<void(std::int64_t position, std::span<const float> logits)> logits;
};

struct Score {
  std::vector<double> nll;  ///< nats, of each predicted token
  double mean_nll = 0.0;
  double perplexity = 0.0;
  double seconds = 0.0;
  AttentionStats attention;
  std::string backend;
};

/// The negative log-likelihood of every token but the first. A text longer than the window is cut:
/// each window begins with the last token of the one before, whose successor is its first
/// prediction. kInvalidArgument: fewer than two tokens, or a token outside the vocabulary.
/// Otherwise as Engine.
Result<Score> score(const Checkpoint& checkpoint, std::span<const std::int32_t> tokens,
                    const ScoreOptions& options);

/// kInvalidArgument naming the first token outside the vocabulary.
Status check_tokens(const ModelConfig& config, const std::string& argument,
                    std::span<const std::int32_t> tokens);

}  // namespace mla::model
