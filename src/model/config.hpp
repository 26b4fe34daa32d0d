// ModelConfig: the part of a Hugging Face config.json that a DeepSeek V2/V3 forward pass needs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mla/status.hpp"

namespace mla::model {

/// YaRN context extension, as `rope_scaling` or `rope_parameters` gives it.
struct YarnConfig {
  bool enabled = false;
  double factor = 1.0;
  std::int64_t original_max_position_embeddings = 0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double mscale = 0.0;            ///< 0: not given
  double mscale_all_dim = 0.0;    ///< 0: not given
  double attention_factor = 0.0;  ///< 0: derived from the factor and the two mscales
  bool truncate = true;           ///< round the correction range to whole dimensions
};

/// A dense-MLP DeepseekV2ForCausalLM or DeepseekV3ForCausalLM.
struct ModelConfig {
  std::string architecture;
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_layers = 0;
  std::int64_t num_heads = 0;
  std::int64_t q_lora_rank = 0;  ///< 0: the query is projected in one step
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_head_dim = 0;
  std::int64_t qk_rope_head_dim = 0;
  std::int64_t v_head_dim = 0;
  std::int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  bool rope_interleave = true;  ///< rotated pairs are neighbours (2i, 2i+1), else (i, i + R/2)
  bool tie_word_embeddings = false;
  std::vector<std::int32_t> eos_token_ids;
  YarnConfig yarn;

  std::int64_t qk_head_dim() const noexcept { return qk_nope_head_dim + qk_rope_head_dim; }
  std::int64_t latent_dim() const noexcept { return kv_lora_rank + qk_rope_head_dim; }
};

/// The epsilon of kv_a_layernorm and q_a_layernorm, which transformers builds without the config's.
inline constexpr double kLatentNormEps = 1e-6;

/// Parses and validates. kInvalidArgument: not JSON, or an entry is missing, of the wrong type or
/// out of range. kUnsupported, naming the entry: another architecture, MoE layers, biases,
/// quantised weights, another activation, another kind of rope.
Result<ModelConfig> parse_config(std::string_view json);

}  // namespace mla::model
