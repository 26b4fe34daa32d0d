#include "support/synthetic_model.hpp"

#include <cmath>
#include <cstring>
#include <random>
#include <sstream>

namespace mla::test {
namespace {

using Row = std::vector<double>;
using Weights = std::map<std::string, SyntheticModel::Weight>;

constexpr double kEps = 1e-6;
constexpr double kPi = 3.14159265358979323846;

Row multiply(const SyntheticModel::Weight& weight, const Row& x) {
  const auto rows = static_cast<std::size_t>(weight.shape[0]);
  Row y(rows, 0.0);
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < x.size(); ++j) y[i] += weight.values[i * x.size() + j] * x[j];
  }
  return y;
}

Row norm(const SyntheticModel::Weight& weight, const Row& x) {
  double sum = 0.0;
  for (const double value : x) sum += value * value;
  const double inverse = 1.0 / std::sqrt(sum / static_cast<double>(x.size()) + kEps);
  Row y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = weight.values[i] * x[i] * inverse;
  return y;
}

double mscale_of(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

/// transformers' way: even elements to the front (interleaved models), then x*cos +
/// rotate_half(x)*sin.
Row rotate(const SyntheticModel& model, const Row& x, std::size_t position) {
  const std::size_t half = x.size() / 2;
  Row moved = x;
  if (model.interleave) {
    for (std::size_t i = 0; i < half; ++i) {
      moved[i] = x[2 * i];
      moved[half + i] = x[2 * i + 1];
    }
  }
  const Row frequencies = model.inv_freq();
  Row y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double angle = static_cast<double>(position) * frequencies[i % half];
    const double partner = i < half ? -moved[half + i] : moved[i - half];
    y[i] = model.rope_factor() * (moved[i] * std::cos(angle) + partner * std::sin(angle));
  }
  return y;
}

Row part(const Row& x, std::int64_t first, std::int64_t count) {
  return {x.begin() + first, x.begin() + first + count};
}

/// Attention of all tokens of a layer, before o_proj.
std::vector<Row> attend(const SyntheticModel& model, const Weights& weights,
                        const std::string& prefix, const std::vector<Row>& inputs) {
  const std::size_t count = inputs.size();
  std::vector<Row> q(count), kv(count), k_pe(count), out(count);
  for (std::size_t t = 0; t < count; ++t) {
    if (model.q_lora_rank > 0) {
      const Row low = multiply(weights.at(prefix + "q_a_proj.weight"), inputs[t]);
      q[t] = multiply(weights.at(prefix + "q_b_proj.weight"),
                      norm(weights.at(prefix + "q_a_layernorm.weight"), low));
    } else {
      q[t] = multiply(weights.at(prefix + "q_proj.weight"), inputs[t]);
    }
    const Row compressed = multiply(weights.at(prefix + "kv_a_proj_with_mqa.weight"), inputs[t]);
    kv[t] = multiply(weights.at(prefix + "kv_b_proj.weight"),
                     norm(weights.at(prefix + "kv_a_layernorm.weight"),
                          part(compressed, 0, model.kv_lora_rank)));
    k_pe[t] = rotate(model, part(compressed, model.kv_lora_rank, model.rope), t);
  }
  const std::int64_t kv_rows = model.nope + model.value_dim;
  for (std::size_t t = 0; t < count; ++t) {
    for (std::int64_t head = 0; head < model.heads; ++head) {
      const Row q_head = part(q[t], head * (model.nope + model.rope), model.nope + model.rope);
      const Row q_pe = rotate(model, part(q_head, model.nope, model.rope), t);
      Row weight(t + 1);
      double sum = 0.0;
      for (std::size_t s = 0; s <= t; ++s) {
        double score = 0.0;
        for (std::int64_t d = 0; d < model.nope; ++d) {
          score += q_head[static_cast<std::size_t>(d)] *
                   kv[s][static_cast<std::size_t>(head * kv_rows + d)];
        }
        for (std::size_t d = 0; d < q_pe.size(); ++d) score += q_pe[d] * k_pe[s][d];
        weight[s] = std::exp(model.scale() * score);
        sum += weight[s];
      }
      for (std::int64_t d = 0; d < model.value_dim; ++d) {
        double value = 0.0;
        for (std::size_t s = 0; s <= t; ++s) {
          value += weight[s] * kv[s][static_cast<std::size_t>(head * kv_rows + model.nope + d)];
        }
        out[t].push_back(value / sum);
      }
    }
  }
  return out;
}

