#include "model/config.hpp"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/diagnostics.hpp"

namespace mla::model {
namespace {

using Json = nlohmann::json;

constexpr const char* kOperation = "config.json";
// No dimension of a real model comes near; products of three stay inside 64 bits.
constexpr std::int64_t kMaxDim = std::int64_t{1} << 20;
constexpr std::int64_t kMaxLayers = 1024;
constexpr std::int64_t kMaxPositions = std::int64_t{1} << 30;

Status unsupported(const std::string& argument, const std::string& found,
                   const std::string& needed) {
  return {StatusCode::kUnsupported,
          text(kOperation, ": ", argument, ": found ", found, ", needed ", needed)};
}

/// An entry as JSON text, short enough for a message.
std::string shown(const Json& value) {
  constexpr std::size_t kMaxShown = 60;
  // dump() recurses: hostile nesting would overflow the stack, so only one level is printed.
  if (value.is_structured()) {
    for (const Json& entry : value) {
      if (entry.is_structured()) return value.is_array() ? "a nested array" : "a nested object";
    }
  }
  std::string json = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (json.size() > kMaxShown) json = json.substr(0, kMaxShown) + "...";
  return json;
}

/// Reads entries of one object and keeps the first error.
class Reader {
 public:
  explicit Reader(const Json& object, std::string prefix = "")
      : object_(object), prefix_(std::move(prefix)) {}

  const Status& status() const { return status_; }

  /// The entry, or null when it is absent or JSON null.
  const Json* find(const char* key) const {
    const auto entry = object_.find(key);
    return entry == object_.end() || entry->is_null() ? nullptr : &*entry;
  }

  void integer(const char* key, std::int64_t low, std::int64_t high, std::int64_t& out,
               bool required = true) {
    const Json* entry = present(key, required, "an integer");
    if (entry == nullptr) return;
    const bool fits = entry->is_number_unsigned() ? entry->get<std::uint64_t>() <= kInt64Max
                                                  : entry->is_number_integer();
    const std::int64_t value = fits ? entry->get<std::int64_t>() : 0;
    if (!fits || value < low || value > high) {
      refuse(key, shown(*entry), text("an integer in [", low, ", ", high, "]"));
      return;
    }
    out = value;
  }

  void number(const char* key, double low, double high, double& out, bool required = false) {
    const Json* entry = present(key, required, "a number");
    if (entry == nullptr) return;
    const double value = entry->is_number() ? entry->get<double>() : std::nan("");
    if (!(value >= low && value <= high)) {
      refuse(key, shown(*entry), text("a number in [", low, ", ", high, "]"));
      return;
    }
    out = value;
  }

  void boolean(const char* key, bool& out) {
    const Json* entry = find(key);
    if (entry == nullptr) return;
    if (entry->is_boolean()) {
      out = entry->get<bool>();
    } else {
      refuse(key, shown(*entry), "true or false");
    }
  }

  void refuse(const std::string& key, const std::string& found, const std::string& needed) {
    if (status_.ok()) status_ = bad_argument(kOperation, prefix_ + key, found, needed);
  }

 private:
  static constexpr std::uint64_t kInt64Max =
      static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

  const Json* present(const char* key, bool required, const char* needed) {
    const Json* entry = find(key);
    if (entry == nullptr && required) refuse(key, "nothing", needed);
    return entry;
  }

