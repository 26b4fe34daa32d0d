#include "model/transformer.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "core/diagnostics.hpp"
#include "core/numeric.hpp"

namespace mla::model {
namespace {

std::size_t elements(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
}

/// out = weight * x / sqrt(mean(x^2) + eps), row by row. In place is fine.
void rms_norm(const float* x, std::int64_t x_stride, const std::vector<float>& weight, double eps,
              float* out, std::int64_t out_stride, std::int64_t rows) {
  const std::size_t n = weight.size();
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * x_stride;
    double sum = 0.0;
    for (std::size_t i = 0; i < n; ++i) sum += static_cast<double>(in[i]) * in[i];
    const float inverse = static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(n) + eps));
    for (std::size_t i = 0; i < n; ++i)
      out[row * out_stride + static_cast<std::int64_t>(i)] = in[i] * inverse * weight[i];
  }
}

void add(std::vector<float>& x, const std::vector<float>& y) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

void round_to(DType dtype, const float* from, std::int64_t count, std::uint16_t* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] =
        dtype == DType::kBF16 ? numeric::float_to_bf16(from[i]) : numeric::float_to_f16(from[i]);
  }
}

/// f16 queries for an f16 cache keep its precision; bf16 serves the others.
DType query_dtype(KvFormat format) {
  return format == KvFormat::kF16 ? DType::kF16 : DType::kBF16;
}

}  // namespace

Transformer::Transformer(const Checkpoint& checkpoint, const PlanOptions& options, int gemm_threads,
                         const RankGroup& group)
    : checkpoint_(checkpoint),
      config_(checkpoint.config),
      rope_(checkpoint.config),
      is_sharded_(group.ranks != nullptr),
      plans_(options, group),
      gemm_(gemm_threads) {}

AttentionStats Transformer::attention_stats() const noexcept {
  AttentionStats stats = stats_;
  stats.plans = plans_.num_plans_made();
  return stats;
}

Status Transformer::forward(const StepBatch& batch, PagedCache& cache, std::vector<float>& logits,
                            const AttentionHook& hook) {
  rows_ = padded_rows(batch.num_tokens());
  const Result<const PlanCache::Entry*> entry = plans_.get(decode_problem(batch, cache));
  if (!entry.ok()) return entry.status();
  backend_name_ = (*entry)->plan.backend_name();
  embed(batch);
  for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
    MLA_RETURN_IF_ERROR(attention(layer, batch, cache, **entry, hook));
    mlp(checkpoint_.layers[static_cast<std::size_t>(layer)]);
  }
  head(batch, logits);
  return {};
}

DecodeProblem Transformer::decode_problem(const StepBatch& batch, const PagedCache& cache) const {
  DecodeProblem problem;
  problem.num_requests = batch.num_requests();
  problem.num_tokens = rows_;
  problem.num_heads = config_.num_heads;
  problem.kv_lora_rank = config_.kv_lora_rank;
  problem.qk_rope_head_dim = config_.qk_rope_head_dim;
  problem.page_size = cache.shape().page_size;
  problem.kv_format = cache.shape().format;
  problem.q_dtype = query_dtype(problem.kv_format);
  problem.out_dtype = DType::kF32;
  problem.causal = true;
  problem.max_seq_len = *std::max_element(batch.global_lens.begin(), batch.global_lens.end());
  problem.max_query_len = 0;
  for (std::size_t b = 0; b < batch.seq_lens.size(); ++b) {
    const std::int64_t length = batch.query_start_loc[b + 1] - batch.query_start_loc[b];
    problem.max_query_len = std::max(problem.max_query_len, length);
  }
  return problem;
}

void Transformer::embed(const StepBatch& batch) {
  const std::int64_t hidden = config_.hidden_size;
  x_.assign(elements(rows_, hidden), 0.0F);
  cos_sin_.assign(elements(rows_, config_.qk_rope_head_dim), 0.0F);
  for (std::int64_t row = 0; row < batch.num_tokens(); ++row) {
    const auto i = static_cast<std::size_t>(row);
    const float* embedding = checkpoint_.embedding.data() + batch.tokens[i] * hidden;
    std::copy_n(embedding, hidden, x_.data() + row * hidden);
    rope_.angles(batch.positions[i], cos_sin_.data() + row * config_.qk_rope_head_dim);
  }
}

