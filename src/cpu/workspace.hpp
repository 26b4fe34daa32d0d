// Memory map of the CPU workspace: schedule | counters | worker areas | partials.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/split.hpp"

namespace mla::cpu {

/// A position in the workspace, in bytes, or an overflow of the address space.
class Offset {
 public:
  /// Reserves count * bytes and returns where they begin; the next reservation is aligned to 64.
  std::size_t take(std::int64_t count, std::size_t bytes) noexcept {
    const std::size_t begin = end_;
    std::size_t size = 0;
    overflow_ |= __builtin_mul_overflow(static_cast<std::size_t>(count), bytes, &size);
    overflow_ |= __builtin_add_overflow(size, kAlignment - 1, &size);
    size &= ~(kAlignment - 1);
    overflow_ |= __builtin_add_overflow(end_, size, &end_);
    return begin;
  }
  std::size_t end() const noexcept { return end_; }
  bool overflow() const noexcept { return overflow_; }

  static constexpr std::size_t kAlignment = 64;  // a cache line: workers never share one

 private:
  std::size_t end_ = 0;
  bool overflow_ = false;
};

/// Next split of one worker's list; on a cache line of its own, because idle workers take from it.
struct alignas(Offset::kAlignment) NextSplit {
  std::atomic<std::int32_t> index;
};

/// Byte offsets of everything in the workspace, from bounds alone.
struct WorkspaceMap {
  std::size_t splits = 0;
  std::size_t worker_begin = 0;
  std::size_t merges = 0;
  std::size_t next_split = 0;
  std::size_t partial_out = 0;   // [num_partials, L] f32
  std::size_t partial_lse = 0;   // [num_partials] f32
  std::size_t workers = 0;       // [num_workers] areas of worker_bytes
  std::size_t worker_bytes = 0;
  // Offsets inside a worker's area.
  std::size_t rows_out = 0;      // [max_rows, L] f32: results of the running split
  std::size_t rows_lse = 0;
  std::size_t fold_out = 0;      // [max_rows, L] f32: the running fold of fixed_split mode
  std::size_t fold_lse = 0;
  std::size_t scratch = 0;
  std::size_t total = 0;
  bool overflow = false;
};

inline WorkspaceMap map_workspace(const PlanState& state, std::size_t scratch_bytes) noexcept {
  const std::int64_t rank = state.problem.kv_lora_rank;
  const bool folds = state.options.fixed_split > 0;
  WorkspaceMap map;

  Offset worker;
  map.rows_out = worker.take(state.max_rows * rank, sizeof(float));
  map.rows_lse = worker.take(state.max_rows, sizeof(float));
  map.fold_out = worker.take(folds ? state.max_rows * rank : 0, sizeof(float));
  map.fold_lse = worker.take(folds ? state.max_rows : 0, sizeof(float));
  map.scratch = worker.take(1, scratch_bytes);
  map.worker_bytes = worker.end();

  const ScheduleBounds bounds = schedule_bounds(state);
  Offset offset;
  map.splits = offset.take(bounds.num_splits, sizeof(Split));
  map.worker_begin = offset.take(state.num_workers + 1, sizeof(std::int32_t));
  map.merges = offset.take(bounds.num_merges, sizeof(MergeTask));
  map.next_split = offset.take(state.num_workers, sizeof(NextSplit));
  map.partial_out = offset.take(bounds.num_partials, static_cast<std::size_t>(rank) * sizeof(float));
  map.partial_lse = offset.take(bounds.num_partials, sizeof(float));
  map.workers = offset.take(state.num_workers, map.worker_bytes);
  offset.take(1, Offset::kAlignment);  // the caller's memory need not begin on a cache line
  map.total = offset.end();
  map.overflow = offset.overflow() || worker.overflow();
  return map;
}

}  // namespace mla::cpu