  const Json& object_;
  std::string prefix_;
  Status status_;
};

Status read_architecture(const Json& root, ModelConfig& config) {
  const auto entry = root.find("architectures");
  if (entry == root.end() || !entry->is_array() || entry->size() != 1 ||
      !entry->front().is_string()) {
    return bad_argument(kOperation, "architectures",
                        entry == root.end() ? "nothing" : shown(*entry),
                        "a list of one architecture name");
  }
  config.architecture = entry->front().get<std::string>();
  if (config.architecture != "DeepseekV2ForCausalLM" &&
      config.architecture != "DeepseekV3ForCausalLM") {
    return unsupported("architectures", shown(entry->front()),
                       "DeepseekV2ForCausalLM or DeepseekV3ForCausalLM");
  }
  return {};
}

void read_dimensions(Reader& reader, ModelConfig& config) {
  reader.integer("vocab_size", 1, kMaxDim, config.vocab_size);
  reader.integer("hidden_size", 1, kMaxDim, config.hidden_size);
  reader.integer("intermediate_size", 1, kMaxDim, config.intermediate_size);
  reader.integer("num_hidden_layers", 1, kMaxLayers, config.num_layers);
  reader.integer("num_attention_heads", 1, kMaxDim, config.num_heads);
  reader.integer("q_lora_rank", 1, kMaxDim, config.q_lora_rank, false);
  reader.integer("kv_lora_rank", 1, kMaxDim, config.kv_lora_rank);
  reader.integer("qk_nope_head_dim", 1, kMaxDim, config.qk_nope_head_dim);
  reader.integer("qk_rope_head_dim", 2, kMaxDim, config.qk_rope_head_dim);
  reader.integer("v_head_dim", 1, kMaxDim, config.v_head_dim);
  reader.integer("max_position_embeddings", 1, kMaxPositions, config.max_position_embeddings);
  reader.number("rms_norm_eps", 0.0, 1.0, config.rms_norm_eps);
  reader.boolean("tie_word_embeddings", config.tie_word_embeddings);
  reader.boolean("rope_interleave", config.rope_interleave);
  if (config.architecture == "DeepseekV2ForCausalLM")
    config.rope_interleave = true;  // has no choice
  if (config.qk_rope_head_dim % 2 != 0) {
    reader.refuse("qk_rope_head_dim", std::to_string(config.qk_rope_head_dim), "an even number");
  }
  // The widest projections must be addressable by 32-bit BLAS dimensions.
  const std::int64_t head_rows = config.qk_head_dim() + config.v_head_dim + config.kv_lora_rank;
  if (config.num_heads * head_rows > std::numeric_limits<std::int32_t>::max()) {
    reader.refuse("num_attention_heads", std::to_string(config.num_heads),
                  "heads times head dimensions below 2^31");
  }
}

Status read_eos(Reader& reader, ModelConfig& config) {
  const Json* entry = reader.find("eos_token_id");
  if (entry == nullptr) return {};
  const std::size_t count = entry->is_array() ? entry->size() : 1;
  for (std::size_t i = 0; i < count; ++i) {
    const Json& token = entry->is_array() ? (*entry)[i] : *entry;
    if (!token.is_number_unsigned() || token.get<std::uint64_t>() >= std::uint64_t{kMaxDim}) {
      return bad_argument(kOperation, "eos_token_id", shown(*entry), "token ids");
    }
    config.eos_token_ids.push_back(token.get<std::int32_t>());
  }
  return {};
}

/// The layers transformers would build with an MLP instead of experts.
std::int64_t count_dense_layers(const Json& root, Reader& reader, const ModelConfig& config) {
  const auto routed = root.find("n_routed_experts");
  const bool mentions_experts = routed != root.end();
  const bool has_no_experts = mentions_experts && (routed->is_null() || *routed == 0);
  if (has_no_experts) return config.num_layers;
  std::int64_t dense_layers = config.num_layers;
  if (mentions_experts) {
    dense_layers = config.architecture == "DeepseekV2ForCausalLM" ? 0 : 3;  // the classes' defaults
  }
  reader.integer("first_k_dense_replace", 0, kMaxPositions, dense_layers, false);
  return dense_layers;
}

/// Everything that would make the dense, unbiased, unquantised forward pass wrong.
Status refuse_other_models(const Json& root, Reader& reader, const ModelConfig& config) {
  const std::int64_t dense_layers = count_dense_layers(root, reader, config);
  if (dense_layers < config.num_layers) {
    return unsupported("first_k_dense_replace", std::to_string(dense_layers),
                       text(config.num_layers, ", the layer count (MoE layers are not served)"));
  }
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    bool bias = false;
    reader.boolean(key, bias);
    if (bias) return unsupported(key, "true", "false");
  }
  if (const Json* act = reader.find("hidden_act"); act != nullptr && *act != "silu") {
    return unsupported("hidden_act", shown(*act), "\"silu\"");
  }
  if (const Json* quantized = reader.find("quantization_config"); quantized != nullptr) {
    return unsupported("quantization_config", shown(*quantized), "unquantised weights");
  }
  return reader.status();
}

Status read_yarn(const Json& object, const std::string& prefix, YarnConfig& yarn) {
  constexpr double kHuge = 1e9;
  Reader reader(object, prefix);
  yarn.enabled = true;
  reader.number("factor", 1.0, kHuge, yarn.factor, true);
  reader.integer("original_max_position_embeddings", 1, kMaxPositions,
                 yarn.original_max_position_embeddings);
  reader.number("beta_fast", 1e-6, kHuge, yarn.beta_fast);
  reader.number("beta_slow", 1e-6, kHuge, yarn.beta_slow);
  reader.number("mscale", 0.0, kHuge, yarn.mscale);
  reader.number("mscale_all_dim", 0.0, kHuge, yarn.mscale_all_dim);
  reader.number("attention_factor", 0.0, kHuge, yarn.attention_factor);
  reader.boolean("truncate", yarn.truncate);
  return reader.status();
}

/// transformers 5 writes `rope_parameters` with the theta inside, earlier versions `rope_scaling`
/// (absent or null without scaling) beside a top-level `rope_theta`.
Status read_rope(Reader& reader, ModelConfig& config) {
  constexpr double kMaxTheta = 1e15;
  reader.number("rope_theta", 1.0, kMaxTheta, config.rope_theta);
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    const Json* object = reader.find(name);
    if (object == nullptr) continue;
    if (!object->is_object()) return bad_argument(kOperation, name, shown(*object), "an object");
    Reader rope(*object, text(name, "."));
    rope.number("rope_theta", 1.0, kMaxTheta, config.rope_theta);
    MLA_RETURN_IF_ERROR(rope.status());
    const Json* type = rope.find("rope_type");
    if (type == nullptr) type = rope.find("type");
    if (type == nullptr || *type == "default") continue;
    if (*type != "yarn") {
      return unsupported(text(name, ".rope_type"), shown(*type), "\"default\" or \"yarn\"");
    }
    MLA_RETURN_IF_ERROR(read_yarn(*object, text(name, "."), config.yarn));
    break;
  }
  if (config.rope_theta <= 1.0) {
    reader.refuse("rope_theta", text(config.rope_theta), "more than 1");
  }
  return reader.status();
}

}  // namespace

Result<ModelConfig> parse_config(std::string_view json) {
  const Json root = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) {
    return bad_argument(kOperation, "text", root.is_discarded() ? "no valid JSON" : "another value",
                        "a JSON object");
  }
  ModelConfig config;
  MLA_RETURN_IF_ERROR(read_architecture(root, config));
  Reader reader(root);
  read_dimensions(reader, config);
  MLA_RETURN_IF_ERROR(reader.status());
  MLA_RETURN_IF_ERROR(refuse_other_models(root, reader, config));
  MLA_RETURN_IF_ERROR(read_rope(reader, config));
  MLA_RETURN_IF_ERROR(read_eos(reader, config));
  return config;
}

}  // namespace mla::model
