// `mla generate`: text from a checkpoint, or the loss of a text, through the library's public
// calls.
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cli.hpp"
#include "io/mapped_file.hpp"
#include "model/batch_dump.hpp"
#include "model/checkpoint.hpp"
#include "model/generate.hpp"

namespace mla::cli {
namespace {

using nlohmann::ordered_json;

constexpr const char* kCommand = "generate";

struct Arguments {
  std::string model;
  std::vector<std::string> prompts;
  std::string score_file;
  std::int64_t window = 0;
  model::GenerateOptions generate;
  std::string cache = "bf16";
  int ranks = 0;  ///< 0: not sharded
  std::int64_t interleave = 1;
  std::string dump_path;
  std::int64_t dump_layer = 0;
  std::int64_t dump_step = 0;
  bool json = false;
};

/// Bytes of the well-formed UTF-8 sequence at `at`, or 0.
std::size_t utf8_length(const std::string& bytes, std::size_t at) {
  const auto byte = [&](std::size_t i) -> unsigned {
    return i < bytes.size() ? static_cast<unsigned char>(bytes[i]) : 0U;
  };
  const auto continues = [&](std::size_t i) { return (byte(i) & 0xC0U) == 0x80U; };
  const unsigned lead = byte(at);
  if (lead < 0x80U) return 1;
  if (lead >= 0xC2U && lead <= 0xDFU) return continues(at + 1) ? 2 : 0;
  const unsigned second = byte(at + 1);
  if (lead >= 0xE0U && lead <= 0xEFU) {
    const unsigned low = lead == 0xE0U ? 0xA0U : 0x80U;   // no overlong form
    const unsigned high = lead == 0xEDU ? 0x9FU : 0xBFU;  // no surrogate
    return second >= low && second <= high && continues(at + 2) ? 3 : 0;
  }
  if (lead >= 0xF0U && lead <= 0xF4U) {
    const unsigned low = lead == 0xF0U ? 0x90U : 0x80U;
    const unsigned high = lead == 0xF4U ? 0x8FU : 0xBFU;  // nothing above U+10FFFF
    return second >= low && second <= high && continues(at + 2) && continues(at + 3) ? 4 : 0;
  }
  return 0;
}

/// Text as it is, but control characters (except newline and tab) and bytes that are not UTF-8 as
/// \xNN: a model's output may not steer the terminal.
std::string printable(const std::string& bytes) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string shown;
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t length = utf8_length(bytes, at);
    const auto first = static_cast<unsigned char>(bytes[at]);
    const bool is_c1 =
        length == 2 && first == 0xC2U && static_cast<unsigned char>(bytes[at + 1]) < 0xA0U;
    const bool is_control =
        (first < 0x20U && first != '\n' && first != '\t') || first == 0x7FU || is_c1;
    if (length > 0 && !is_control) {
      shown.append(bytes, at, length);
      at += length;
      continue;
    }
    shown += "\\x";
    shown += kHex[first >> 4];
    shown += kHex[first & 0xFU];
    ++at;
  }
  return shown;
}

model::Tokens to_tokens(const std::string& bytes) {
  model::Tokens tokens;
  for (const char byte : bytes) tokens.push_back(static_cast<unsigned char>(byte));
  return tokens;
}

std::string to_bytes(const model::Tokens& tokens) {
  std::string bytes;
  for (const std::int32_t token : tokens) bytes += static_cast<char>(token);
  return bytes;
}

double per_second(std::int64_t count, double seconds) {
  return seconds > 0.0 ? static_cast<double>(count) / seconds : 0.0;
}

ordered_json attention_json(const model::AttentionStats& attention) {
  return {{"seconds", attention.seconds}, {"runs", attention.runs}, {"plans", attention.plans}};
}

ordered_json stats_json(const model::GenerateStats& stats) {
  return {
      {"backend", stats.backend},
      {"prompt_tokens", stats.prompt_tokens},
      {"generated_tokens", stats.generated_tokens},
      {"tokens_per_second",
       per_second(stats.generated_tokens, stats.prefill_seconds + stats.decode_seconds)},
      {"decode_tokens_per_second", per_second(stats.tokens_in_decode_steps, stats.decode_seconds)},
      {"prompt_tokens_per_second", per_second(stats.prompt_tokens, stats.prefill_seconds)},
      {"prefill_steps", stats.prefill_steps},
      {"decode_steps", stats.decode_steps},
      {"prefill_seconds", stats.prefill_seconds},
      {"decode_seconds", stats.decode_seconds},
      {"drafted_tokens", stats.drafted_tokens},
      {"accepted_tokens", stats.accepted_tokens},
      {"cache_pages", stats.num_pages},
      {"peak_cache_pages", stats.peak_pages},
      {"attention", attention_json(stats.attention)}};
}

