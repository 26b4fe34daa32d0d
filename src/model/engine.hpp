// Engine: a transformer with its paged cache, and the assembly of one ragged step.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "mla/decode.hpp"
#include "model/checkpoint.hpp"
#include "model/paged_cache.hpp"
#include "model/transformer.hpp"

namespace mla::model {

/// How the model runs; shared by generation and scoring.
struct EngineOptions {
  KvFormat cache = KvFormat::kBF16;  ///< bf16, f16 or e4m3
  std::int64_t page_size = 64;
  double kv_scale = 0.0;            ///< what a stored value is divided by; 0: see default_kv_scale
  std::string backend;              ///< a row of libmla's table; empty: the first that can run
  int num_threads = 0;              ///< of libmla and, for large models, of the GEMMs; 0: all
  std::int64_t chunk_tokens = 512;  ///< prompt tokens of one step
  std::uint64_t page_seed = 1;      ///< shuffles the pool's pages
  RankGroup group;                  ///< who shares the cache; every rank makes the same calls
};

/// 1 for 16-bit caches. For e4m3 the layer's cache_bound / 448, rounded up to a power of two:
/// nothing ever saturates, no calibration text is needed, and the looseness of the bound costs no
/// precision since e4m3 is a floating-point format with 15 binades.
float default_kv_scale(const Checkpoint& checkpoint, std::int64_t layer, KvFormat format);

/// One request's place in the cache.
struct CachedSequence {
  std::vector<std::int32_t> pages;  ///< of this rank
  std::int64_t length = 0;          ///< tokens whose latents are valid, on all ranks together
};

/// One request's part of a step.
struct StepPart {
  CachedSequence* sequence = nullptr;
  std::span<const std::int32_t> tokens;  ///< appended at sequence->length
  std::int64_t num_logits = 0;           ///< logits are wanted of the last that many tokens
};

class Engine {
 public:
  /// The checkpoint must outlive the engine. kInvalidArgument: an option is out of range.
  /// kUnsupported or kOutOfMemory: no such cache.
  static Result<Engine> create(const Checkpoint& checkpoint, const EngineOptions& options,
                               std::int64_t num_pages);

  /// Runs the parts as one batch: takes the pages they need, appends their tokens and moves
  /// `length` past them. Logits are [sum of num_logits, vocab], part after part.
  Status step(std::span<const StepPart> parts, std::vector<float>& logits,
              const AttentionHook& hook = {});

  void release(CachedSequence& sequence);

  std::int64_t num_free_pages() const noexcept { return allocator_.num_free(); }
  const Transformer& transformer() const noexcept { return transformer_; }

 private:
  Engine(const Checkpoint& checkpoint, const PlanOptions& plan_options, int gemm_threads,
         PagedCache cache, PageAllocator allocator, const RankGroup& group)
      : group_(group),
        transformer_(checkpoint, plan_options, gemm_threads, group),
        cache_(std::move(cache)),
        allocator_(std::move(allocator)) {}

  RankGroup group_;
  Transformer transformer_;
  PagedCache cache_;
  PageAllocator allocator_;
};

/// Pages that hold `tokens` tokens.
constexpr std::int64_t pages_for(std::int64_t tokens, std::int64_t page_size) noexcept {
  return (tokens + page_size - 1) / page_size;
}

}  // namespace mla::model
