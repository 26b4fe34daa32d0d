// The model code on tiny random checkpoints: against an un-absorbed forward pass in double, and
// what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "model/checkpoint.hpp"
#include "model/gemm.hpp"
#include "model/generate.hpp"
#include "model/rope.hpp"
#include "model/sampler.hpp"
#include "support/synthetic_model.hpp"

namespace mla::model {
namespace {

using test::SyntheticModel;

Tokens make_tokens(std::int64_t count, std::int64_t vocab) {
  Tokens tokens;
  std::uint64_t state = 1;
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    tokens.push_back(static_cast<std::int32_t>((state >> 33) % static_cast<std::uint64_t>(vocab)));
  }
  return tokens;
}

/// Largest |logit - oracle| over all positions, relative to the largest |oracle|.
double worst_logit_error(const SyntheticModel& model, KvFormat cache, std::int64_t chunk_tokens) {
  const auto weights = model.make_weights(7);
  const std::vector<std::byte> bytes = test::to_safetensors(weights);
  const Result<Checkpoint> checkpoint = parse_checkpoint(model.config_json(), bytes);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  if (!checkpoint.ok()) return HUGE_VAL;
  const Tokens tokens = make_tokens(90, model.vocab);
  const std::vector<double> expected = model.forward(weights, tokens);
  double error = 0.0;
  double largest = 0.0;
  std::int64_t seen = 0;
  ScoreOptions options;
  options.engine.cache = cache;
  options.engine.num_threads = 1;
  options.engine.page_size = 7;
  options.engine.chunk_tokens = chunk_tokens;
  options.logits = [&](std::int64_t position, std::span<const float> logits) {
    ++seen;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double reference = expected[static_cast<std::size_t>(position) * logits.size() + i];
      error = std::max(error, std::fabs(logits[i] - reference));
      largest = std::max(largest, std::fabs(reference));
    }
  };
  const Result<Score> result = score(*checkpoint, tokens, options);
  EXPECT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(seen, 90);
  return error / largest;
}

// Query and cache are rounded to 11 bits (f16) or 8 bits (bf16) in both layers. In units of that
// rounding the worst logits of these models lie 1.4 to 4.4 off for either type, which shows that
// rounding is all there is; a mistake in the maths costs hundreds of units.
constexpr double kToleranceUnits = 8.0;
constexpr double kF16Tolerance = kToleranceUnits / 2048;
constexpr double kBF16Tolerance = kToleranceUnits / 256;

TEST(Transformer, AbsorbedDecodingEqualsTheUnabsorbedForwardPass) {
  for (const std::int64_t q_lora_rank : {0, 24}) {
    for (const bool interleave : {true, false}) {
      for (const bool yarn : {false, true}) {
        SyntheticModel model;
        model.q_lora_rank = q_lora_rank;
        model.interleave = interleave;
        model.yarn = yarn;
        model.tied = yarn;
        SCOPED_TRACE(model.config_json());
        EXPECT_LT(worst_logit_error(model, KvFormat::kF16, 512), kF16Tolerance);
        EXPECT_LT(worst_logit_error(model, KvFormat::kBF16, 512), kBF16Tolerance);
      }
    }
  }
}

TEST(Transformer, PrefillChunksOfAnyLengthGiveTheSameLogits) {
  SyntheticModel model;
  model.yarn = true;
  for (const std::int64_t chunk : {1, 13, 89}) {
    EXPECT_LT(worst_logit_error(model, KvFormat::kF16, chunk), kF16Tolerance) << chunk;
  }
}