void add(Row& x, const Row& y) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

}  // namespace

std::string SyntheticModel::config_json() const {
  std::ostringstream json;
  json << "{\"architectures\":[\"DeepseekV3ForCausalLM\"],\"vocab_size\":" << vocab
       << ",\"hidden_size\":" << hidden << ",\"intermediate_size\":" << intermediate
       << ",\"num_hidden_layers\":" << layers << ",\"num_attention_heads\":" << heads
       << ",\"q_lora_rank\":" << (q_lora_rank > 0 ? std::to_string(q_lora_rank) : "null")
       << ",\"kv_lora_rank\":" << kv_lora_rank << ",\"qk_nope_head_dim\":" << nope
       << ",\"qk_rope_head_dim\":" << rope << ",\"v_head_dim\":" << value_dim
       << ",\"max_position_embeddings\":" << max_positions << ",\"rms_norm_eps\":1e-06"
       << ",\"hidden_act\":\"silu\",\"n_routed_experts\":8,\"first_k_dense_replace\":" << layers
       << ",\"rope_theta\":" << theta << ",\"rope_interleave\":" << (interleave ? "true" : "false")
       << ",\"tie_word_embeddings\":" << (tied ? "true" : "false");
  if (yarn) {
    json << ",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":" << yarn_factor
         << ",\"original_max_position_embeddings\":" << yarn_original
         << ",\"beta_fast\":32,\"beta_slow\":1,\"mscale\":" << mscale
         << ",\"mscale_all_dim\":" << mscale_all_dim << "}";
  }
  json << "}";
  return json.str();
}

std::map<std::string, SyntheticModel::Weight> SyntheticModel::make_weights(
    std::uint64_t seed) const {
  std::mt19937_64 random(seed);
  Weights weights;
  const auto uniform = [&] { return static_cast<double>(random() >> 11) * 0x1.0p-52 - 1.0; };
  const auto matrix = [&](const std::string& name, std::int64_t rows, std::int64_t columns) {
    Weight& weight = weights[name];
    weight.shape = {rows, columns};
    const double size = 2.0 / std::sqrt(static_cast<double>(columns));
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      weight.values.push_back(static_cast<float>(uniform() * size));
    }
  };
  const auto vector = [&](const std::string& name, std::int64_t count) {
    Weight& weight = weights[name];
    weight.shape = {count};
    for (std::int64_t i = 0; i < count; ++i) {
      weight.values.push_back(static_cast<float>(1.0 + 0.5 * uniform()));
    }
  };
  matrix("model.embed_tokens.weight", vocab, hidden);
  vector("model.norm.weight", hidden);
  if (!tied) matrix("lm_head.weight", vocab, hidden);
  for (std::int64_t i = 0; i < layers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    const std::string attn = prefix + "self_attn.";
    vector(prefix + "input_layernorm.weight", hidden);
    vector(prefix + "post_attention_layernorm.weight", hidden);
    if (q_lora_rank > 0) {
      matrix(attn + "q_a_proj.weight", q_lora_rank, hidden);
      vector(attn + "q_a_layernorm.weight", q_lora_rank);
      matrix(attn + "q_b_proj.weight", heads * (nope + rope), q_lora_rank);
    } else {
      matrix(attn + "q_proj.weight", heads * (nope + rope), hidden);
    }
    matrix(attn + "kv_a_proj_with_mqa.weight", kv_lora_rank + rope, hidden);
    vector(attn + "kv_a_layernorm.weight", kv_lora_rank);
    matrix(attn + "kv_b_proj.weight", heads * (nope + value_dim), kv_lora_rank);
    matrix(attn + "o_proj.weight", hidden, heads * value_dim);
    matrix(prefix + "mlp.gate_proj.weight", intermediate, hidden);
    matrix(prefix + "mlp.up_proj.weight", intermediate, hidden);
    matrix(prefix + "mlp.down_proj.weight", hidden, intermediate);
  }
  return weights;
}

