// Writes the seeds of the fuzz targets: `make_corpus FOLDER` fills FOLDER/batch with small batches,
// one for each feature of the format, and FOLDER/checkpoint with a model of one layer. The files
// under fuzz/corpus were made by it; an input that the fuzzer broke something with joins them.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "io/batch_file.hpp"

namespace {

using mla::DecodeProblem;
using mla::DecodeTensors;
using mla::DType;
using mla::TensorView;

constexpr std::int64_t kTokens = 3, kHeads = 2, kLatent = 4, kRope = 2, kWidth = 6;
constexpr std::int64_t kPages = 3, kPageSize = 2;

struct Arrays {
  std::vector<std::uint16_t> halves = std::vector<std::uint16_t>(64, 0x3F80);
  std::vector<std::uint8_t> records = std::vector<std::uint8_t>(656, 0x38);
  std::vector<std::int32_t> table = {2, 0, 1, 0};
  std::vector<std::int32_t> lengths = {4, 1};
  std::vector<std::int32_t> starts = {0, 2, 3};
  std::vector<std::int32_t> indices = {0, 5, -1, 2147483647, 1, 1};
  std::vector<std::int32_t> ids = {7, 0, 30};
  std::vector<float> floats = {0.5F, -1.0F};
};

bool report(const mla::Status& status) {
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.ok();
}

// A model of one layer whose dimensions are 1, but for the rotary pair.
constexpr char kConfig[] = R"({"architectures":["DeepseekV3ForCausalLM"],"vocab_size":2,)"
                           R"("hidden_size":1,"intermediate_size":1,"num_hidden_layers":1,)"
                           R"("num_attention_heads":1,"kv_lora_rank":1,"qk_nope_head_dim":1,)"
                           R"("qk_rope_head_dim":2,"v_head_dim":1,"max_position_embeddings":8,)"
                           R"("n_routed_experts":null,"q_lora_rank":null,"eos_token_id":[0,1]})";

/// u16 length of the config, the config, the weights: what fuzz_checkpoint takes.
bool write_checkpoint(const std::string& path, const std::vector<std::uint16_t>& halves) {
  struct Weight {
    const char* name;
    std::int64_t rows, columns;  // no rows: a vector
  };
  constexpr Weight kWeights[] = {{"model.embed_tokens.weight", 2, 1},
                                 {"model.norm.weight", 0, 1},
                                 {"lm_head.weight", 2, 1},
                                 {"model.layers.0.input_layernorm.weight", 0, 1},
                                 {"model.layers.0.post_attention_layernorm.weight", 0, 1},
                                 {"model.layers.0.self_attn.q_proj.weight", 3, 1},
                                 {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 3, 1},
                                 {"model.layers.0.self_attn.kv_a_layernorm.weight", 0, 1},
                                 {"model.layers.0.self_attn.kv_b_proj.weight", 2, 1},
                                 {"model.layers.0.self_attn.o_proj.weight", 1, 1},
                                 {"model.layers.0.mlp.gate_proj.weight", 1, 1},
                                 {"model.layers.0.mlp.up_proj.weight", 1, 1},
                                 {"model.layers.0.mlp.down_proj.weight", 1, 1}};
  std::vector<mla::io::NamedTensor> tensors;
  for (const Weight& weight : kWeights) {
    const bool vector = weight.rows == 0;
    tensors.push_back(
        {weight.name, vector ? TensorView::contiguous(halves.data(), DType::kBF16, {weight.columns})
                             : TensorView::contiguous(halves.data(), DType::kBF16,
                                                      {weight.rows, weight.columns})});
  }
  const std::string weights_path = path + ".weights";
  if (!report(mla::io::write_safetensors(weights_path, tensors))) return false;
  std::ifstream weights(weights_path, std::ios::binary);
  std::ofstream seed(path, std::ios::binary);
  const std::string config = kConfig;
  seed << static_cast<char>(config.size() % 256) << static_cast<char>(config.size() / 256) << config
       << weights.rdbuf();
  std::filesystem::remove(weights_path);
  return seed.good();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_corpus FOLDER\n");
    return 2;
  }
  const std::string folder = std::string(argv[1]) + "/batch/";
  std::filesystem::create_directories(folder);

  const Arrays a;
  DecodeProblem problem;
  problem.kv_lora_rank = kLatent;
  problem.qk_rope_head_dim = kRope;
  DecodeTensors dense;
  dense.bmm1_scale = 0.125F;
  dense.q = TensorView::contiguous(a.halves.data(), DType::kBF16, {kTokens, kHeads, kWidth});
  dense.kv_cache =
      TensorView::contiguous(a.halves.data(), DType::kF16, {kPages, kPageSize, kWidth});
  dense.block_table = TensorView::contiguous(a.table.data(), DType::kI32, {2, 2});
  dense.seq_lens = TensorView::contiguous(a.lengths.data(), DType::kI32, {2});
  dense.query_start_loc = TensorView::contiguous(a.starts.data(), DType::kI32, {3});
  bool ok = report(mla::io::write_batch(folder + "dense", problem, dense));
  ok &= report(mla::io::write_batch(folder + "pool", problem, dense, {.only_owned_pages = true}));

  DecodeProblem modes = problem;
  modes.causal = false;
  modes.cp_world = 2;
  modes.cp_rank = 1;
  modes.logits_soft_cap = 30.0F;
  modes.sliding_window = 128;
  modes.lse_base = mla::LseBase::kTwo;
  modes.out_dtype = DType::kF32;
  DecodeTensors options = dense;
  options.causal_seqlens_kv_global = dense.seq_lens;
  options.sinks = TensorView::contiguous(a.floats.data(), DType::kF32, {kHeads});
  options.alibi_slopes = options.sinks;
  ok &= report(mla::io::write_batch(folder + "options", modes, options));

  DecodeTensors sparse = dense;
  sparse.q = {};
  sparse.q_nope = TensorView::contiguous(a.halves.data(), DType::kBF16, {kTokens, kHeads, kLatent});
  sparse.q_pe = TensorView::contiguous(a.halves.data(), DType::kBF16, {kTokens, kHeads, kRope});
  sparse.block_table = sparse.seq_lens = sparse.query_start_loc = {};
  sparse.indices = TensorView::contiguous(a.indices.data(), DType::kI32, {kTokens, 2});
  ok &= report(mla::io::write_batch(folder + "sparse", problem, sparse));

  DecodeTensors fp8 = dense;
  fp8.kv_cache = TensorView::contiguous(a.records.data(), DType::kU8, {1, 1, 656});
  ok &= report(mla::io::write_batch(folder + "fp8_ds_mla", problem, fp8));

  const TensorView layers =
      TensorView::contiguous(a.halves.data(), DType::kBF16, {kPages, 2, 1, kWidth});
  ok &= report(mla::io::write_safetensors(
      folder + "layers",
      {{"q", dense.q},
       {"kv_cache", layers},
       {"kv_page_ids", TensorView::contiguous(a.ids.data(), DType::kI32, {kPages})},
       {"block_table", dense.block_table},
       {"seq_lens", dense.seq_lens}},
      {{"format", "mla-batch-1"},
       {"kv_lora_rank", "4"},
       {"qk_rope_head_dim", "2"},
       {"bmm1_scale", "1"},
       {"kv_layer", "1"},
       {"kv_pool_pages", "200000"}}));

  const std::string checkpoints = std::string(argv[1]) + "/checkpoint/";
  std::filesystem::create_directories(checkpoints);
  ok &= write_checkpoint(checkpoints + "one_layer", a.halves);
  return ok ? 0 : 1;
}