TEST(Rope, YarnFollowsItsDefinition) {
  for (const std::int64_t original : {64, 4096}) {
    SyntheticModel model;
    model.rope = 64;
    model.yarn = true;
    model.yarn_factor = 40.0;
    model.yarn_original = original;
    const Result<ModelConfig> config = parse_config(model.config_json());
    ASSERT_TRUE(config.ok()) << config.status().message();
    const Rope rope(*config);
    EXPECT_NEAR(rope.attention_factor(), model.rope_factor(), 1e-12);
    EXPECT_NEAR(softmax_scale(*config), model.scale(), 1e-12);
    const std::vector<double> expected = model.inv_freq();
    ASSERT_EQ(rope.inv_freq().size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(rope.inv_freq()[i], expected[i], 1e-12 * expected[i]) << i;
    }
    std::vector<float> angles(64);
    rope.angles(100000, angles.data());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      // An angle of 1e5 times a relative error of 1e-12 in the frequency, then one f32 rounding.
      EXPECT_NEAR(angles[i], model.rope_factor() * std::cos(1e5 * expected[i]), 1e-6);
      EXPECT_NEAR(angles[32 + i], model.rope_factor() * std::sin(1e5 * expected[i]), 1e-6);
    }
  }
}

TEST(Rope, DeepSeekV3SettingsGiveItsKnownNumbers) {
  // DeepSeek-V3: factor 40 over 4096, mscale = mscale_all_dim = 1, so cosine and sine stay unscaled
  // and the softmax takes (0.1 ln 40 + 1)^2. The correction range is dimensions 10 to 23.
  SyntheticModel model;
  model.nope = 128;
  model.rope = 64;
  model.yarn = true;
  model.yarn_factor = 40.0;
  model.yarn_original = 4096;
  model.mscale = model.mscale_all_dim = 1.0;
  const Result<ModelConfig> config = parse_config(model.config_json());
  ASSERT_TRUE(config.ok());
  const Rope rope(*config);
  EXPECT_DOUBLE_EQ(rope.attention_factor(), 1.0);
  EXPECT_NEAR(softmax_scale(*config), 0.1352337788608801, 1e-12);
  EXPECT_NEAR(rope.inv_freq()[10], std::pow(10000.0, -20.0 / 64), 1e-15);
  EXPECT_LT(rope.inv_freq()[11], std::pow(10000.0, -22.0 / 64) * 0.999);
  EXPECT_NEAR(rope.inv_freq()[23], std::pow(10000.0, -46.0 / 64) / 40.0, 1e-15);
}

using Product = void (Gemm::*)(ConstMatrix, ConstMatrix, Matrix, std::int64_t, std::int64_t,
                               std::int64_t) const;

struct GemmShape {
  std::int64_t n;
  std::int64_t k;
};

std::vector<float> make_floats(std::int64_t count, float step, float phase) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(static_cast<float>(i) * step + phase);
  }
  return values;
}

/// Puts one row at every place of blocks of other rows, with 1 to 3 threads, and compares its
/// results bit by bit with the first, and that one with double sums.
void expect_row_independence(Product product, bool transposed, GemmShape shape) {
  const auto [n, k] = shape;
  const std::int64_t w_stride = (transposed ? k : n) + 3;
  const std::vector<float> w = make_floats((transposed ? n : k) * w_stride, 1.7F, 0.0F);
  const std::vector<float> row = make_floats(k, 0.9F, 1.0F);
  std::vector<float> first;
  for (const std::int64_t rows : {kRowBlock, 2 * kRowBlock}) {
    for (std::int64_t place = 0; place < rows; ++place) {
      std::vector<float> x = make_floats(rows * k, 0.3F, static_cast<float>(place));
      std::copy(row.begin(), row.end(), x.begin() + place * k);
      std::vector<float> y(static_cast<std::size_t>(rows * n));
      const Gemm gemm(1 + static_cast<int>(place % 3));
      (gemm.*product)({x.data(), k}, {w.data(), w_stride}, {y.data(), n}, rows, n, k);
      const std::vector<float> found(y.begin() + place * n, y.begin() + (place + 1) * n);
      if (first.empty()) first = found;
      ASSERT_EQ(found, first) << "row " << place << " of " << rows;
    }
  }
  for (std::int64_t j = 0; j < n; ++j) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int64_t at = transposed ? j * w_stride + i : i * w_stride + j;
      sum +=
          static_cast<double>(row[static_cast<std::size_t>(i)]) * w[static_cast<std::size_t>(at)];
    }
    // k terms below 1, each rounded to 24 bits.
    ASSERT_NEAR(first[static_cast<std::size_t>(j)], sum, static_cast<double>(k) * 0x1.0p-23);
  }
}

