// Transformer: the forward pass of a ragged batch, with attention through libmla's public
// interface.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "mla/decode.hpp"
#include "model/checkpoint.hpp"
#include "model/gemm.hpp"
#include "model/paged_cache.hpp"
#include "model/plan_cache.hpp"
#include "model/rope.hpp"

namespace mla::model {

/// The new tokens of one step: prompt chunks, single tokens and drafts alike, request after
/// request.
struct StepBatch {
  std::vector<std::int32_t> tokens;     ///< [T]
  std::vector<std::int32_t> positions;  ///< [T] position in the token's own request
  std::vector<std::int64_t> slots;      ///< [T] where the latent goes: page * page_size + offset;
                                        ///< -1: to another rank
  std::vector<std::int32_t> query_start_loc;  ///< [B+1]
  std::vector<std::int32_t> seq_lens;         ///< [B] new tokens included, on this rank
  std::vector<std::int32_t> global_lens;      ///< [B] the same on all ranks
  std::vector<std::int32_t> block_table;      ///< [B, table_width]
  std::int64_t table_width = 0;
  std::vector<std::int64_t> logit_rows;  ///< the tokens whose logits are wanted

  std::int64_t num_tokens() const noexcept { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t num_requests() const noexcept { return static_cast<std::int64_t>(seq_lens.size()); }
};

/// Called after a layer's attention ran, with what it ran on.
using AttentionHook =
    std::function<void(std::int64_t layer, const DecodeProblem&, const DecodeTensors&)>;

/// Seconds spent and calls made in libmla.
struct AttentionStats {
  double seconds = 0.0;
  std::int64_t runs = 0;
  std::int64_t plans = 0;
};

class Transformer {
 public:
  /// The checkpoint must outlive the object. `options.fixed_split` makes a row's bits independent
  /// of the batch around it, together with the fixed row blocks of gemm.hpp.
  Transformer(const Checkpoint& checkpoint, const PlanOptions& options, int gemm_threads,
              const RankGroup& group = {});

  /// Appends the step's latents to the cache and writes logits [logit_rows, vocab]. The arrays of
  /// the batch must agree in size and tokens lie in the vocabulary; libmla checks the rest.
  Status forward(const StepBatch& batch, PagedCache& cache, std::vector<float>& logits,
                 const AttentionHook& hook = {});

  AttentionStats attention_stats() const noexcept;
  /// The row of libmla's backend table that the last step ran on.
  const std::string& backend_name() const noexcept { return backend_name_; }

 private:
  void embed(const StepBatch& batch);
  Status attention(std::int64_t layer, const StepBatch& batch, PagedCache& cache,
                   const PlanCache::Entry& entry, const AttentionHook& hook);
  void project_query(const LayerWeights& weights);
  void absorb_query(std::int64_t layer, std::int64_t num_tokens, DType dtype);
  void append_latents(std::int64_t layer, const StepBatch& batch, PagedCache& cache);
  DecodeTensors decode_tensors(std::int64_t layer, const StepBatch& batch, const PagedCache& cache,
                               DType q_dtype);
  void project_output(std::int64_t layer);
  void mlp(const LayerWeights& weights);
  void head(const StepBatch& batch, std::vector<float>& logits);
  DecodeProblem decode_problem(const StepBatch& batch, const PagedCache& cache) const;

  const Checkpoint& checkpoint_;
  const ModelConfig& config_;
  Rope rope_;
  bool is_sharded_;
  PlanCache plans_;
  Gemm gemm_;
  AttentionStats stats_;
  std::string backend_name_;

  // Activations of one step. Every buffer has rows_ rows: T rounded up to whole GEMM row blocks.
  std::int64_t rows_ = 0;
  std::vector<float> cos_sin_;      // [rows, R]
  std::vector<float> x_;            // [rows, hidden], the residual stream
  std::vector<float> normed_;       // [rows, hidden]
  std::vector<float> q_latent_;     // [rows, q_lora_rank]
  std::vector<float> q_;            // [rows, H, nope + R]
  std::vector<float> kv_;           // [rows, L + R]
  std::vector<float> absorbed_;     // [rows, L], one head
  std::vector<std::uint16_t> q16_;  // [rows, H, L + R], bf16 or f16
  std::vector<float> latent_out_;   // [rows, H, L]
  std::vector<float> heads_;        // [rows, H, v]
  std::vector<float> projected_;    // [rows, hidden]
  std::vector<float> gate_, up_;    // [rows, intermediate]
};

}  // namespace mla::model
