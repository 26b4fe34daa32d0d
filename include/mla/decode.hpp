// plan(), workspace_size() and run(): the three calls of a decode step.
//
//   auto plan = mla::plan(problem);                      // once per shape; host integers only
//   std::vector<std::byte> workspace(plan->workspace_bytes());   // zeroed once
//   mla::Status status = mla::run(*plan, tensors, workspace.data(), workspace.size());
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mla/export.hpp"
#include "mla/problem.hpp"
#include "mla/status.hpp"

namespace mla {

/// The values are part of the C ABI.
enum class DeviceKind : int { kCpu = 1, kCuda = 2 };

/// How to run a problem. The defaults choose the fastest backend of the device.
struct PlanOptions {
  DeviceKind device = DeviceKind::kCpu;
  int device_index = 0;         ///< CUDA device; ignored on the CPU
  std::string backend;          ///< a row name of `backends()`; empty: the first row that can run. A
                                ///< forced row that cannot run is an error, never another row
  int num_threads = 0;          ///< CPU workers; 0: as many as the OpenMP runtime gives
  std::int64_t num_splits = 0;  ///< parts that each request's keys are cut into; 0: chosen by cost
  std::int64_t fixed_split = 0; ///< tokens of a split at absolute positions; a row's bits then depend
                                ///< on that row alone; 0: off
};

/// One contiguous key range of one request's rows, given to one worker.
struct Split {
  std::int32_t request = 0;
  std::int32_t row_begin = 0;   ///< rows count (query token, head) pairs of the request, head fastest
  std::int32_t row_end = 0;
  std::int64_t key_begin = 0;   ///< local key indices; sparse mode: positions in the index row
  std::int64_t key_end = 0;
  std::int32_t worker = 0;      ///< the worker (thread, SM) the split is planned for
  std::int32_t partial = -1;    ///< first partial slot, or -1: the split writes the output itself
};

struct PlanState;  // private (src/core/split.hpp)

/// A chosen backend with its work sizes. Immutable, cheap to copy, safe to share between threads.
class MLA_API DecodePlan {
 public:
  explicit DecodePlan(std::shared_ptr<const PlanState> state) noexcept : state_(std::move(state)) {}

  const DecodeProblem& problem() const noexcept;
  const PlanOptions& options() const noexcept;
  const char* backend_name() const noexcept;
  int num_workers() const noexcept;
  /// Bytes `run` needs; zero them once, before the first run. Host memory is to be aligned to 16 bytes,
  /// device memory to 256, as every allocator gives it.
  std::size_t workspace_bytes() const noexcept;
  /// One line: backend, workers, workspace, problem string.
  std::string to_string() const;

  const PlanState& state() const noexcept { return *state_; }

 private:
  std::shared_ptr<const PlanState> state_;
};

/// Validates the problem and chooses a backend. Allocates host memory only; touches no tensor.
/// kInvalidArgument: the problem contradicts itself. kUnsupported: no row (or not the forced row) can
/// run it; the message lists each row's reason.
MLA_API Result<DecodePlan> plan(const DecodeProblem& problem, const PlanOptions& options = {});

/// The workspace of `plan(problem, options)` without keeping the plan.
MLA_API Result<std::size_t> workspace_size(const DecodeProblem& problem, const PlanOptions& options = {});

/// Computes out and lse. On the CPU the call returns when they are written. On CUDA it enqueues on
/// `stream` (a cudaStream_t) and returns; it never synchronises and allocates nothing.
///
/// Every check that needs no device memory is made before anything is launched or written. A CPU
/// backend also checks the contents of block_table, seq_lens and query_start_loc.
/// One workspace serves one run at a time.
MLA_API Status run(const DecodePlan& plan, const DecodeTensors& tensors, void* workspace,
           std::size_t workspace_bytes, void* stream = nullptr);

/// The splits `run` would make for these lengths (host arrays; query_start_loc and
/// causal_seqlens_kv_global may be null as in DecodeTensors). For printing, tests and tuning.
MLA_API Result<std::vector<Split>> splits(const DecodePlan& plan, const std::int32_t* seq_lens,
                                  const std::int32_t* query_start_loc = nullptr,
                                  const std::int32_t* causal_seqlens_kv_global = nullptr);

/// One row of the backend table, in order of preference.
struct BackendInfo {
  std::string name;
  std::string description;
  DeviceKind device = DeviceKind::kCpu;
  std::string reject_reason;  ///< empty: it runs here (and serves the problem asked about)
};

/// The table with the reason why each row cannot run on this machine, or cannot serve `problem`.
MLA_API std::vector<BackendInfo> backends();
MLA_API std::vector<BackendInfo> backends(const DecodeProblem& problem, const PlanOptions& options = {});

/// The library's version, "major.minor.patch".
MLA_API const char* version() noexcept;

}  // namespace mla