TEST(Gemm, TheBitsOfARowDoNotDependOnTheRowsAroundIt) {
  // The model's own shapes, odd ones, and more columns than one call takes.
  for (const GemmShape shape :
       {GemmShape{37, 300}, GemmShape{576, 256}, GemmShape{512, 64}, GemmShape{64, 512},
        GemmShape{256, 768}, GemmShape{257, 1}, GemmShape{1, 515}}) {
    SCOPED_TRACE(testing::Message() << "n " << shape.n << " k " << shape.k);
    expect_row_independence(&Gemm::multiply_transposed, true, shape);
    expect_row_independence(&Gemm::multiply, false, shape);
  }
}

TEST(Sampler, DrawsFollowTheDistributionAndOnlyTheirArguments) {
  const std::vector<float> logits = {0.0F, std::log(2.0F), std::log(5.0F)};
  std::vector<int> counts(3, 0);
  constexpr int kDraws = 8000;
  for (int i = 0; i < kDraws; ++i) {
    ++counts[static_cast<std::size_t>(
        sample(logits, 1.0, uniform(9, 0, static_cast<std::uint64_t>(i))))];
  }
  // Standard deviations are below 45 draws; the bound is over five of them.
  EXPECT_NEAR(counts[0], kDraws / 8, 240);
  EXPECT_NEAR(counts[1], kDraws * 2 / 8, 240);
  EXPECT_NEAR(counts[2], kDraws * 5 / 8, 240);
  EXPECT_EQ(uniform(1, 2, 3), uniform(1, 2, 3));
  EXPECT_NE(uniform(1, 2, 3), uniform(1, 3, 2));
  EXPECT_EQ(sample(logits, 0.0, 0.1), 2);
  EXPECT_EQ(argmax(std::vector<float>{1.0F, 3.0F, 3.0F}), 1);
}

TEST(Sampler, DraftsContinueTheLongestAndLatestEarlierMatch) {
  EXPECT_EQ(draft_by_lookup(Tokens{1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3}, 3), (Tokens{9, 5, 2}));
  EXPECT_EQ(draft_by_lookup(Tokens{2, 3, 7, 2, 3, 8, 2, 3}, 1), (Tokens{8}));
  EXPECT_EQ(draft_by_lookup(Tokens{4, 4, 4, 4}, 8), (Tokens{4}));
  EXPECT_TRUE(draft_by_lookup(Tokens{1, 2, 3, 4, 3}, 4).empty());
  EXPECT_TRUE(draft_by_lookup(Tokens{1, 2, 1, 2}, 0).empty());
  EXPECT_TRUE(draft_by_lookup(Tokens{1}, 4).empty());
}

