// Tile constants, roles and the shared-memory map of both kernels.
#pragma once

#include <cstdint>

#include "cuda/sm90/params.hpp"

namespace mla::sm90 {

/// A kernel for blocks of kRows query rows against kLatentChunks * 64 latent and kRopeChunks * 64
/// rotary values. 16 and 32 rows: operands swapped (keys_*.cuh). 64 rows: query rows are the
/// wgmma's 64 (rows_*.cuh). kPlain kernels leave out what calls rarely ask for (launch.cpp:
/// is_plain): code that is not there need not be fetched.
template <class ElementT, int kRowsT, int kLatentChunksT, int kRopeChunksT, bool kPlainT>
struct Traits {
  using Element = ElementT;
  static constexpr int kRows = kRowsT;
  static constexpr int kLatentChunks = kLatentChunksT;
  static constexpr int kRopeChunks = kRopeChunksT;
  static constexpr bool kPlain = kPlainT;
  static constexpr int kTileKeys = sm90::kTileKeys;
  static constexpr int kMergeBarrier = 4;  // named barrier; and 5: the second team
  static constexpr bool kSparse = false;         // never without seq_lens
  static constexpr bool kRuntimeLatent = false;  // a partial row is the latent's width
  static constexpr int kChunks = kLatentChunks + kRopeChunks;
  static constexpr int kLatent = kLatentChunks * 64;
  static constexpr bool kSwapped = kRows < 64;

  // Warpgroups: one producer, one for scores and softmax, one or two for values.
  static constexpr int kValueWarpgroups = kSwapped ? 1 : 2;
  static constexpr int kValueThreads = 128 * kValueWarpgroups;
  static constexpr int kThreads = 256 + kValueThreads;
  static constexpr int kValueChunks = kLatentChunks / kValueWarpgroups;  // of one value warpgroup
  /// First latent value of chunk c of a value warpgroup.
  static constexpr __host__ __device__ int value_dim(int member, int c) {
    return (member * kValueChunks + c) * 64;
  }
  static constexpr int kProducerRegisters = kSwapped ? 64 : 40;
  static constexpr int kScoreRegisters = kSwapped ? 208 : 152;
  static constexpr int kValueRegisters = kSwapped ? 232 : 160;
  // The pool is what the launch allocates: 168 a thread of 384, 128 a thread of 512. More would
  // hang.
  static_assert(kProducerRegisters + kScoreRegisters + kValueWarpgroups * kValueRegisters <=
                    (kSwapped ? 3 * 168 : 4 * 128),
                "the roles' registers exceed the launch's");

  static constexpr int kGroupChunks = chunks_per_group(kChunks);
  static constexpr int kGroups = kChunks / kGroupChunks;  // of a tile

  /// Of Q, the first chunks may stay in the score warpgroup's registers: each makes room in shared
  /// memory. They travel through the ring at the start of a piece.
  static constexpr int kRegisterChunks = !kSwapped && kPlain ? 4 : 0;
  static constexpr int kRegisterGroups = (kRegisterChunks + kGroupChunks - 1) / kGroupChunks;
  static constexpr int kQueryChunks = kChunks - kRegisterChunks;  // in shared memory

  // Shared memory, bytes; operands start at multiples of 1024 (the swizzle's period).
  static constexpr int kChunkBytes = kTileKeys * 64 * 2;         // 64 keys x 64 values
  static constexpr int kSlotBytes = kGroupChunks * kChunkBytes;  // one group
  static constexpr int kQueryChunkBytes = kRows * 128;
  static constexpr int kQueryBytes = kQueryChunks * kQueryChunkBytes;
  static constexpr int kProbabilityBytes = kRows * 128;  // 64 keys, one buffer
  static constexpr int kProbabilityBuffers = kSwapped ? 2 : 1;
  static constexpr int kSmallBytes =
      kRows * (kSwapped ? 160 : 140) + 512;          // SmallShared fits (asserted)
  static constexpr int kLimitBytes = 232448 - 1024;  // less the alignment slack
  static constexpr int kFixedBytes =
      kQueryBytes + kProbabilityBuffers * kProbabilityBytes + kSmallBytes;
  static constexpr int kSlots = (kLimitBytes - kFixedBytes) / kSlotBytes;
  static constexpr int kQueryOffset = kSlots * kSlotBytes;
  static constexpr int kProbabilityOffset = kQueryOffset + kQueryBytes;
  static constexpr int kSmallOffset = kProbabilityOffset + kProbabilityBuffers * kProbabilityBytes;
  static constexpr int kSharedBytes = kSmallOffset + kSmallBytes + 1024;

  static_assert(kRows == 16 || kRows == 32 || kRows == 64, "a row block is 16, 32 or 64 rows");
  static_assert(kLatentChunks % kValueWarpgroups == 0, "value warpgroups share the latent evenly");
  static_assert(kQueryBytes % 1024 == 0 && kProbabilityBytes % 1024 == 0, "swizzle atoms are 1 KB");
  static_assert(kSlots >= 2 * kGroups - 1,
                "the ring must hold the next tile beside the values of this one");
  static_assert(kSharedBytes <= 232448, "shared memory of one CTA");
};

/// Small per-row arrays of the running piece, in shared memory.
template <int kRows>
struct Stats {
  // Swapped: column maxima of the four score warps, and at the end of a piece their sums. Two
  // arrays: a warp may add up while another still reads the maxima of the last tile.
  float warp_max[kRows < 64 ? 4 : 1][kRows];
  float warp_sum[kRows < 64 ? 4 : 1][kRows];
  float rescale[2][kRows];   // factor of O for the tile in P buffer b
  float final_scale[kRows];  // what O is multiplied by at the end of a piece
  float slope[kRows];        // ALiBi, in log2 units
  int any_rescale[2][4];     // by buffer; swapped: [b][0], rows: by warp
};

/// Named barriers (0 is __syncthreads, 4 and 5 belong to the merge).
enum NamedBarrier : int {
  kScoreBarrier = 1,
  kValueBarrier = 2,
  kQueryBarrier = 3,
  kStartBarrier = 6,
};

}  // namespace mla::sm90
