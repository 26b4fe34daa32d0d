// What a context-parallel plan holds, and the memory of one call.
//
// Heads travel in W blocks of `block` = ceil(H/W), the last ones padded. Regions of the workspace,
// in the order of use, each at a multiple of 256 bytes:
//
//   query_send   [T,block,D] q's type   this rank's heads            (not when queries are
//   gathered) query_blocks [W,T,block,D]          everybody's heads            (likewise) query
//   [T,H,D]                the same in head order       (likewise) out, lse     [T,H,L] f32, [T,H]
//   f32 the local decode's result send         W chunks f32           a2a: [T,block,L] then
//   [T,block] lse; ag_rs: [T,block,L] receive      a2a: W chunks; ag_rs: one chunk lse_gathered
//   [W,T,H] f32            ag_rs only local        the local decode's workspace
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "distributed/agreement.hpp"
#include "mla/distributed.hpp"

namespace mla {

/// A part of the workspace.
struct Region {
  std::size_t begin = 0;
  std::size_t bytes = 0;
};

struct ContextParallelState {
  DecodeProblem problem;  ///< as given: all H heads
  ContextParallelOptions options;
  CpStrategy strategy = CpStrategy::kAllToAll;
  HeadRange heads;
  std::int64_t block = 0;  ///< heads of a block, padding included
  std::int64_t chunk = 0;  ///< f32 values that go to one rank
  DecodePlan local;

  Region query_send, query_blocks, query, out, lse, send, receive, lse_gathered, local_workspace;
  std::size_t workspace_bytes = 0;
};

/// What every rank must have in common.
std::vector<AgreedField> agreed_fields(const DecodeProblem& problem,
                                       const ContextParallelOptions& options, int world);

/// One call: the plan, and the regions of its workspace as tensors.
struct ContextParallelCall {
  const ContextParallelState& state;
  const DecodeTensors& tensors;  ///< as the caller gave them
  std::byte* workspace;

  std::byte* at(const Region& region) const noexcept { return workspace + region.begin; }
  float* floats(const Region& region) const noexcept {
    return reinterpret_cast<float*>(at(region));
  }
  /// The caller's tensors for the local decode: all heads, f32 result in the workspace.
  DecodeTensors local_tensors() const noexcept;
};

// How data moves between tensors and what travels, in host memory (host_blocks.cpp).

/// This rank's heads -> query_send.
void pack_queries(const ContextParallelCall& call);
/// query_blocks -> query.
void order_queries(const ContextParallelCall& call);
/// a2a: out and lse -> send.
void pack_states(const ContextParallelCall& call);
/// a2a: receive -> the caller's out and lse.
Status merge_states(const ContextParallelCall& call);
/// ag_rs: out times this rank's share, by lse_gathered -> send.
void weigh_states(const ContextParallelCall& call);
/// ag_rs: receive, and lse_gathered -> the caller's out and lse.
void write_reduced(const ContextParallelCall& call);

}  // namespace mla
