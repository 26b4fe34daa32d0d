// Tile constants and the shared-memory map of the portable kernels.
#pragma once

#include "cuda/piece.cuh"
#include "cuda/portable/params.hpp"

namespace mla::portable {

/// A kernel for blocks of kRows query rows. `Element` is the 16-bit type of the products: the
/// cache's own, f16 for an e4m3 cache (exact, and P keeps three more bits), bf16 for fp8_ds_mla
/// (whose group scales may be of any size).
template <class ElementT, CacheKind kCacheT, int kRowsT>
struct Traits {
  using Element = ElementT;
  static constexpr CacheKind kCache = kCacheT;
  static constexpr int kRows = kRowsT;

  // What the shared half of the kernels asks for.
  static constexpr bool kPlain = false;
  static constexpr bool kSparse = true;
  static constexpr bool kRuntimeLatent = true;
  static constexpr int kLatent = kMaxLatent;  // width of a partial row
  static constexpr int kTileKeys = portable::kTileKeys;
  static constexpr int kMergeBarrier = 4;  // named barrier; and 5: the second team

  static constexpr int kThreads = portable::kThreads;
  static constexpr int kWarps = kThreads / 32;

  // QK: a warp multiplies kScoreRowTiles x 16 rows by 16 keys over one of kWidthParts parts of the
  // width; a part is so many latent and so many rotary values of each. The parts' sums meet in
  // shared memory.
  static constexpr int kWidthParts = width_parts(kRows);
  static constexpr int kKeyGroups = kTileKeys / 16;
  static constexpr int kRowGroups = kWarps / kWidthParts / kKeyGroups;
  static constexpr int kRowTiles = kRows / 16;
  static constexpr int kScoreRowTiles = kRowTiles / kRowGroups;
  static constexpr int kLatentSteps = kMaxLatent / 16 / kWidthParts;  // of 16 values, at most
  static constexpr int kRopeSteps = kMaxRope / 16 / kWidthParts;
  static constexpr bool kQueryInRegisters = kRows < 64;
  static_assert(kWidthParts * kKeyGroups * kRowGroups == kWarps, "every warp has a share of QK");

  // Softmax: 16 rows x 8 keys are a fragment; warp w holds kWarpFragments neighbouring ones.
  static constexpr int kFragments = kRowTiles * kTileKeys / 8;
  static constexpr int kWarpFragments = kFragments < kWarps ? 1 : kFragments / kWarps;
  static constexpr int kSoftmaxWarps = kFragments / kWarpFragments;
  static constexpr int kRowParts = kTileKeys / 8 / kWarpFragments;  // warps that share a row

  // PV: a warp holds all rows of kMaxLatent / kWarps columns, in groups of 16.
  static constexpr int kColumnGroups = kMaxLatent / kWarps / 16;

  // The e4m3 bits, moved into an f16, are the value times 2^-8 (convert.cuh).
  static constexpr float kStoredScale = kCache == CacheKind::kE4M3 ? 256.0F : 1.0F;
  /// fp8_ds_mla: P is multiplied by the key's scale of each of four column groups.
  static constexpr int kProbabilityVersions = kCache == CacheKind::kFp8DsMla ? 4 : 1;

  static constexpr int kPitch = row_pitch(kCache);  // bytes of a key in the ring
  static constexpr int kStageBytes = kTileKeys * kPitch;
  static constexpr int kFragmentBytes = 32 * 16;  // a uint4 or float4 of every lane
  static constexpr int kScoreBytes = kWidthParts * kFragments * kFragmentBytes;
  static constexpr int kProbabilityBytes = kRowTiles * kKeyGroups * kFragmentBytes;  // a version
  static constexpr int kQuerySteps = (kMaxLatent + kMaxRope) / 16;
  static constexpr int kQueryBytes =
      kQueryInRegisters ? 0 : kRowTiles * kQuerySteps * kFragmentBytes;
};

/// Small arrays of the running piece, and the queue of pieces.
template <class T>
struct SmallShared {
  float row_max[T::kRowParts][T::kRows];  // of a tile or, in [0], of a piece
  float row_sum[T::kRowParts][T::kRows];
  float rescale[T::kRows];      // of O, when a maximum moved
  float final_scale[T::kRows];  // of O, at the end of a piece
  float query_scale[T::kRows];  // what scores are multiplied by to undo the scaling of a query row
  float slope[T::kRows];        // ALiBi, in log2 units
  uint32_t valid_keys[kMaxStages][T::kWarps];  // sparse: four keys a warp
  Piece<T::kRows> pieces[2];
  CutResult<T::kRows> cuts[2];
};

/// Shared memory: Q | scores | P | SmallShared | ring.
template <class T>
struct SharedMap {
  static constexpr int kScores = T::kQueryBytes;
  static constexpr int kProbabilities = kScores + T::kScoreBytes;
  static constexpr int kSmall =
      kProbabilities + T::kProbabilityVersions * T::kProbabilityBytes;
  static constexpr int kRing = (kSmall + static_cast<int>(sizeof(SmallShared<T>)) + 127) / 128 * 128;
  static constexpr int bytes(int stages) { return kRing + stages * T::kStageBytes; }
};

}  // namespace mla::portable
