// Tile constants, roles, barriers and the shared-memory map of the swapped kernel.
#pragma once

#include <cstdint>

#include "cuda/sm90/params.hpp"

namespace mla::sm90 {

/// kRows query rows (16, 32 or 64) against kLatentChunks * 64 latent and kRopeChunks * 64 rotary values.
template <class ElementT, int kRowsT, int kLatentChunksT, int kRopeChunksT>
struct Traits {
  using Element = ElementT;
  static constexpr int kRows = kRowsT;
  static constexpr int kLatentChunks = kLatentChunksT;
  static constexpr int kRopeChunks = kRopeChunksT;
  static constexpr int kChunks = kLatentChunks + kRopeChunks;
  static constexpr int kLatent = kLatentChunks * 64;
  static constexpr int kRope = kRopeChunks * 64;

  // Warpgroups: one producer, one for scores and softmax, one or two for values.
  static constexpr int kValueWarpgroups = kRows == 64 ? 2 : 1;
  static constexpr int kValueThreads = 128 * kValueWarpgroups;
  static constexpr int kThreads = 256 + kValueThreads;
  static constexpr int kValueChunks = kLatentChunks / kValueWarpgroups;  // of one value warpgroup
  /// First latent value of chunk c of a value warpgroup: chunks alternate, so that slots come free in
  /// ring order.
  static constexpr __host__ __device__ int value_dim(int member, int c) {
    return (c * kValueWarpgroups + member) * 64;
  }
  static constexpr int kScoreRegisters = kValueWarpgroups == 2 ? 152 : 224;
  static constexpr int kValueRegisters = kValueWarpgroups == 2 ? 160 : 240;
  static constexpr int kProducerRegisters = 40;
  // The pool is what the launch allocates: 168 a thread of 384, 128 a thread of 512. More would hang.
  static_assert(kProducerRegisters + kScoreRegisters + kValueWarpgroups * kValueRegisters <=
                    (kValueWarpgroups == 2 ? 4 * 128 : 3 * 168),
                "the roles' registers exceed the launch's");

  // Shared memory, bytes; operands start at multiples of 1024 (the swizzle's period).
  static constexpr int kSlotBytes = kTileKeys * 64 * 2;            // one chunk: 64 keys x 64 values
  static constexpr int kQueryBytes = kRows * kChunks * 128;
  static constexpr int kProbabilityBytes = kRows * 128;            // 64 keys, one buffer
  // With 64 rows one buffer makes room for the 17th slot: two tiles less one rotary chunk, so that the
  // scores of a tile never wait for a slot that the values of the tile before still hold.
  static constexpr int kProbabilityBuffers = kRows == 64 ? 1 : 2;
  static constexpr int kStageDims = 64 / kValueWarpgroups;         // output staged through a P buffer
  static constexpr int kStageBytes = kProbabilityBytes / kValueWarpgroups;
  static constexpr int kStatsBytes = kRows * 88 + 512;             // SmallShared fits (asserted)
  static constexpr int kLimitBytes = 232448 - 1024;                // less the alignment slack
  static constexpr int kFixedBytes = kQueryBytes + kProbabilityBuffers * kProbabilityBytes + kStatsBytes;
  static constexpr int kSlots = (kLimitBytes - kFixedBytes) / kSlotBytes;
  static constexpr int kQueryOffset = kSlots * kSlotBytes;
  static constexpr int kProbabilityOffset = kQueryOffset + kQueryBytes;
  static constexpr int kStatsOffset = kProbabilityOffset + kProbabilityBuffers * kProbabilityBytes;
  static constexpr int kSharedBytes = kStatsOffset + kStatsBytes + 1024;

  static_assert(kRows % 16 == 0 && kRows <= 64, "a row block is 16, 32 or 64 rows");
  static_assert(kLatentChunks % kValueWarpgroups == 0, "value warpgroups share the latent evenly");
  static_assert(kQueryBytes % 1024 == 0 && kProbabilityBytes % 1024 == 0, "swizzle atoms are 1 KB");
  static_assert(kSlots >= 2 * kChunks - 1, "the ring must hold the next tile beside the values of this one");
  static_assert(kSharedBytes <= 232448, "shared memory of one CTA");
};

/// Small per-row arrays of the running piece, in shared memory.
template <int kRows>
struct Stats {
  float warp_max[4][kRows];     // column maxima, later sums, of the four score warps
  float rescale[2][kRows];      // factor of O for the tile in P buffer b
  float final_scale[kRows];     // what O is multiplied by at the end of a piece
  float row_max[kRows];
  float slope[kRows];           // ALiBi, in log2 units
  int any_rescale[2];
};

/// Named barriers (0 is __syncthreads).
enum NamedBarrier : int {
  kScoreBarrier = 1,
  kValueBarrier = 2,
  kStageBarrier = 3,  // and 4: one for each value warpgroup
  kQueryBarrier = 5,
};

}  // namespace mla::sm90
