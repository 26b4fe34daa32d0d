#include "model/generate.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <functional>

#include "core/diagnostics.hpp"
#include "model/sampler.hpp"

namespace mla::model {
namespace {

constexpr const char* kOperation = "generate";

/// One prompt on its way.
struct Request {
  std::size_t index = 0;  ///< of the prompt
  Tokens tokens;          ///< prompt and generated
  std::int64_t prompt_length = 0;
  std::int64_t limit = 0;  ///< tokens at which it is finished
  CachedSequence cached;
  bool finished = false;

  // This step's part.
  Tokens appended;  ///< tokens whose latents are missing, then drafts
  std::int64_t num_drafts = 0;
  std::int64_t num_logits = 0;

  std::int64_t length() const noexcept { return static_cast<std::int64_t>(tokens.size()); }
};

std::int64_t token_limit(const ModelConfig& config, std::int64_t prompt_length,
                         std::int64_t max_tokens) {
  return std::min(prompt_length + max_tokens, config.max_position_embeddings);
}

/// Pages that the largest requests which may run together need when they are as long as they may
/// get.
std::int64_t pool_pages(const ModelConfig& config, const std::vector<Tokens>& prompts,
                        const GenerateOptions& options) {
  std::vector<std::int64_t> pages;
  for (const Tokens& prompt : prompts) {
    const auto length = static_cast<std::int64_t>(prompt.size());
    const std::int64_t limit = token_limit(config, length, options.max_tokens);
    pages.push_back(pages_for(limit, options.engine.page_size));
  }
  std::sort(pages.begin(), pages.end(), std::greater<>());
  std::int64_t total = 0;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (options.max_batch > 0 && static_cast<std::int64_t>(i) >= options.max_batch) break;
    total += pages[i];
  }
  return total;
}

Status check_arguments(const ModelConfig& config, const std::vector<Tokens>& prompts,
                       const GenerateOptions& options) {
  constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;
  constexpr std::int64_t kMaxDrafts = 256;
  const auto in_range = [](const char* name, std::int64_t value, std::int64_t low,
                           std::int64_t high) -> Status {
    if (value >= low && value <= high) return {};
    return bad_argument(kOperation, name, value, text("a value in [", low, ", ", high, "]"));
  };
  MLA_RETURN_IF_ERROR(in_range("max_tokens", options.max_tokens, 1, kMaxTokens));
  MLA_RETURN_IF_ERROR(in_range("speculate", options.speculate, 0, kMaxDrafts));
  MLA_RETURN_IF_ERROR(in_range("max_batch", options.max_batch, 0, kMaxTokens));
  MLA_RETURN_IF_ERROR(in_range("page_size", options.engine.page_size, 1, kMaxTokens));
  if (!std::isfinite(options.temperature) || options.temperature < 0.0) {
    return bad_argument(kOperation, "temperature", options.temperature, "a finite number from 0");
  }
  if (prompts.empty()) return bad_argument(kOperation, "prompts", "none", "at least one");
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const std::string name = text("prompt ", i + 1);
    const auto length = static_cast<std::int64_t>(prompts[i].size());
    if (length < 1 || length >= config.max_position_embeddings) {
      return bad_argument(
          kOperation, name, text(length, " tokens"),
          text("1 to ", config.max_position_embeddings - 1, " (below max_position_embeddings)"));
    }
    MLA_RETURN_IF_ERROR(check_tokens(config, name, prompts[i]));
  }
  return {};
}

