// A tiny random checkpoint, and a forward pass of it in plain double loops: no absorption, no
// cache, no library. The oracle of the model tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace mla::test {

struct SyntheticModel {
  // Dimensions are all different, so that a mixed-up one shows.
  std::int64_t vocab = 64;
  std::int64_t hidden = 48;
  std::int64_t intermediate = 80;
  std::int64_t layers = 2;
  std::int64_t heads = 3;
  std::int64_t q_lora_rank = 24;  // 0: none
  std::int64_t kv_lora_rank = 32;
  std::int64_t nope = 20;
  std::int64_t rope = 16;
  std::int64_t value_dim = 12;
  std::int64_t max_positions = 256;
  double theta = 10000.0;
  bool interleave = true;
  bool tied = false;
  bool yarn = false;
  double yarn_factor = 4.0;
  std::int64_t yarn_original = 64;
  double mscale = 1.0;
  double mscale_all_dim = 0.7;

  /// What a converter would write as config.json.
  std::string config_json() const;

  struct Weight {
    std::vector<std::int64_t> shape;
    std::vector<float> values;
  };
  /// Every tensor of the checkpoint, random, by its Hugging Face name.
  std::map<std::string, Weight> make_weights(std::uint64_t seed) const;

  /// logits [tokens, vocab] of a text.
  std::vector<double> forward(const std::map<std::string, Weight>& weights,
                              const std::vector<std::int32_t>& tokens) const;

  /// Angle of one position for each of rope/2 pairs, and the factor of cosine and sine.
  std::vector<double> inv_freq() const;
  double rope_factor() const;
  double scale() const;
};

/// A safetensors file of these tensors, as F32.
std::vector<std::byte> to_safetensors(const std::map<std::string, SyntheticModel::Weight>& weights);

}  // namespace mla::test
