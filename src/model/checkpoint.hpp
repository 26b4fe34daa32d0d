// Checkpoint: the weights of a model in f32, with every shape checked against its config.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "mla/status.hpp"
#include "model/config.hpp"

namespace mla::model {

/// One decoder layer. Projections are [out, in], row-major, as the checkpoint stores them.
struct LayerWeights {
  std::vector<float> input_norm;      ///< [hidden]
  std::vector<float> post_attn_norm;  ///< [hidden]
  std::vector<float> q_a;             ///< [q_lora_rank, hidden]; empty without query compression
  std::vector<float> q_a_norm;        ///< [q_lora_rank]; empty without query compression
  std::vector<float> q_proj;     ///< [H * (nope + R), q_lora_rank or hidden] (q_b_proj or q_proj)
  std::vector<float> kv_a;       ///< [L + R, hidden]
  std::vector<float> kv_a_norm;  ///< [L]
  std::vector<float> kv_b;       ///< [H * (nope + v), L]; a head's rows are W_UK, then W_UV
  std::vector<float> o_proj;     ///< [hidden, H * v]
  std::vector<float> gate, up;   ///< [intermediate, hidden]
  std::vector<float> down;       ///< [hidden, intermediate]
};

struct Checkpoint {
  ModelConfig config;
  std::vector<float> embedding;   ///< [vocab, hidden]
  std::vector<float> final_norm;  ///< [hidden]
  std::vector<float> lm_head;     ///< [vocab, hidden]; empty when tied to the embedding
  std::vector<LayerWeights> layers;

  const std::vector<float>& output_head() const noexcept {
    return config.tie_word_embeddings ? embedding : lm_head;
  }
  /// [nope, L] of one head. Absorbed decoding multiplies q_nope by it and so scores the latent
  /// itself.
  const float* w_uk(std::int64_t layer, std::int64_t head) const noexcept;
  /// [v, L] of one head, applied to the attention output over the latent.
  const float* w_uv(std::int64_t layer, std::int64_t head) const noexcept;

  std::int64_t num_parameters() const noexcept;
};

/// A bound on |x| of everything layer `layer` can put into the cache, from the weights alone: a
/// normalised vector of n elements has length at most sqrt(n), so a latent element is at most
/// sqrt(L) * |weight| and a rotary pair at most sqrt(hidden) * |its two rows|. No input exceeds it.
double cache_bound(const Checkpoint& checkpoint, std::int64_t layer);

/// Reads DIR/config.json and DIR/model.safetensors, or the shards that
/// DIR/model.safetensors.index.json names. Weights may be f32, f16 or bf16. kIo: a file cannot be
/// read. kInvalidArgument: a file is malformed, or a tensor is missing or has another shape.
/// kUnsupported: see parse_config, or another weight type.
Result<Checkpoint> load_checkpoint(const std::filesystem::path& directory);

/// The same from memory: the text of config.json and the bytes of one safetensors file. Any input
/// is answered with a Checkpoint or a Status.
Result<Checkpoint> parse_checkpoint(std::string_view config_json,
                                    std::span<const std::byte> weights);

}  // namespace mla::model
