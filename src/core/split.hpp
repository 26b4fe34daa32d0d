// PlanState: the contents of a DecodePlan, and the planner's pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/visibility.hpp"
#include "mla/decode.hpp"

namespace mla {

struct KernelEntry;  // core/backend.hpp

/// What a backend fixes when a plan is made. Host integers only.
struct PlanState {
  DecodeProblem problem;
  PlanOptions options;
  const KernelEntry* entry = nullptr;
  int num_workers = 1;
  std::size_t workspace_bytes = 0;

  // Tile geometry that the planner needs; set by the backend's `configure`.
  std::int64_t max_rows = 128;      ///< rows of one split
  std::int64_t key_tile = 48;       ///< split boundaries are multiples of this many keys
};

/// The lengths of one batch, on the host.
struct BatchLengths {
  const std::int32_t* seq_lens = nullptr;                  ///< [B]; null in sparse mode
  const std::int32_t* query_start_loc = nullptr;           ///< [B+1] or null: uniform
  const std::int32_t* causal_seqlens_kv_global = nullptr;  ///< [B] or null: G_b = S_b
};

/// One request of a batch, resolved.
struct RequestShape {
  std::int64_t first_token = 0;  ///< row of q
  std::int64_t num_tokens = 0;   ///< n_b
  std::int64_t seq_len = 0;      ///< S_b
  std::int64_t global_len = 0;   ///< G_b

  /// Global position of query token i.
  std::int64_t position(std::int64_t i) const noexcept { return global_len - num_tokens + i; }
};

inline CpLayout cp_layout(const DecodeProblem& problem) noexcept {
  return {problem.cp_world, problem.cp_rank, problem.cp_interleave};
}

/// The arrays of a call whose tensors lie in host memory.
BatchLengths batch_lengths(const DecodeTensors& tensors) noexcept;

RequestShape request_shape(const DecodeProblem& problem, const BatchLengths& lengths,
                           std::int64_t request) noexcept;

/// The keys token i of the request sees; sparse mode: the whole index row.
KeyRange token_keys(const DecodeProblem& problem, const RequestShape& shape, std::int64_t i) noexcept;

/// Requests the planner walks: B, or T in sparse mode, where every token has its own index row.
std::int64_t num_planned_requests(const DecodeProblem& problem) noexcept;

/// A row block whose keys were cut: its partial results lie in `num_splits` consecutive groups of
/// (row_end - row_begin) partial slots, in key order, from slot `partial`.
struct MergeTask {
  std::int32_t request = 0;
  std::int32_t row_begin = 0;
  std::int32_t row_end = 0;
  std::int32_t partial = 0;
  std::int32_t num_splits = 0;
};

/// Upper bounds over every batch that a plan serves, from the problem's bounds alone.
struct ScheduleBounds {
  std::int64_t num_splits = 0;
  std::int64_t num_merges = 0;
  std::int64_t num_partials = 0;  ///< partial slots, one row each
};

/// The work of one call, in memory that the caller provides (sized by `schedule_bounds`): making a
/// schedule allocates nothing. It depends on the lengths and the plan only.
struct Schedule {
  Split* splits = nullptr;              ///< sorted by worker
  std::int32_t* worker_begin = nullptr; ///< [num_workers + 1] offsets into splits
  MergeTask* merges = nullptr;
  std::int64_t num_splits = 0;
  std::int64_t num_merges = 0;
};

ScheduleBounds schedule_bounds(const PlanState& state) noexcept;

/// seq_lens -> splits: equal work per worker at key-tile granularity. Every row of every request lies
/// in at least one split; rows that see no key lie in a split without keys.
void make_schedule(const PlanState& state, const BatchLengths& lengths, Schedule& schedule) noexcept;

}  // namespace mla