void print_stats(const model::GenerateStats& stats) {
  const double seconds = stats.prefill_seconds + stats.decode_seconds;
  std::cerr << stats.generated_tokens << " tokens in " << seconds
            << " s: " << per_second(stats.generated_tokens, seconds) << " tokens/s (decode "
            << per_second(stats.tokens_in_decode_steps, stats.decode_seconds) << ", prompt "
            << per_second(stats.prompt_tokens, stats.prefill_seconds) << ")\n"
            << "steps: " << stats.prefill_steps << " prefill, " << stats.decode_steps
            << " decode; attention " << stats.attention.seconds << " s on " << stats.backend << ", "
            << stats.attention.plans << " plans; cache pages " << stats.peak_pages << " of "
            << stats.num_pages << "\n";
  if (stats.drafted_tokens > 0) {
    std::cerr << "drafts: " << stats.accepted_tokens << " of " << stats.drafted_tokens
              << " accepted\n";
  }
}

void print_generations(const Arguments& arguments, const model::GenerateResult& result) {
  if (arguments.json) {
    ordered_json texts = ordered_json::array();
    for (std::size_t i = 0; i < result.generations.size(); ++i) {
      const model::Generation& generation = result.generations[i];
      texts.push_back({{"prompt", printable(arguments.prompts[i])},
                       {"text", printable(to_bytes(generation.tokens))},
                       {"tokens", generation.tokens},
                       {"finish", model::to_string(generation.finish)}});
    }
    print_json({{"generations", texts}, {"statistics", stats_json(result.stats)}});
    return;
  }
  for (std::size_t i = 0; i < result.generations.size(); ++i) {
    if (result.generations.size() > 1) std::cout << "--- prompt " << i + 1 << " ---\n";
    std::cout << printable(arguments.prompts[i] + to_bytes(result.generations[i].tokens)) << "\n";
  }
  std::cout << std::flush;
  print_stats(result.stats);
}

int generate(Arguments& arguments, const model::Checkpoint& checkpoint) {
  std::vector<model::Tokens> prompts;
  for (const std::string& prompt : arguments.prompts) prompts.push_back(to_tokens(prompt));
  Progress progress("generate");
  arguments.generate.progress = [&](std::int64_t done, std::int64_t total) {
    progress.update(done, total);
  };
  model::BatchDump dump(arguments.dump_path, arguments.dump_layer, arguments.dump_step);
  if (!arguments.dump_path.empty()) arguments.generate.hook = dump.hook();
  const Result<model::GenerateResult> result =
      arguments.ranks > 0 ? model::generate_sharded(checkpoint, prompts, arguments.generate,
                                                    arguments.ranks, arguments.interleave)
                          : model::generate(checkpoint, prompts, arguments.generate);
  progress.clear();
  if (!result.ok()) return fail(kCommand, result.status());
  print_generations(arguments, *result);
  if (!arguments.dump_path.empty() && !dump.status().ok()) return fail(kCommand, dump.status());
  return kExitDone;
}

int score(const Arguments& arguments, const model::Checkpoint& checkpoint) {
  const Result<io::MappedFile> file = io::MappedFile::open("score", arguments.score_file);
  if (!file.ok()) return fail(kCommand, file.status());
  const std::string bytes(reinterpret_cast<const char*>(file->bytes().data()),
                          file->bytes().size());
  model::ScoreOptions options;
  options.engine = arguments.generate.engine;
  options.window = arguments.window;
  Progress progress("score");
  options.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  const Result<model::Score> result = model::score(checkpoint, to_tokens(bytes), options);
  progress.clear();
  if (!result.ok()) return fail(kCommand, result.status());
  const auto predicted = static_cast<std::int64_t>(result->nll.size());
  const double bits = result->mean_nll / 0.69314718055994530942;
  if (arguments.json) {
    print_json({{"predicted_tokens", predicted},
                {"mean_nll", result->mean_nll},
                {"perplexity", result->perplexity},
                {"bits_per_byte", bits},
                {"backend", result->backend},
                {"seconds", result->seconds},
                {"tokens_per_second", per_second(predicted, result->seconds)},
                {"attention", attention_json(result->attention)}});
    return kExitDone;
  }
  std::cout << "mean NLL " << result->mean_nll << " nats, perplexity " << result->perplexity << ", "
            << bits << " bits per byte, " << predicted << " predicted bytes\n"
            << std::flush;
  std::cerr << per_second(predicted, result->seconds) << " tokens/s on " << result->backend << "\n";
  return kExitDone;
}

