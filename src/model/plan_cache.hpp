// PlanCache: one plan and one workspace per shape of a decode step, made on first use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>

#include "mla/decode.hpp"

namespace mla::model {

/// A step's lengths change with every token, its shape rarely does: the bounds of a problem are
/// rounded up (max_seq_len and max_query_len to powers of two), so that one plan serves many steps.
/// The caller rounds num_tokens up itself and leaves the rows above query_start_loc[B] as padding.
class PlanCache {
 public:
  explicit PlanCache(PlanOptions options) : options_(std::move(options)) {}

  struct Entry {
    DecodePlan plan;
    void* workspace = nullptr;  ///< zeroed once; serves one run at a time
    std::unique_ptr<std::byte[]> storage;
  };

  /// The entry that serves `problem`. Valid until the next call.
  Result<const Entry*> get(DecodeProblem problem);

  std::int64_t num_plans_made() const noexcept { return num_plans_made_; }

 private:
  PlanOptions options_;
  std::list<Entry> entries_;  // most recently used first
  std::int64_t num_plans_made_ = 0;
};

}  // namespace mla::model