Status Transformer::attention(std::int64_t layer, const StepBatch& batch, PagedCache& cache,
                              const PlanCache::Entry& entry, const AttentionHook& hook) {
  const LayerWeights& weights = checkpoint_.layers[static_cast<std::size_t>(layer)];
  const DecodeProblem& problem = entry.plan.problem();
  normed_.resize(x_.size());
  rms_norm(x_.data(), config_.hidden_size, weights.input_norm, config_.rms_norm_eps, normed_.data(),
           config_.hidden_size, rows_);
  project_query(weights);
  absorb_query(layer, batch.num_tokens(), problem.q_dtype);
  append_latents(layer, batch, cache);

  latent_out_.resize(elements(rows_, config_.num_heads * config_.kv_lora_rank));
  const DecodeTensors tensors = decode_tensors(layer, batch, cache, problem.q_dtype);
  const auto start = std::chrono::steady_clock::now();
  MLA_RETURN_IF_ERROR(entry.run(tensors));
  stats_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ++stats_.runs;
  if (hook) hook(layer, problem, tensors);

  project_output(layer);
  return {};
}

void Transformer::project_query(const LayerWeights& weights) {
  const std::int64_t hidden = config_.hidden_size;
  const std::int64_t rank = config_.q_lora_rank;
  const std::int64_t width = config_.num_heads * config_.qk_head_dim();
  q_.resize(elements(rows_, width));
  ConstMatrix input{normed_.data(), hidden};
  std::int64_t depth = hidden;
  if (rank > 0) {
    q_latent_.resize(elements(rows_, rank));
    gemm_.multiply_transposed(input, {weights.q_a.data(), hidden}, {q_latent_.data(), rank}, rows_,
                              rank, hidden);
    rms_norm(q_latent_.data(), rank, weights.q_a_norm, kLatentNormEps, q_latent_.data(), rank,
             rows_);
    input = {q_latent_.data(), rank};
    depth = rank;
  }
  gemm_.multiply_transposed(input, {weights.q_proj.data(), depth}, {q_.data(), width}, rows_, width,
                            depth);
}

/// q16 [rows, H, L + R] = (q_nope W_UK | rotated q_pe): the query in the space of the cached
/// latent.
void Transformer::absorb_query(std::int64_t layer, std::int64_t num_tokens, DType dtype) {
  const std::int64_t nope = config_.qk_nope_head_dim;
  const std::int64_t rope = config_.qk_rope_head_dim;
  const std::int64_t rank = config_.kv_lora_rank;
  const std::int64_t q_stride = config_.num_heads * config_.qk_head_dim();
  const std::int64_t latent_dim = config_.latent_dim();
  q16_.assign(elements(rows_, config_.num_heads * latent_dim), 0);
  absorbed_.resize(elements(rows_, rank));
  for (std::int64_t head = 0; head < config_.num_heads; ++head) {
    float* q_head = q_.data() + head * config_.qk_head_dim();
    gemm_.multiply({q_head, q_stride}, {checkpoint_.w_uk(layer, head), rank},
                   {absorbed_.data(), rank}, rows_, rank, nope);
    for (std::int64_t row = 0; row < num_tokens; ++row) {
      float* q_pe = q_head + row * q_stride + nope;
      rope_.rotate(cos_sin_.data() + row * rope, q_pe);
      std::uint16_t* to = q16_.data() + (row * config_.num_heads + head) * latent_dim;
      round_to(dtype, absorbed_.data() + row * rank, rank, to);
      round_to(dtype, q_pe, rope, to + rank);
    }
  }
}

void Transformer::append_latents(std::int64_t layer, const StepBatch& batch, PagedCache& cache) {
  const LayerWeights& weights = checkpoint_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t width = config_.latent_dim();
  kv_.resize(elements(rows_, width));
  gemm_.multiply_transposed({normed_.data(), config_.hidden_size},
                            {weights.kv_a.data(), config_.hidden_size}, {kv_.data(), width}, rows_,
                            width, config_.hidden_size);
  rms_norm(kv_.data(), width, weights.kv_a_norm, kLatentNormEps, kv_.data(), width, rows_);
  for (std::int64_t row = 0; row < batch.num_tokens(); ++row) {
    if (batch.slots[static_cast<std::size_t>(row)] < 0) continue;
    float* token = kv_.data() + row * width;
    rope_.rotate(cos_sin_.data() + row * config_.qk_rope_head_dim, token + config_.kv_lora_rank);
    cache.store(layer, batch.slots[static_cast<std::size_t>(row)],
                {token, static_cast<std::size_t>(width)});
  }
}

