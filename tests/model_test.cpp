// kjv-mla-6m through the library, against what transformers computed in float32 from its weights,
// and the promises of generate(): batch-mates and drafts never change a text.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "io/batch_file.hpp"
#include "io/safetensors.hpp"
#include "model/batch_dump.hpp"
#include "model/generate.hpp"

#ifndef MLA_MODEL_DIR
#error "the build defines MLA_MODEL_DIR"
#endif

namespace mla::model {
namespace {

const std::string kModelDir = MLA_MODEL_DIR;

const Checkpoint& checkpoint() {
  static const Checkpoint loaded = value_or_throw(load_checkpoint(kModelDir));
  return loaded;
}

template <class Element>
std::vector<Element> read_array(const io::SafetensorsFile& file, const char* name) {
  const TensorView view = value_or_throw(file.view(name));
  std::int64_t count = 1;
  for (int axis = 0; axis < view.rank; ++axis) count *= view.shape[axis];
  const auto* data = static_cast<const Element*>(view.data);
  return {data, data + count};
}

/// The probe text with its reference logits and losses.
struct Probe {
  Tokens tokens;
  std::vector<std::int32_t> positions;
  std::vector<float> logits;  // [positions, vocab]
  std::vector<float> nll;     // [tokens - 1]
};

Probe read_probe() {
  const io::SafetensorsFile file =
      value_or_throw(io::SafetensorsFile::open(kModelDir + "/reference_logits.safetensors"));
  return {read_array<std::int32_t>(file, "tokens"), read_array<std::int32_t>(file, "positions"),
          read_array<float>(file, "logits"), read_array<float>(file, "nll")};
}

double mean(const std::vector<float>& values) {
  double sum = 0.0;
  for (const float value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

/// One thread: where cores are shared, waiting for a second costs more than it brings at this size.
EngineOptions engine_options(KvFormat cache) {
  EngineOptions options;
  options.cache = cache;
  options.num_threads = 1;
  return options;
}

GenerateOptions generate_options(KvFormat cache, std::int64_t max_tokens) {
  GenerateOptions options;
  options.engine = engine_options(cache);
  options.max_tokens = max_tokens;
  return options;
}

struct ProbeErrors {
  double mean_nll = 0.0;     ///< |difference of the means|, nats
  double worst_logit = 0.0;  ///< over the reference positions
  double rms_logit = 0.0;
};

ProbeErrors probe_errors(KvFormat cache) {
  const Probe probe = read_probe();
  EXPECT_EQ(probe.tokens.size(), 1537U);
  ProbeErrors errors;
  double squares = 0.0;
  std::size_t rows = 0;
  ScoreOptions options;
  options.engine = engine_options(cache);
  options.logits = [&](std::int64_t position, std::span<const float> logits) {
    const auto found = std::find(probe.positions.begin(), probe.positions.end(), position);
    if (found == probe.positions.end()) return;
    ++rows;
    const float* expected =
        probe.logits.data() + (found - probe.positions.begin()) * checkpoint().config.vocab_size;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double error = std::fabs(double{logits[i]} - expected[i]);
      errors.worst_logit = std::max(errors.worst_logit, error);
      squares += error * error;
    }
  };
  const Score result = value_or_throw(score(checkpoint(), probe.tokens, options));
  EXPECT_EQ(result.nll.size(), probe.nll.size());
  EXPECT_EQ(rows, probe.positions.size());
  errors.mean_nll = std::fabs(result.mean_nll - mean(probe.nll));
  errors.rms_logit = std::sqrt(squares / static_cast<double>(probe.logits.size()));
  return errors;
}

// The bounds on the loss are the project's contract. The logits span about 30; those of a 16-bit
// cache may be off by what its 8 or 11 bits cost through four layers, e4m3 keeps 4 bits.
TEST(ReferenceModel, BF16CacheKeepsTheLossAndTheLogits) {
  const ProbeErrors errors = probe_errors(KvFormat::kBF16);
  EXPECT_LE(errors.mean_nll, 0.005);
  EXPECT_LE(errors.worst_logit, 0.15);
  EXPECT_LE(errors.rms_logit, 0.02);
}

TEST(ReferenceModel, F16CacheKeepsTheLossAndTheLogits) {
  const ProbeErrors errors = probe_errors(KvFormat::kF16);
  EXPECT_LE(errors.mean_nll, 0.001);
  EXPECT_LE(errors.worst_logit, 0.03);
  EXPECT_LE(errors.rms_logit, 0.004);
}

TEST(ReferenceModel, E4M3CacheKeepsTheLossAndTheLogits) {
  const ProbeErrors errors = probe_errors(KvFormat::kE4M3);
  EXPECT_LE(errors.mean_nll, 0.03);
  EXPECT_LE(errors.worst_logit, 2.4);
  EXPECT_LE(errors.rms_logit, 0.3);
}

Tokens to_tokens(const std::string& text) {
  Tokens tokens;
  for (const char byte : text) tokens.push_back(static_cast<unsigned char>(byte));
  return tokens;
}

struct ReferenceText {
  Tokens prompt;
  Tokens text;  ///< prompt included
};

std::vector<ReferenceText> reference_texts() {
  std::ifstream file(kModelDir + "/reference_generations.json");
  const nlohmann::json root = nlohmann::json::parse(file);
  std::vector<ReferenceText> texts;
  for (const nlohmann::json& entry : root.at("greedy")) {
    texts.push_back({to_tokens(entry.at("prompt")), to_tokens(entry.at("text"))});
  }
  return texts;
}

std::vector<Tokens> reference_prompts() {
  std::vector<Tokens> prompts;
  for (const ReferenceText& reference : reference_texts()) prompts.push_back(reference.prompt);
  return prompts;
}

std::vector<Tokens> texts_of(const std::vector<Tokens>& prompts, const GenerateOptions& options,
                             GenerateStats* stats = nullptr) {
  const GenerateResult result = value_or_throw(generate(checkpoint(), prompts, options));
  std::vector<Tokens> texts;
  for (const Generation& generation : result.generations) texts.push_back(generation.tokens);
  if (stats != nullptr) *stats = result.stats;
  return texts;
}

/// Walks along the reference text. Wherever the best token is not the reference's, the logits of
/// the two must be closer than the error allows; the free-running text then equals the reference up
/// to the first such place and takes the other token there.
void expect_reference_text(const ReferenceText& reference, const Tokens& generated, KvFormat cache,
                           double logit_error) {
  std::size_t parts_at = reference.text.size();
  std::int32_t other = -1;
  ScoreOptions options;
  options.engine = engine_options(cache);
  options.logits = [&](std::int64_t position, std::span<const float> logits) {
    const std::size_t next = static_cast<std::size_t>(position) + 1;
    if (next < reference.prompt.size() || next >= parts_at) return;
    const auto best = std::max_element(logits.begin(), logits.end());
    const std::int32_t token = reference.text[next];
    if (best - logits.begin() == token) return;
    EXPECT_LE(*best - logits[static_cast<std::size_t>(token)], 2.0 * logit_error) << next;
    parts_at = next;
    other = static_cast<std::int32_t>(best - logits.begin());
  };
  value_or_throw(score(checkpoint(), reference.text, options));
  const std::size_t start = reference.prompt.size();
  ASSERT_GE(generated.size(), reference.text.size() - start);
  for (std::size_t i = start; i < parts_at; ++i) {
    ASSERT_EQ(generated[i - start], reference.text[i]) << "byte " << i;
  }
  if (other >= 0) {
    EXPECT_EQ(generated[parts_at - start], other);
  }
}

TEST(ReferenceModel, GreedyTextsAreTheReferencesUpToTheLogitError) {
  // The root mean square errors that the tests above assert: half of what two logits may approach.
  const std::map<KvFormat, double> logit_errors = {{KvFormat::kBF16, 0.02},
                                                   {KvFormat::kF16, 0.004}};
  const std::vector<ReferenceText> references = reference_texts();
  ASSERT_EQ(references.size(), 5U);
  for (const auto& [cache, logit_error] : logit_errors) {
    const GenerateOptions options = generate_options(cache, 256);
    const std::vector<Tokens> texts = texts_of(reference_prompts(), options);
    for (std::size_t i = 0; i < references.size(); ++i) {
      SCOPED_TRACE(testing::Message() << to_string(cache) << " prompt " << i + 1);
      EXPECT_EQ(references[i].text.size(), references[i].prompt.size() + 256);
      expect_reference_text(references[i], texts[i], cache, logit_error);
    }
  }
}

class DraftsTest : public testing::TestWithParam<KvFormat> {};

TEST_P(DraftsTest, NeverChangeAText) {
  constexpr std::int64_t kNewTokens = 96;
  GenerateOptions options = generate_options(GetParam(), kNewTokens);
  for (const double temperature : {0.0, 0.7}) {
    options.temperature = temperature;
    options.speculate = 0;
    const std::vector<Tokens> plain = texts_of(reference_prompts(), options);
    for (const std::int64_t drafts : {1, 4, 8}) {
      options.speculate = drafts;
      GenerateStats stats;
      EXPECT_EQ(texts_of(reference_prompts(), options, &stats), plain)
          << drafts << " drafts, temperature " << temperature;
      EXPECT_GT(stats.accepted_tokens, 0);
      EXPECT_GT(stats.drafted_tokens, stats.accepted_tokens);
      EXPECT_LT(stats.decode_steps, kNewTokens - 1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Caches, DraftsTest,
                         testing::Values(KvFormat::kBF16, KvFormat::kF16, KvFormat::kE4M3),
                         [](const auto& cache) { return std::string(to_string(cache.param)); });

TEST(Generate, ATextDoesNotDependOnItsBatchMates) {
  for (const KvFormat cache : {KvFormat::kBF16, KvFormat::kE4M3}) {
    constexpr std::int64_t kNewTokens = 96;
    GenerateOptions options = generate_options(cache, kNewTokens);
    const std::vector<Tokens> together = texts_of(reference_prompts(), options);
    for (std::size_t i = 0; i < together.size(); ++i) {
      EXPECT_EQ(texts_of({reference_prompts()[i]}, options)[0], together[i]) << i;
    }
    // Two at a time, tiny chunks, drafts, other pages: nothing of it may show.
    options.max_batch = 2;
    options.speculate = 3;
    options.engine.chunk_tokens = 5;
    options.engine.page_seed = 99;
    options.engine.page_size = 16;
    GenerateStats stats;
    EXPECT_EQ(texts_of(reference_prompts(), options, &stats), together);
    EXPECT_LE(stats.peak_pages, 2 * pages_for(39 + kNewTokens, 16));
    EXPECT_GT(stats.peak_pages, 0);
  }
}

TEST(Generate, ATextDoesNotDependOnTheThreads) {
  GenerateOptions options = generate_options(KvFormat::kBF16, 16);
  const std::vector<Tokens> one = texts_of(reference_prompts(), options);
  options.engine.num_threads = 3;
  EXPECT_EQ(texts_of(reference_prompts(), options), one);
}

TEST(Generate, ATextDoesNotDependOnTheRanks) {
  for (const KvFormat cache : {KvFormat::kBF16, KvFormat::kE4M3}) {
    GenerateOptions options = generate_options(cache, 48);
    // Its arithmetic is f32 throughout. Rows that round P to 16 bits may part ways at a near tie,
    // as they do from this one.
    options.engine.backend = "cpu_portable";
    options.engine.page_size = 4;
    options.speculate = 3;
    options.max_batch = 3;
    const std::vector<Tokens> whole = texts_of(reference_prompts(), options);
    for (const auto& [world, interleave] : {std::pair{1, 1}, {2, 1}, {3, 16}, {7, 3}}) {
      const GenerateResult sharded = value_or_throw(
          generate_sharded(checkpoint(), reference_prompts(), options, world, interleave));
      for (std::size_t i = 0; i < whole.size(); ++i) {
        EXPECT_EQ(sharded.generations[i].tokens, whole[i]) << world << " ranks, prompt " << i;
      }
      // A rank holds its part: at most a page more than the W-th of each sequence.
      EXPECT_LE(sharded.stats.peak_pages, 3 * (pages_for((39 + 48) / world + interleave, 4) + 1));
    }
  }
}

TEST(Generate, ARankThatFailsIsTheErrorOfAll) {
  GenerateOptions options = generate_options(KvFormat::kBF16, 8);
  options.engine.backend = "nothing";
  const auto failed = generate_sharded(checkpoint(), reference_prompts(), options, 3, 1);
  EXPECT_EQ(failed.status().code(), StatusCode::kInvalidArgument) << failed.status().message();
  options.engine.backend = "";
  EXPECT_EQ(generate_sharded(checkpoint(), {}, options, 0, 1).status().message(),
            "make_thread_communicators: world: found 0, needed at least 1");
  EXPECT_EQ(generate_sharded(checkpoint(), {}, options, 2, 0).status().message(),
            "generate: interleave: found 0, needed at least 1");
}

TEST(Generate, PagesAreTakenOnDemandAndGivenBack) {
  GenerateOptions options = generate_options(KvFormat::kBF16, 30);
  options.engine.page_size = 1;
  options.max_batch = 1;
  GenerateStats stats;
  texts_of(reference_prompts(), options, &stats);
  // The longest prompt has 39 bytes; the last token is never appended. One request's pages serve
  // all.
  EXPECT_EQ(stats.num_pages, 39 + 30);
  EXPECT_EQ(stats.peak_pages, 39 + 30 - 1);
  EXPECT_EQ(stats.generated_tokens, 5 * 30);
}

TEST(Generate, PlansAreReusedFromStepToStep) {
  const GenerateOptions options = generate_options(KvFormat::kBF16, 100);
  GenerateStats stats;
  texts_of(reference_prompts(), options, &stats);
  EXPECT_EQ(stats.decode_steps, 99);
  EXPECT_EQ(stats.attention.runs, 4 * 100);
  EXPECT_LE(stats.attention.plans, 3);
}

TEST(Generate, SamplingRepeatsWithItsSeed) {
  GenerateOptions options = generate_options(KvFormat::kBF16, 40);
  options.temperature = 1.0;
  options.seed = 5;
  const std::vector<Tokens> first = texts_of(reference_prompts(), options);
  EXPECT_EQ(texts_of(reference_prompts(), options), first);
  options.seed = 6;
  EXPECT_NE(texts_of(reference_prompts(), options), first);
}

TEST(BatchDump, WritesAStepThatGivesTheSameOutput) {
  const std::string path = testing::TempDir() + "/mla_model_dump.safetensors";
  BatchDump dump(path, 2, 7);
  GenerateOptions options = generate_options(KvFormat::kE4M3, 12);
  options.speculate = 4;
  std::vector<float> expected;
  const StepHook write = dump.hook();
  options.hook = [&](std::int64_t step, std::int64_t layer, const DecodeProblem& problem,
                     const DecodeTensors& tensors) {
    write(step, layer, problem, tensors);
    if (step != 7 || layer != 2) return;
    const auto* out = static_cast<const float*>(tensors.out.data);
    const auto* starts = static_cast<const std::int32_t*>(tensors.query_start_loc.data);
    const std::int64_t rows = starts[problem.num_requests] * problem.num_heads;
    expected.assign(out, out + rows * problem.kv_lora_rank);
  };
  texts_of(reference_prompts(), options);
  ASSERT_TRUE(dump.status().ok()) << dump.status().message();

  const io::Batch batch = value_or_throw(io::read_batch(path));
  EXPECT_EQ(batch.problem.num_requests, 5);
  EXPECT_EQ(batch.problem.kv_format, KvFormat::kE4M3);
  PlanOptions plan_options;
  plan_options.fixed_split = 512;  // as the engine plans
  DecodeProblem problem = batch.problem;
  problem.out_dtype = DType::kF32;
  const DecodePlan made = value_or_throw(plan(problem, plan_options));
  std::vector<std::byte> workspace(made.workspace_bytes());
  std::vector<float> out(expected.size());
  DecodeTensors tensors = batch.tensors;
  tensors.out = TensorView::contiguous(
      out.data(), DType::kF32, {problem.num_tokens, problem.num_heads, problem.kv_lora_rank});
  const Status ran = run(made, tensors, workspace.data(), workspace.size());
  ASSERT_TRUE(ran.ok()) << ran.message();
  EXPECT_EQ(out, expected);
  std::remove(path.c_str());

  BatchDump never(path, 4, 0);
  options.hook = never.hook();
  texts_of(reference_prompts(), options);
  EXPECT_EQ(never.status().code(), StatusCode::kInvalidArgument);
}

TEST(Score, WindowsCutALongText) {
  const Probe probe = read_probe();
  const std::span<const std::int32_t> text(probe.tokens.data(), 200);
  ScoreOptions options;
  options.engine = engine_options(KvFormat::kBF16);
  options.window = 64;
  const Score windows = value_or_throw(score(checkpoint(), text, options));
  EXPECT_EQ(windows.nll.size(), 199U);
  const Score second = value_or_throw(score(checkpoint(), text.subspan(63, 64), options));
  for (std::size_t i = 0; i < 63; ++i) EXPECT_EQ(windows.nll[63 + i], second.nll[i]);
  options.window = 1;
  EXPECT_FALSE(score(checkpoint(), text, options).ok());
  EXPECT_FALSE(score(checkpoint(), text.subspan(0, 1), ScoreOptions()).ok());
}

}  // namespace
}  // namespace mla::model
