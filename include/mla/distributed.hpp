// Context-parallel decode: W ranks each hold a part of every sequence's keys (mla/sharding.hpp),
// decode all query heads over their part, and merge by log-sum-exp, so that each rank ends with its
// own heads.
//
//   auto plan = mla::plan_context_parallel(problem, ranks);      // every rank, once per shape
//   std::vector<std::byte> workspace(plan->workspace_bytes());   // zeroed once
//   mla::Status status = mla::decode_context_parallel(*plan, ranks, tensors, workspace.data(),
//                                                     workspace.size());
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "mla/communicator.hpp"
#include "mla/decode.hpp"
#include "mla/export.hpp"

namespace mla {

/// How partial results reach the rank that owns their heads.
enum class CpStrategy : int {
  kAuto = 0,          ///< chosen from the sizes
  kGatherReduce = 1,  ///< all-gather of the lse, then reduce-scatter of the weighted outputs
  kAllToAll = 2,      ///< one all-to-all of outputs with their lse, merged where they arrive
};

/// "auto", "ag_rs" or "a2a".
MLA_API const char* to_string(CpStrategy strategy) noexcept;

struct ContextParallelOptions {
  PlanOptions local;  ///< the decode of this rank's keys; its device must be the communicator's
  CpStrategy strategy = CpStrategy::kAuto;
  bool queries_gathered = false;  ///< q holds all H heads on every rank; else only this rank's own
  /// Ranks compare their checks before any payload moves, so that one rank's bad argument is every
  /// rank's error. Costs one small exchange through host memory a call. When off, a rank that fails
  /// aborts the group; needed off where calls are captured into a CUDA graph.
  bool agree_each_call = true;
};

/// The heads whose results a rank keeps: ceil(H/W) each, the last ranks fewer or none.
struct HeadRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};
MLA_API HeadRange rank_heads(std::int64_t num_heads, std::int64_t world,
                             std::int64_t rank) noexcept;

struct ContextParallelState;  // private (src/distributed/context_parallel.hpp)

/// A plan of one rank. Immutable, cheap to copy; it does not keep the communicator.
class MLA_API ContextParallelPlan {
 public:
  explicit ContextParallelPlan(std::shared_ptr<const ContextParallelState> state) noexcept
      : state_(std::move(state)) {}

  const DecodeProblem& problem() const noexcept;
  const DecodePlan& local() const noexcept;  ///< all H heads over this rank's keys, out in f32
  CpStrategy strategy() const noexcept;      ///< never kAuto
  HeadRange heads() const noexcept;          ///< that this rank keeps
  /// Bytes a call needs, the local decode's included; aligned and zeroed as DecodePlan asks.
  std::size_t workspace_bytes() const noexcept;
  /// One line: strategy, heads, workspace, then the local plan.
  std::string to_string() const;

  const ContextParallelState& state() const noexcept { return *state_; }

 private:
  std::shared_ptr<const ContextParallelState> state_;
};

/// Plans the decode of `problem`, whose num_heads are all H heads, whose cp_world and cp_rank are
/// the communicator's, and whose max_seq_len bounds this rank's keys. Collective: every rank calls
/// it, and either all succeed or all return the same error: that of the first rank whose own check
/// failed
/// ("rank r: ..."), or the first field in which two ranks differ.
MLA_API Result<ContextParallelPlan> plan_context_parallel(
    const DecodeProblem& problem, Communicator& ranks, const ContextParallelOptions& options = {});

/// Computes this rank's heads over all ranks' keys. Collective. `tensors` are those of `run` with
/// this rank's cache, block table and lengths, and
///   q    [T, own heads, D], or [T,H,D] where the plan says queries_gathered (q_nope, q_pe alike);
///   out  [T, own heads, L] and lse [T, own heads]; a rank that owns no heads may leave them out;
///   sinks, alibi_slopes [H] on every rank. A sink counts once, not once a rank.
///
/// Partial outputs travel and merge in f32 by the rule of mla/merge.hpp, in rank order. Nothing is
/// written to out and lse unless all ranks passed their checks. kPeer: a rank is gone or late.
MLA_API Status decode_context_parallel(const ContextParallelPlan& plan, Communicator& ranks,
                                       const DecodeTensors& tensors, void* workspace,
                                       std::size_t workspace_bytes, void* stream = nullptr);

}  // namespace mla