DecodeTensors Transformer::decode_tensors(std::int64_t layer, const StepBatch& batch,
                                          const PagedCache& cache, DType q_dtype) {
  const std::int64_t num_requests = batch.num_requests();
  DecodeTensors tensors;
  tensors.q = TensorView::contiguous(q16_.data(), q_dtype,
                                     {rows_, config_.num_heads, config_.latent_dim()});
  tensors.kv_cache = cache.layer_view(layer);
  tensors.block_table = TensorView::contiguous(batch.block_table.data(), DType::kI32,
                                               {num_requests, batch.table_width});
  tensors.seq_lens = TensorView::contiguous(batch.seq_lens.data(), DType::kI32, {num_requests});
  if (is_sharded_) {
    tensors.causal_seqlens_kv_global =
        TensorView::contiguous(batch.global_lens.data(), DType::kI32, {num_requests});
  }
  tensors.query_start_loc =
      TensorView::contiguous(batch.query_start_loc.data(), DType::kI32, {num_requests + 1});
  tensors.out = TensorView::contiguous(latent_out_.data(), DType::kF32,
                                       {rows_, config_.num_heads, config_.kv_lora_rank});
  const float kv_scale = cache.scale(layer);
  tensors.bmm1_scale = static_cast<float>(softmax_scale(config_) * kv_scale);
  tensors.bmm2_scale = kv_scale;
  return tensors;
}

void Transformer::project_output(std::int64_t layer) {
  const LayerWeights& weights = checkpoint_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t rank = config_.kv_lora_rank;
  const std::int64_t value_dim = config_.v_head_dim;
  const std::int64_t width = config_.num_heads * value_dim;
  heads_.resize(elements(rows_, width));
  for (std::int64_t head = 0; head < config_.num_heads; ++head) {
    gemm_.multiply_transposed({latent_out_.data() + head * rank, config_.num_heads * rank},
                              {checkpoint_.w_uv(layer, head), rank},
                              {heads_.data() + head * value_dim, width}, rows_, value_dim, rank);
  }
  projected_.resize(x_.size());
  gemm_.multiply_transposed({heads_.data(), width}, {weights.o_proj.data(), width},
                            {projected_.data(), config_.hidden_size}, rows_, config_.hidden_size,
                            width);
  add(x_, projected_);
}

void Transformer::mlp(const LayerWeights& weights) {
  const std::int64_t hidden = config_.hidden_size;
  const std::int64_t width = config_.intermediate_size;
  rms_norm(x_.data(), hidden, weights.post_attn_norm, config_.rms_norm_eps, normed_.data(), hidden,
           rows_);
  gate_.resize(elements(rows_, width));
  up_.resize(gate_.size());
  const ConstMatrix input{normed_.data(), hidden};
  gemm_.multiply_transposed(input, {weights.gate.data(), hidden}, {gate_.data(), width}, rows_,
                            width, hidden);
  gemm_.multiply_transposed(input, {weights.up.data(), hidden}, {up_.data(), width}, rows_, width,
                            hidden);
  for (std::size_t i = 0; i < gate_.size(); ++i) {
    gate_[i] = gate_[i] / (1.0F + std::exp(-gate_[i])) * up_[i];
  }
  gemm_.multiply_transposed({gate_.data(), width}, {weights.down.data(), width},
                            {projected_.data(), hidden}, rows_, hidden, width);
  add(x_, projected_);
}

void Transformer::head(const StepBatch& batch, std::vector<float>& logits) {
  const std::int64_t hidden = config_.hidden_size;
  const std::int64_t wanted = static_cast<std::int64_t>(batch.logit_rows.size());
  const std::int64_t rows = padded_rows(wanted);
  normed_.assign(elements(rows, hidden), 0.0F);
  for (std::int64_t i = 0; i < wanted; ++i) {
    const float* row = x_.data() + batch.logit_rows[static_cast<std::size_t>(i)] * hidden;
    rms_norm(row, hidden, checkpoint_.final_norm, config_.rms_norm_eps, normed_.data() + i * hidden,
             hidden, 1);
  }
  logits.resize(elements(rows, config_.vocab_size));
  gemm_.multiply_transposed({normed_.data(), hidden}, {checkpoint_.output_head().data(), hidden},
                            {logits.data(), config_.vocab_size}, rows, config_.vocab_size, hidden);
  logits.resize(elements(wanted, config_.vocab_size));
}

}  // namespace mla::model
