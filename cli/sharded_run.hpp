// A whole batch decoded by a group of ranks: each rank makes its shard of the cache, decodes, and
// the heads come together again.
#pragma once

#include <string>

#include "mla/distributed.hpp"

namespace mla::cli {

struct ShardedRun {
  std::int64_t interleave = 1;  ///< consecutive tokens of one rank
  ContextParallelOptions decode;
  int timed_calls = 0;  ///< after the first, whose time says little
};

/// What one rank found out.
struct ShardedReport {
  std::string backend;
  int threads = 0;  ///< of one rank
  int ranks = 1;
  CpStrategy strategy = CpStrategy::kAuto;
  std::size_t workspace_bytes = 0;
  double milliseconds = 0;  ///< of the first call
  double call_us = 0;       ///< median of the timed calls, of the slowest rank
  double local_us = 0;      ///< the same of the local decode alone, all ranks at once
  double overhead_us = 0;   ///< median difference of a call and the local decode after it
};

/// Decodes `batch`, an unsharded problem with its tensors in host memory, out and lse included, on
/// `world` threads. The tensors' contents are checked first.
Result<ShardedReport> run_on_threads(int world, const DecodeProblem& problem,
                                     const DecodeTensors& batch, const ShardedRun& run);

/// Whether this process was started as one rank of an MPI job.
bool under_mpi() noexcept;

/// The same as a rank of the MPI job, in which every process has read the whole batch, or says in
/// `read` why it could not. Every rank ends with all heads. `rank` is set first. kUnsupported:
/// built without MPI.
Result<ShardedReport> run_on_mpi(const Status& read, const DecodeProblem& problem,
                                 const DecodeTensors& batch, const ShardedRun& run, int& rank);

}  // namespace mla::cli
