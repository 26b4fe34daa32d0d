#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "core/diagnostics.hpp"
#include "model/generate.hpp"
#include "model/sampler.hpp"

namespace mla::model {
namespace {

constexpr const char* kOperation = "score";

/// One context: predicts tokens[1..] in chunks and appends their losses.
Status score_window(Engine& engine, const ModelConfig& config, const ScoreOptions& options,
                    std::span<const std::int32_t> all, std::size_t begin, std::size_t end,
                    std::vector<double>& nll) {
  CachedSequence sequence;
  std::vector<float> logits;
  const auto vocab = static_cast<std::size_t>(config.vocab_size);
  const auto chunk_tokens = static_cast<std::size_t>(options.engine.chunk_tokens);
  for (std::size_t first = begin; first < end; first += chunk_tokens) {
    const std::span<const std::int32_t> chunk =
        all.subspan(first, std::min(chunk_tokens, end - first));
    const StepPart part{&sequence, chunk, static_cast<std::int64_t>(chunk.size())};
    MLA_RETURN_IF_ERROR(engine.step({&part, 1}, logits));
    for (std::size_t i = 0; i < chunk.size(); ++i) {
      const std::size_t position = first + i;
      const std::span<const float> row(logits.data() + i * vocab, vocab);
      if (options.logits) options.logits(static_cast<std::int64_t>(position), row);
      if (position + 1 < end) nll.push_back(negative_log_likelihood(row, all[position + 1]));
    }
    if (options.progress) {
      options.progress(static_cast<std::int64_t>(first + chunk.size()),
                       static_cast<std::int64_t>(all.size()));
    }
  }
  engine.release(sequence);
  return {};
}

}  // namespace

Result<Score> score(const Checkpoint& checkpoint, std::span<const std::int32_t> tokens,
                    const ScoreOptions& options) {
  const ModelConfig& config = checkpoint.config;
  const std::int64_t longest = config.max_position_embeddings;
  const std::int64_t window = options.window == 0 ? longest : options.window;
  if (window < 2 || window > longest) {
    return bad_argument(kOperation, "window", window,
                        text("2 to ", longest, " (max_position_embeddings)"));
  }
  if (tokens.size() < 2) {
    return bad_argument(kOperation, "text", text(tokens.size(), " tokens"), "at least 2");
  }
  MLA_RETURN_IF_ERROR(check_tokens(config, "text", tokens));
  const std::int64_t context = std::min(window, static_cast<std::int64_t>(tokens.size()));
  const std::int64_t page_size = std::max<std::int64_t>(options.engine.page_size, 1);
  Result<Engine> engine = Engine::create(checkpoint, options.engine, pages_for(context, page_size));
  if (!engine.ok()) return engine.status();

  Score result;
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t begin = 0; begin + 1 < tokens.size();
       begin += static_cast<std::size_t>(window) - 1) {
    const std::size_t end = std::min(tokens.size(), begin + static_cast<std::size_t>(window));
    MLA_RETURN_IF_ERROR(score_window(*engine, config, options, tokens, begin, end, result.nll));
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double sum = std::accumulate(result.nll.begin(), result.nll.end(), 0.0);
  result.mean_nll = sum / static_cast<double>(result.nll.size());
  result.perplexity = std::exp(result.mean_nll);
  result.attention = engine->transformer().attention_stats();
  result.backend = engine->transformer().backend_name();
  return result;
}

}  // namespace mla::model
