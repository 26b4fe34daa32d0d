// Decodes a one-rank scene on every rank of a group of threads, each with its shard of the keys and
// its part of the heads.
#pragma once

#include <functional>

#include "mla/distributed.hpp"
#include "support/ranks.hpp"
#include "support/scene.hpp"

namespace mla::test {

struct ShardedOptions {
  int world = 1;
  std::int64_t interleave = 1;
  ContextParallelOptions plan;  ///< the local row is taken from here
  /// Called on each rank before the decode, to spoil what it wants.
  std::function<void(int rank, DecodeTensors& tensors)> spoil;
};

struct ShardedOutput {
  Output output;                 ///< all heads, each written by its rank
  std::vector<Status> statuses;  ///< one a rank: the plan's when that failed, else the decode's
};

/// All ranks write to one strided output, full of poison before.
ShardedOutput decode_sharded(const Scene& scene, const ShardedOptions& options);

/// The tensor's heads [begin, begin + count) alone.
TensorView heads_of(TensorView view, const HeadRange& heads);

}  // namespace mla::test