TEST(PageAllocator, GivesEachPageOnceAndTakesItBack) {
  PageAllocator allocator(10, 3);
  std::vector<std::int32_t> a, b;
  ASSERT_TRUE(allocator.grow(a, 4).ok());
  ASSERT_TRUE(allocator.grow(b, 6).ok());
  ASSERT_TRUE(allocator.grow(b, 2).ok());
  EXPECT_EQ(b.size(), 6U);
  std::set<std::int32_t> all(a.begin(), a.end());
  all.insert(b.begin(), b.end());
  EXPECT_EQ(all.size(), 10U);
  EXPECT_EQ(*all.begin(), 0);
  EXPECT_EQ(*all.rbegin(), 9);
  const Status refused = allocator.grow(a, 5);
  EXPECT_EQ(refused.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(a.size(), 4U);
  allocator.release(b);
  EXPECT_EQ(allocator.num_free(), 6);
  EXPECT_TRUE(allocator.grow(a, 10).ok());
}

TEST(CacheBound, NoTokenExceedsIt) {
  SyntheticModel model;
  model.yarn = true;
  const std::vector<std::byte> bytes = test::to_safetensors(model.make_weights(3));
  const Result<Checkpoint> checkpoint = parse_checkpoint(model.config_json(), bytes);
  ASSERT_TRUE(checkpoint.ok());
  GenerateOptions options;
  options.max_tokens = 60;
  options.engine.cache = KvFormat::kF16;
  options.engine.page_size = 4;
  float largest = 0.0F;
  double bound = 0.0;
  options.hook = [&](std::int64_t, std::int64_t layer, const DecodeProblem& problem,
                     const DecodeTensors& tensors) {
    bound = std::max(bound, cache_bound(*checkpoint, layer));
    const TensorView& cache = tensors.kv_cache;
    const auto* table = static_cast<const std::int32_t*>(tensors.block_table.data);
    const std::int32_t length = *static_cast<const std::int32_t*>(tensors.seq_lens.data);
    for (std::int64_t token = 0; token < length; ++token) {
      const auto* row = static_cast<const std::uint16_t*>(cache.data) +
                        table[token / problem.page_size] * cache.stride[0] +
                        token % problem.page_size * cache.stride[1];
      for (std::int64_t d = 0; d < problem.head_dim(); ++d) {
        // Halves order like their magnitude bits; 0x3C00 is 1.
        largest = std::max(largest, std::ldexp(static_cast<float>((row[d] & 0x3FF) | 0x400),
                                               ((row[d] >> 10) & 0x1F) - 25));
      }
    }
  };
  ASSERT_TRUE(generate(*checkpoint, {make_tokens(5, model.vocab)}, options).ok());
  EXPECT_GT(largest, 0.5F);
  EXPECT_LE(largest, bound * 1.001);  // f16 rounding
}

struct Refusal {
  const char* from;
  const char* to;
  StatusCode code;
  const char* named;
};

TEST(Config, OtherModelsAndBrokenEntriesAreRefusedByName) {
  SyntheticModel model;
  model.yarn = true;
  const std::string good = model.config_json();
  ASSERT_TRUE(parse_config(good).ok());
  const Refusal refusals[] = {
      {"\"first_k_dense_replace\":2", "\"first_k_dense_replace\":1", StatusCode::kUnsupported,
       "first_k_dense_replace"},
      {"DeepseekV3ForCausalLM", "LlamaForCausalLM", StatusCode::kUnsupported, "architectures"},
      {"\"yarn\"", "\"dynamic\"", StatusCode::kUnsupported, "rope_type"},
      {"\"silu\"", "\"gelu\"", StatusCode::kUnsupported, "hidden_act"},
      {"\"vocab_size\":64", "\"vocab_size\":64,\"attention_bias\":true", StatusCode::kUnsupported,
       "attention_bias"},
      {"\"vocab_size\":64", "\"vocab_size\":64,\"quantization_config\":{}",
       StatusCode::kUnsupported, "quantization_config"},
      {"\"hidden_size\":48", "\"hidden_size\":\"48\"", StatusCode::kInvalidArgument, "hidden_size"},
      {"\"hidden_size\":48", "\"hidden_size\":4.5", StatusCode::kInvalidArgument, "hidden_size"},
      {"\"hidden_size\":48", "\"hidden_size\":18446744073709551615", StatusCode::kInvalidArgument,
       "hidden_size"},
      {"\"num_hidden_layers\":2", "\"num_hidden_layers\":1e9", StatusCode::kInvalidArgument,
       "num_hidden_layers"},
      {"\"kv_lora_rank\":32", "\"kv_lora_rank\":-32", StatusCode::kInvalidArgument, "kv_lora_rank"},
      {"\"v_head_dim\":12,", "", StatusCode::kInvalidArgument, "v_head_dim"},
      {"\"qk_rope_head_dim\":16", "\"qk_rope_head_dim\":15", StatusCode::kInvalidArgument,
       "qk_rope_head_dim"},
      {"\"factor\":4", "\"factor\":0", StatusCode::kInvalidArgument, "factor"},
      {"\"tie_word_embeddings\":false", "\"tie_word_embeddings\":1", StatusCode::kInvalidArgument,
       "tie_word_embeddings"},
      {"{\"arch", "[\"arch", StatusCode::kInvalidArgument, "JSON"},
  };
  for (const Refusal& refusal : refusals) {
    std::string bad = good;
    const std::size_t at = bad.find(refusal.from);
    ASSERT_NE(at, std::string::npos) << refusal.from;
    bad.replace(at, std::string(refusal.from).size(), refusal.to);
    const Result<ModelConfig> result = parse_config(bad);
    ASSERT_FALSE(result.ok()) << refusal.to;
    EXPECT_EQ(result.status().code(), refusal.code) << result.status().message();
    EXPECT_NE(result.status().message().find(refusal.named), std::string::npos)
        << result.status().message();
  }
}

TEST(Config, MoeIsRefusedWithTheClassDefaults) {
  const std::string base = SyntheticModel().config_json();
  std::string without = base;
  without.erase(without.find(",\"first_k_dense_replace\":2"), 26);
  std::string v2 = without;
  v2.replace(v2.find("V3For"), 5, "V2For");
  EXPECT_TRUE(parse_config(without).ok());  // DeepseekV3Config: the first 3 layers are dense
  EXPECT_EQ(parse_config(v2).status().code(), StatusCode::kUnsupported);  // V2: none is
}

TEST(Config, DeepNestingIsRefusedWithoutDeepRecursion) {
  constexpr std::size_t kDepth = 300'000;
  const std::string nested = std::string(kDepth, '[') + std::string(kDepth, ']');
  const std::string good = SyntheticModel().config_json();
  for (const char* key : {"hidden_size", "eos_token_id", "architectures", "rope_scaling"}) {
    std::string bad = good;
    if (bad.find(key) == std::string::npos) bad.insert(1, std::string("\"") + key + "\":0,");
    const std::size_t value = bad.find(':', bad.find(key)) + 1;
    bad.replace(value, bad.find(',', value) - value, nested);
    EXPECT_EQ(parse_config(bad).status().code(), StatusCode::kInvalidArgument) << key;
  }
  EXPECT_FALSE(parse_config(nested).ok());
}

TEST(Checkpoint, EveryMissingOrMisshapenTensorIsNamed) {
  const SyntheticModel model;
  const auto weights = model.make_weights(1);
  for (const auto& [name, weight] : weights) {
    auto missing = weights;
    missing.erase(name);
    const Result<Checkpoint> without =
        parse_checkpoint(model.config_json(), test::to_safetensors(missing));
    ASSERT_FALSE(without.ok()) << name;
    EXPECT_NE(without.status().message().find(name), std::string::npos);
    auto misshapen = weights;
    misshapen[name].shape.insert(misshapen[name].shape.begin(), 1);
    const Result<Checkpoint> bad =
        parse_checkpoint(model.config_json(), test::to_safetensors(misshapen));
    ASSERT_FALSE(bad.ok()) << name;
    EXPECT_EQ(bad.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(bad.status().message().find(name), std::string::npos);
  }
}

TEST(Checkpoint, TruncatedWeightsAreRefused) {
  const SyntheticModel model;
  const std::vector<std::byte> bytes = test::to_safetensors(model.make_weights(1));
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, std::size_t{8}, std::size_t{100},
                                 bytes.size() / 2, bytes.size() - 1}) {
    const std::vector<std::byte> cut(bytes.begin(),
                                     bytes.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_FALSE(parse_checkpoint(model.config_json(), cut).ok()) << size;
  }
}

TEST(Checkpoint, ShardsGiveTheSameWeightsAsOneFile) {
  const SyntheticModel model;
  const auto weights = model.make_weights(5);
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / "mla_sharded_checkpoint";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const auto write = [&](const std::string& name, const std::vector<std::byte>& bytes) {
    std::ofstream(folder / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  };
  std::map<std::string, SyntheticModel::Weight> shards[2];
  std::string index = "{\"weight_map\":{";
  std::size_t count = 0;
  for (const auto& [name, weight] : weights) {
    const std::size_t shard = count % 2;
    shards[shard][name] = weight;
    index += (count++ > 0 ? ",\"" : "\"") + name + "\":\"part-" + std::to_string(shard) + "\"";
  }
  index += "}}";
  write("part-0", test::to_safetensors(shards[0]));
  write("part-1", test::to_safetensors(shards[1]));
  std::ofstream(folder / "config.json") << model.config_json();
  EXPECT_EQ(load_checkpoint(folder).status().code(), StatusCode::kIo);
  std::ofstream(folder / "model.safetensors.index.json") << index;
  const Result<Checkpoint> sharded = load_checkpoint(folder);
  ASSERT_TRUE(sharded.ok()) << sharded.status().message();
  const Result<Checkpoint> single =
      parse_checkpoint(model.config_json(), test::to_safetensors(weights));
  ASSERT_TRUE(single.ok());
  EXPECT_EQ(sharded->lm_head, single->lm_head);
  EXPECT_EQ(sharded->layers[1].down, single->layers[1].down);
  EXPECT_EQ(sharded->num_parameters(), single->num_parameters());

  index.replace(index.find("part-1"), 6, "../etc");
  std::ofstream(folder / "model.safetensors.index.json") << index;
  EXPECT_EQ(load_checkpoint(folder).status().code(), StatusCode::kInvalidArgument);
  std::filesystem::remove_all(folder);
}

TEST(Generate, BadArgumentsAreRefusedByName) {
  const SyntheticModel model;
  const Result<Checkpoint> checkpoint =
      parse_checkpoint(model.config_json(), test::to_safetensors(model.make_weights(1)));
  ASSERT_TRUE(checkpoint.ok());
  const auto message = [&](const std::vector<Tokens>& prompts, const GenerateOptions& options) {
    const Result<GenerateResult> result = generate(*checkpoint, prompts, options);
    return result.ok() ? std::string("ok") : result.status().message();
  };
  const auto contains = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  GenerateOptions options;
  EXPECT_TRUE(contains(message({}, options), "prompts"));
  EXPECT_TRUE(contains(message({{1}, {}}, options), "prompt 2"));
  EXPECT_TRUE(contains(message({{1, 64}}, options), "token 64 at 1"));
  EXPECT_TRUE(contains(message({Tokens(256, 1)}, options), "max_position_embeddings"));
  options.speculate = -1;
  EXPECT_TRUE(contains(message({{1}}, options), "speculate"));
  options = {};
  options.max_tokens = 0;
  EXPECT_TRUE(contains(message({{1}}, options), "max_tokens"));
  options = {};
  options.engine.page_size = 0;
  EXPECT_TRUE(contains(message({{1}}, options), "page_size"));
  options = {};
  options.engine.backend = "no such row";
  EXPECT_TRUE(contains(message({{1}}, options), "backend"));
  options = {};
  options.engine.cache = KvFormat::kFp8DsMla;
  EXPECT_TRUE(contains(message({{1}}, options), "fp8_ds_mla"));
}

TEST(Generate, StopsAtTheEndOfTextAndAtTheLastPosition) {
  const SyntheticModel model;
  const std::vector<std::byte> bytes = test::to_safetensors(model.make_weights(1));
  Result<Checkpoint> checkpoint = parse_checkpoint(model.config_json(), bytes);
  ASSERT_TRUE(checkpoint.ok());
  GenerateOptions options;
  options.max_tokens = 1000;
  const Result<GenerateResult> full = generate(*checkpoint, {make_tokens(6, model.vocab)}, options);
  ASSERT_TRUE(full.ok()) << full.status().message();
  const Tokens& tokens = full->generations[0].tokens;
  EXPECT_EQ(tokens.size(), 250U);  // max_position_embeddings is 256
  EXPECT_EQ(full->generations[0].finish, FinishReason::kLength);

  checkpoint->config.eos_token_ids = {tokens[9]};
  const auto first = std::find(tokens.begin(), tokens.end(), tokens[9]);
  for (const std::int64_t drafts : {0, 6}) {
    options.speculate = drafts;
    const Result<GenerateResult> ended =
        generate(*checkpoint, {make_tokens(6, model.vocab)}, options);
    ASSERT_TRUE(ended.ok());
    EXPECT_EQ(ended->generations[0].tokens, Tokens(tokens.begin(), first));
    EXPECT_EQ(ended->generations[0].finish, FinishReason::kEndOfText);
  }
}

}  // namespace
}  // namespace mla::model
