// A whole batch decoded by a group of ranks: each rank makes its shard of the cache, decodes, and
// the heads come together again.
#pragma once

#include <string>

#include "mla/distributed.hpp"

namespace mla::cli {

struct ShardedRun {
  std::int64_t interleave = 1;  ///< consecutive tokens of one rank
  ContextParallelOptions decode;
};

/// What one rank found out.
struct ShardedReport {
  std::string backend;
  int threads = 0;  ///< of one rank
  CpStrategy strategy = CpStrategy::kAuto;
  std::size_t workspace_bytes = 0;
  double milliseconds = 0;  ///< of the call
};

/// Decodes `batch`, an unsharded problem with its tensors in host memory, out and lse included, on
/// `world` threads. The tensors' contents are checked first.
Result<ShardedReport> run_on_threads(int world, const DecodeProblem& problem,
                                     const DecodeTensors& batch, const ShardedRun& run);

}  // namespace mla::cli
