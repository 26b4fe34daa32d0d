#include "model/checkpoint.hpp"

#include <algorithm>
#include <cmath>
#include <new>
#include <string>

#include "core/diagnostics.hpp"
#include "io/mapped_file.hpp"
#include "model/rope.hpp"
#include "model/weight_files.hpp"

namespace mla::model {
namespace {

constexpr const char* kOperation = "load_checkpoint";

/// Reads tensors into their places and keeps the first error.
class Loader {
 public:
  explicit Loader(const WeightFiles& files) : files_(files) {}

  const Status& status() const { return status_; }

  void read(const std::string& name, std::vector<std::int64_t> shape, std::vector<float>& out) {
    if (!status_.ok()) return;
    Result<std::vector<float>> values = files_.read(name, shape);
    if (values.ok()) {
      out = *std::move(values);
    } else {
      status_ = values.status();
    }
  }

 private:
  const WeightFiles& files_;
  Status status_;
};

void load_layer(const ModelConfig& config, std::int64_t index, Loader& loader,
                LayerWeights& layer) {
  const std::string prefix = text("model.layers.", index, ".");
  const std::string attn = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t rank = config.kv_lora_rank;
  const std::int64_t q_rows = config.num_heads * config.qk_head_dim();
  const std::int64_t kv_rows = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim);
  loader.read(prefix + "input_layernorm.weight", {hidden}, layer.input_norm);
  loader.read(prefix + "post_attention_layernorm.weight", {hidden}, layer.post_attn_norm);
  if (config.q_lora_rank > 0) {
    loader.read(attn + "q_a_proj.weight", {config.q_lora_rank, hidden}, layer.q_a);
    loader.read(attn + "q_a_layernorm.weight", {config.q_lora_rank}, layer.q_a_norm);
    loader.read(attn + "q_b_proj.weight", {q_rows, config.q_lora_rank}, layer.q_proj);
  } else {
    loader.read(attn + "q_proj.weight", {q_rows, hidden}, layer.q_proj);
  }
  loader.read(attn + "kv_a_proj_with_mqa.weight", {config.latent_dim(), hidden}, layer.kv_a);
  loader.read(attn + "kv_a_layernorm.weight", {rank}, layer.kv_a_norm);
  loader.read(attn + "kv_b_proj.weight", {kv_rows, rank}, layer.kv_b);
  loader.read(attn + "o_proj.weight", {hidden, config.num_heads * config.v_head_dim}, layer.o_proj);
  loader.read(mlp + "gate_proj.weight", {config.intermediate_size, hidden}, layer.gate);
  loader.read(mlp + "up_proj.weight", {config.intermediate_size, hidden}, layer.up);
  loader.read(mlp + "down_proj.weight", {hidden, config.intermediate_size}, layer.down);
}

Result<Checkpoint> load(ModelConfig config, const WeightFiles& files) {
  Checkpoint checkpoint;
  checkpoint.config = std::move(config);
  const ModelConfig& c = checkpoint.config;
  Loader loader(files);
  loader.read("model.embed_tokens.weight", {c.vocab_size, c.hidden_size}, checkpoint.embedding);
  loader.read("model.norm.weight", {c.hidden_size}, checkpoint.final_norm);
  if (!c.tie_word_embeddings) {
    loader.read("lm_head.weight", {c.vocab_size, c.hidden_size}, checkpoint.lm_head);
  }
  for (std::int64_t index = 0; index < c.num_layers; ++index) {
    MLA_RETURN_IF_ERROR(loader.status());
    load_layer(c, index, loader, checkpoint.layers.emplace_back());
  }
  MLA_RETURN_IF_ERROR(loader.status());
  return checkpoint;
}

/// Runs `function`, a lack of memory becoming a Status.
template <class Function>
Result<Checkpoint> guarded(Function&& function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, text(kOperation, ": out of host memory"));
  }
}

double squared_norm(const float* row, const std::vector<float>& weight) {
  double sum = 0.0;
  for (std::size_t i = 0; i < weight.size(); ++i) {
    const double term = static_cast<double>(row[i]) * weight[i];
    sum += term * term;
  }
  return sum;
}

std::int64_t count(const std::vector<float>& weights) {
  return static_cast<std::int64_t>(weights.size());
}

}  // namespace

const float* Checkpoint::w_uk(std::int64_t layer, std::int64_t head) const noexcept {
  const std::int64_t first_row = head * (config.qk_nope_head_dim + config.v_head_dim);
  return layers[static_cast<std::size_t>(layer)].kv_b.data() + first_row * config.kv_lora_rank;
}

const float* Checkpoint::w_uv(std::int64_t layer, std::int64_t head) const noexcept {
  return w_uk(layer, head) + config.qk_nope_head_dim * config.kv_lora_rank;
}

std::int64_t Checkpoint::num_parameters() const noexcept {
  std::int64_t total = count(embedding) + count(final_norm) + count(lm_head);
  for (const LayerWeights& layer : layers) {
    for (const std::vector<float>* weights :
         {&layer.input_norm, &layer.post_attn_norm, &layer.q_a, &layer.q_a_norm, &layer.q_proj,
          &layer.kv_a, &layer.kv_a_norm, &layer.kv_b, &layer.o_proj, &layer.gate, &layer.up,
          &layer.down}) {
      total += count(*weights);
    }
  }
  return total;
}

double cache_bound(const Checkpoint& checkpoint, std::int64_t layer) {
  const ModelConfig& config = checkpoint.config;
  const LayerWeights& weights = checkpoint.layers[static_cast<std::size_t>(layer)];
  double latent = 0.0;
  for (const float weight : weights.kv_a_norm) latent = std::max(latent, std::fabs(double{weight}));
  latent *= std::sqrt(static_cast<double>(config.kv_lora_rank));

  double rope = 0.0;
  const std::int64_t half = config.qk_rope_head_dim / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    const std::int64_t first = config.rope_interleave ? 2 * i : i;
    const std::int64_t second = config.rope_interleave ? 2 * i + 1 : i + half;
    double pair = 0.0;
    for (const std::int64_t element : {first, second}) {
      const std::int64_t row = config.kv_lora_rank + element;
      pair += squared_norm(weights.kv_a.data() + row * config.hidden_size, weights.input_norm);
    }
    rope = std::max(rope, pair);
  }
  rope =
      std::sqrt(rope * static_cast<double>(config.hidden_size)) * Rope(config).attention_factor();
  return std::max(latent, rope);
}

Result<Checkpoint> parse_checkpoint(std::string_view config_json,
                                    std::span<const std::byte> weights) {
  return guarded([&]() -> Result<Checkpoint> {
    Result<ModelConfig> config = parse_config(config_json);
    if (!config.ok()) return config.status();
    const Result<WeightFiles> files = WeightFiles::parse(weights);
    if (!files.ok()) return files.status();
    return load(*std::move(config), *files);
  });
}

Result<Checkpoint> load_checkpoint(const std::filesystem::path& directory) {
  return guarded([&]() -> Result<Checkpoint> {
    const Result<io::MappedFile> file =
        io::MappedFile::open(kOperation, (directory / "config.json").string());
    if (!file.ok()) return file.status();
    const std::span<const std::byte> bytes = file->bytes();
    Result<ModelConfig> config =
        parse_config({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    if (!config.ok()) return config.status();
    const Result<WeightFiles> files = WeightFiles::open(directory);
    if (!files.ok()) return files.status();
    return load(*std::move(config), *files);
  });
}

}  // namespace mla::model