std::vector<double> SyntheticModel::inv_freq() const {
  const double dim = static_cast<double>(rope);
  // The pair number, not rounded, whose wave turns `turns` times within the original context.
  const auto pair_of = [&](double turns) {
    return dim * std::log(static_cast<double>(yarn_original) / (turns * 2.0 * kPi)) /
           (2.0 * std::log(theta));
  };
  const double low = std::max(std::floor(pair_of(32.0)), 0.0);
  double high = std::min(std::ceil(pair_of(1.0)), dim - 1.0);
  if (low == high) high += 0.001;
  std::vector<double> frequencies;
  for (std::int64_t i = 0; i < rope / 2; ++i) {
    const double plain = 1.0 / std::pow(theta, 2.0 * static_cast<double>(i) / dim);
    if (!yarn) {
      frequencies.push_back(plain);
      continue;
    }
    double ramp = (static_cast<double>(i) - low) / (high - low);
    ramp = ramp < 0.0 ? 0.0 : (ramp > 1.0 ? 1.0 : ramp);
    const double kept = 1.0 - ramp;
    frequencies.push_back(plain / yarn_factor * (1.0 - kept) + plain * kept);
  }
  return frequencies;
}

double SyntheticModel::rope_factor() const {
  if (!yarn) return 1.0;
  return mscale_of(yarn_factor, mscale) / mscale_of(yarn_factor, mscale_all_dim);
}

double SyntheticModel::scale() const {
  const double plain = 1.0 / std::sqrt(static_cast<double>(nope + rope));
  const double factor = yarn ? mscale_of(yarn_factor, mscale_all_dim) : 1.0;
  return plain * factor * factor;
}

std::vector<double> SyntheticModel::forward(const Weights& weights,
                                            const std::vector<std::int32_t>& tokens) const {
  std::vector<Row> x;
  const Weight& embedding = weights.at("model.embed_tokens.weight");
  for (const std::int32_t token : tokens) {
    const auto first = embedding.values.begin() + token * hidden;
    x.emplace_back(first, first + hidden);
  }
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    std::vector<Row> inputs;
    for (const Row& row : x)
      inputs.push_back(norm(weights.at(prefix + "input_layernorm.weight"), row));
    const std::vector<Row> heads_out = attend(*this, weights, prefix + "self_attn.", inputs);
    for (std::size_t t = 0; t < x.size(); ++t) {
      add(x[t], multiply(weights.at(prefix + "self_attn.o_proj.weight"), heads_out[t]));
      const Row input = norm(weights.at(prefix + "post_attention_layernorm.weight"), x[t]);
      Row gate = multiply(weights.at(prefix + "mlp.gate_proj.weight"), input);
      const Row up = multiply(weights.at(prefix + "mlp.up_proj.weight"), input);
      for (std::size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1.0 + std::exp(-gate[i]));
      add(x[t], multiply(weights.at(prefix + "mlp.down_proj.weight"), gate));
    }
  }
  std::vector<double> logits;
  for (const Row& row : x) {
    const Row out = multiply(weights.at(tied ? "model.embed_tokens.weight" : "lm_head.weight"),
                             norm(weights.at("model.norm.weight"), row));
    logits.insert(logits.end(), out.begin(), out.end());
  }
  return logits;
}

std::vector<std::byte> to_safetensors(
    const std::map<std::string, SyntheticModel::Weight>& weights) {
  std::ostringstream header;
  std::size_t offset = 0;
  for (const auto& [name, weight] : weights) {
    header << (offset == 0 ? "{" : ",") << "\"" << name << "\":{\"dtype\":\"F32\",\"shape\":[";
    for (std::size_t axis = 0; axis < weight.shape.size(); ++axis) {
      header << (axis > 0 ? "," : "") << weight.shape[axis];
    }
    const std::size_t end = offset + weight.values.size() * sizeof(float);
    header << "],\"data_offsets\":[" << offset << "," << end << "]}";
    offset = end;
  }
  header << "}";
  std::string json = header.str();
  json.resize((json.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = json.size();
  std::vector<std::byte> bytes(sizeof(length) + json.size() + offset);
  std::memcpy(bytes.data(), &length, sizeof(length));
  std::memcpy(bytes.data() + sizeof(length), json.data(), json.size());
  std::byte* to = bytes.data() + sizeof(length) + json.size();
  for (const auto& [name, weight] : weights) {
    std::memcpy(to, weight.values.data(), weight.values.size() * sizeof(float));
    to += weight.values.size() * sizeof(float);
  }
  return bytes;
}

}  // namespace mla::test