/// The requests of one call and the loop over their steps.
class ContinuousBatch {
 public:
  ContinuousBatch(const Checkpoint& checkpoint, const std::vector<Tokens>& prompts,
                  const GenerateOptions& options, Engine& engine, std::int64_t num_pages)
      : config_(checkpoint.config), options_(options), engine_(engine) {
    result_.generations.resize(prompts.size());
    result_.stats.num_pages = num_pages;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      Request& request = waiting_.emplace_back();
      request.index = i;
      request.tokens = prompts[i];
      request.prompt_length = request.length();
      request.limit = token_limit(config_, request.length(), options.max_tokens);
      result_.stats.prompt_tokens += request.length();
      total_tokens_ += request.limit - request.length();
    }
  }

  Status run() {
    while (!waiting_.empty() || !running_.empty()) {
      admit();
      MLA_RETURN_IF_ERROR(step());
      retire();
      if (options_.progress) options_.progress(result_.stats.generated_tokens, total_tokens_);
    }
    result_.stats.attention = engine_.transformer().attention_stats();
    result_.stats.backend = engine_.transformer().backend_name();
    return {};
  }

  GenerateResult take_result() { return std::move(result_); }

 private:
  /// The pool holds the largest max_batch requests, so whoever is admitted never runs out of pages.
  void admit() {
    while (!waiting_.empty() && (options_.max_batch == 0 ||
                                 static_cast<std::int64_t>(running_.size()) < options_.max_batch)) {
      running_.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
  }

  /// Fills in a request's part of the step. False: the step has no room left for its prompt.
  bool prepare(Request& request, std::int64_t& prompt_budget) {
    const auto cached = static_cast<std::ptrdiff_t>(request.cached.length);
    std::int64_t missing = request.length() - request.cached.length;
    const bool is_prompt = request.length() == request.prompt_length;
    if (is_prompt) {
      missing = std::min(missing, prompt_budget);
      if (missing == 0) return false;
      prompt_budget -= missing;
    }
    request.appended.assign(request.tokens.begin() + cached,
                            request.tokens.begin() + cached + static_cast<std::ptrdiff_t>(missing));
    request.num_drafts = 0;
    request.num_logits = 0;
    if (request.cached.length + missing < request.length()) return true;  // more chunks to come
    if (!is_prompt && options_.speculate > 0) {
      // One token always follows the drafts.
      const std::int64_t room = request.limit - request.length() - 1;
      const Tokens drafts = draft_by_lookup(request.tokens, std::min(options_.speculate, room));
      request.num_drafts = static_cast<std::int64_t>(drafts.size());
      request.appended.insert(request.appended.end(), drafts.begin(), drafts.end());
    }
    request.num_logits = request.num_drafts + 1;
    return true;
  }

  Status step() {
    std::int64_t prompt_budget = options_.engine.chunk_tokens;
    std::vector<StepPart> parts;
    std::vector<Request*> requests;
    for (Request& request : running_) {
      if (!prepare(request, prompt_budget)) continue;
      parts.push_back({&request.cached, request.appended, request.num_logits});
      requests.push_back(&request);
    }
    const bool is_prefill = prompt_budget < options_.engine.chunk_tokens;
    AttentionHook hook;
    if (options_.hook && !is_prefill) {
      hook = [this](std::int64_t layer, const DecodeProblem& problem,
                    const DecodeTensors& tensors) {
        options_.hook(result_.stats.decode_steps, layer, problem, tensors);
      };
    }
    const auto start = std::chrono::steady_clock::now();
    MLA_RETURN_IF_ERROR(engine_.step(parts, logits_, hook));
    const std::int64_t generated_before = result_.stats.generated_tokens;
    std::size_t row = 0;
    for (Request* request : requests) {
      accept(*request, row);
      row += static_cast<std::size_t>(request->num_logits);
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    count_step(is_prefill, seconds, result_.stats.generated_tokens - generated_before);
    return {};
  }

  void count_step(bool is_prefill, double seconds, std::int64_t generated) {
    GenerateStats& stats = result_.stats;
    stats.peak_pages = std::max(stats.peak_pages, stats.num_pages - engine_.num_free_pages());
    if (is_prefill) {
      ++stats.prefill_steps;
      stats.prefill_seconds += seconds;
    } else {
      ++stats.decode_steps;
      stats.decode_seconds += seconds;
      stats.tokens_in_decode_steps += generated;
    }
  }

  /// Chooses tokens for as long as the drafts agree with what is chosen. The cache then ends before
  /// the newest token: latents of refused drafts are forgotten by their length alone.
  void accept(Request& request, std::size_t first_row) {
    result_.stats.drafted_tokens += request.num_drafts;
    const auto vocab = static_cast<std::size_t>(config_.vocab_size);
    const std::size_t first_draft =
        request.appended.size() - static_cast<std::size_t>(request.num_drafts);
    for (std::int64_t i = 0; i < request.num_logits; ++i) {
      const std::size_t row = first_row + static_cast<std::size_t>(i);
      const std::int32_t token = choose(request, {logits_.data() + row * vocab, vocab});
      ++result_.stats.generated_tokens;
      Generation& generation = result_.generations[request.index];
      if (is_end_of_text(token)) {
        generation.finish = FinishReason::kEndOfText;
        request.finished = true;
        return;
      }
      request.tokens.push_back(token);
      generation.tokens.push_back(token);
      request.cached.length = request.length() - 1;
      request.finished = request.length() >= request.limit;
      const bool has_draft = i < request.num_drafts;
      if (request.finished || !has_draft ||
          request.appended[first_draft + static_cast<std::size_t>(i)] != token) {
        return;
      }
      ++result_.stats.accepted_tokens;
    }
  }

  std::int32_t choose(const Request& request, std::span<const float> logits) const {
    const double u =
        uniform(options_.seed, request.index, static_cast<std::uint64_t>(request.length()));
    return sample(logits, options_.temperature, u);
  }

  bool is_end_of_text(std::int32_t token) const {
    const std::vector<std::int32_t>& ends = config_.eos_token_ids;
    return std::find(ends.begin(), ends.end(), token) != ends.end();
  }

  void retire() {
    for (Request& request : running_) {
      if (request.finished) engine_.release(request.cached);
    }
    std::erase_if(running_, [](const Request& request) { return request.finished; });
  }

  const ModelConfig& config_;
  const GenerateOptions& options_;
  Engine& engine_;
  std::deque<Request> waiting_;
  std::vector<Request> running_;
  std::vector<float> logits_;
  GenerateResult result_;
  std::int64_t total_tokens_ = 0;
};

}  // namespace

const char* to_string(FinishReason reason) noexcept {
  return reason == FinishReason::kLength ? "length" : "end of text";
}

Status check_tokens(const ModelConfig& config, const std::string& argument,
                    std::span<const std::int32_t> tokens) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0 && tokens[i] < config.vocab_size) continue;
    return bad_argument(kOperation, argument, text("token ", tokens[i], " at ", i),
                        text("0 to ", config.vocab_size - 1, " (vocab_size)"));
  }
  return {};
}

Result<GenerateResult> generate(const Checkpoint& checkpoint, const std::vector<Tokens>& prompts,
                                const GenerateOptions& options) {
  MLA_RETURN_IF_ERROR(check_arguments(checkpoint.config, prompts, options));
  const std::int64_t num_pages = pool_pages(checkpoint.config, prompts, options);
  Result<Engine> engine = Engine::create(checkpoint, options.engine, num_pages);
  if (!engine.ok()) return engine.status();
  ContinuousBatch batch(checkpoint, prompts, options, *engine, num_pages);
  MLA_RETURN_IF_ERROR(batch.run());
  return batch.take_result();
}

}  // namespace mla::model