int run_generate(Arguments& arguments) {
  if (arguments.prompts.empty() == arguments.score_file.empty()) {
    return fail(kCommand, kExitBadInput,
                "found neither or both of --prompt and --score, needed one of them");
  }
  if (arguments.ranks > 0 && (!arguments.score_file.empty() || !arguments.dump_path.empty())) {
    return fail(kCommand, kExitBadInput,
                "--ranks: found together with --score or --dump-batch, needed alone");
  }
  static const std::map<std::string, KvFormat> kFormats = {
      {"bf16", KvFormat::kBF16}, {"f16", KvFormat::kF16}, {"e4m3", KvFormat::kE4M3}};
  arguments.generate.engine.cache = kFormats.at(arguments.cache);
  const Result<model::Checkpoint> checkpoint = model::load_checkpoint(arguments.model);
  if (!checkpoint.ok()) return fail(kCommand, checkpoint.status());
  constexpr std::int64_t kBytes = 256;
  if (checkpoint->config.vocab_size > kBytes) {
    return fail(
        kCommand,
        Status(StatusCode::kUnsupported,
               "generate: vocab_size: found " + std::to_string(checkpoint->config.vocab_size) +
                   ", needed at most 256 (a token is a byte; there is no tokenizer)"));
  }
  return arguments.score_file.empty() ? generate(arguments, *checkpoint)
                                      : score(arguments, *checkpoint);
}

}  // namespace

void add_generate_command(CLI::App& app, int& exit_code) {
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand(
      kCommand, "Decode text with a byte-level DeepSeek V2/V3 checkpoint, or score a text");
  model::GenerateOptions& options = arguments->generate;
  command->add_option("--model", arguments->model, "Checkpoint folder (config.json, *.safetensors)")
      ->required();
  command->add_option("--prompt", arguments->prompts, "A prompt; repeat it to decode a batch")
      ->expected(1)
      ->take_all();
  command->add_option("--score", arguments->score_file,
                      "Print mean NLL and perplexity of this text file");
  command->add_option("--window", arguments->window,
                      "Tokens of one context when scoring; 0: max_position_embeddings");
  command->add_option("--max-tokens", options.max_tokens, "New tokens per prompt")
      ->capture_default_str();
  command->add_option("--temperature", options.temperature, "0 is greedy")->capture_default_str();
  command->add_option("--seed", options.seed, "Seed of the sampling")->capture_default_str();
  command
      ->add_option("--speculate", options.speculate,
                   "Draft up to this many tokens by prompt look-up; never changes the text")
      ->capture_default_str();
  command
      ->add_option("--max-batch", options.max_batch,
                   "Prompts decoded together, the others wait; 0: all")
      ->capture_default_str();
  command->add_option("--cache", arguments->cache, "Type of the latent cache")
      ->check(CLI::IsMember({"bf16", "f16", "e4m3"}))
      ->capture_default_str();
  command
      ->add_option("--kv-scale", options.engine.kv_scale,
                   "Cached values are divided by it; 0: 1, for e4m3 from the weights")
      ->capture_default_str();
  command->add_option("--page-size", options.engine.page_size, "Tokens of a cache page")
      ->capture_default_str();
  command->add_option("--chunk-tokens", options.engine.chunk_tokens, "Prompt tokens of one step")
      ->capture_default_str();
  command->add_option("--backend", options.engine.backend,
                      "A row of `mla info`; default: the first that runs");
  command->add_option("--threads", options.engine.num_threads, "CPU threads; 0: all")
      ->capture_default_str();
  command
      ->add_option("--ranks", arguments->ranks,
                   "Shard the cache over N threads; not with --score or --dump-batch")
      ->check(CLI::Range(1, 256))
      ->type_name("N");
  command
      ->add_option("--interleave", arguments->interleave,
                   "With --ranks: consecutive tokens of a rank")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31))
      ->capture_default_str();
  command->add_option("--dump-batch", arguments->dump_path,
                      "Write the attention call of one layer and decode step as a batch file");
  command->add_option("--dump-layer", arguments->dump_layer, "The layer, from 0")
      ->capture_default_str();
  command->add_option("--dump-step", arguments->dump_step, "The decode step, from 0")
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print JSON");
  command->footer(example(
      "mla generate --model models/kjv-mla-6m --prompt \"In the beginning God\" --max-tokens 64"));
  command->callback([arguments, &exit_code] { exit_code = run_generate(*arguments); });
}

}  // namespace mla::cli
