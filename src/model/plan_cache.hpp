// PlanCache: one plan and one workspace per shape of a decode step, made on first use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>

#include "mla/distributed.hpp"
#include "mla/sharding.hpp"

namespace mla::model {

/// The ranks that share the latent cache; none: it is whole. Each of them runs the whole model and
/// holds its part of every sequence.
struct RankGroup {
  Communicator* ranks = nullptr;
  std::int64_t interleave = 1;

  Sharding sharding() const noexcept { return {ranks == nullptr ? 1 : ranks->world(), interleave}; }
  std::int64_t rank() const noexcept { return ranks == nullptr ? 0 : ranks->rank(); }
};

/// A step's lengths change with every token, its shape rarely does: the bounds of a problem are
/// rounded up (max_seq_len and max_query_len to powers of two), so that one plan serves many steps.
/// The caller rounds num_tokens up itself and leaves the rows above query_start_loc[B] as padding.
class PlanCache {
 public:
  PlanCache(PlanOptions options, const RankGroup& group)
      : options_(std::move(options)), group_(group) {}

  struct Entry {
    DecodePlan plan;
    void* workspace = nullptr;  ///< zeroed once; serves one run at a time
    std::unique_ptr<std::byte[]> storage;

    Communicator* ranks = nullptr;
    std::optional<ContextParallelPlan> sharded;  ///< with a group
    float* own_heads = nullptr;                  ///< [T,block,L] of this rank
    float* all_heads = nullptr;                  ///< [W,T,block,L]

    /// Decodes; out has all heads on every rank. q holds all heads too.
    Status run(const DecodeTensors& tensors) const;
  };

  /// The entry that serves `problem`. Valid until the next call.
  /// With a group: collective, so the bounds of `problem` are those of whole sequences.
  Result<const Entry*> get(DecodeProblem problem);

  std::int64_t num_plans_made() const noexcept { return num_plans_made_; }

 private:
  Result<Entry> make(const DecodeProblem& problem) const;

  PlanOptions options_;
  RankGroup group_;
  std::list<Entry> entries_;  // most recently used first
  std::int64_t num_plans_made_ = 0;
};

}  // namespace mla::model
