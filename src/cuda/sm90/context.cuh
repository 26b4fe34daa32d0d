// What the roles share: barriers, small arrays, and the waits that every role does.
#pragma once

#include "cuda/piece.cuh"
#include "cuda/scores.cuh"
#include "cuda/sm90/load.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/traits.cuh"

namespace mla::sm90 {

template <class T>
struct SharedBarriers {
  uint64_t full[T::kSlots];
  uint64_t empty[T::kSlots];
  uint64_t p_full[2];
  uint64_t p_empty[2];
  uint64_t piece_full[2];
  uint64_t piece_empty[2];
  uint64_t query_full;
  uint64_t query_empty;
  uint64_t rows_full;
  uint64_t stats_full;
  uint64_t stats_empty;
};

template <class T>
struct SmallShared {
  Stats<T::kRows> stats;
  Piece<T::kRows> pieces[2];
  CutResult<T::kRows> cuts[2];  // of later pieces, and of the first piece of a result
};

template <class T>
struct Context {
  const KernelParams& p;
  SharedBarriers<T>& barriers;
  SmallShared<T>& small;
  char* shared;
  int warp, lane;  // in the warpgroup

  __device__ uint32_t ring() const { return ptx::smem_address(shared); }
  __device__ uint32_t query() const { return ptx::smem_address(shared + T::kQueryOffset); }
  __device__ uint32_t probabilities(int b) const {
    return ptx::smem_address(shared + T::kProbabilityOffset + b * T::kProbabilityBytes);
  }
  /// Waits for piece number `count` of this CTA.
  __device__ const Piece<T::kRows>& wait_piece(uint32_t count) const {
    ptx::mbarrier_wait(ptx::smem_address(&barriers.piece_full[count & 1]), count >> 1 & 1);
    return small.pieces[count & 1];
  }
  __device__ void release_piece(uint32_t count) const {
    ptx::mbarrier_arrive(ptx::smem_address(&barriers.piece_empty[count & 1]));
  }
  /// Chunk i of the group in a slot.
  __device__ uint32_t chunk(const RingCursor<T::kSlots>& cursor, int i) const {
    return ring() + cursor.slot * T::kSlotBytes + i * T::kChunkBytes;
  }
  /// Waits for the bytes of a slot.
  __device__ void wait_full(const RingCursor<T::kSlots>& cursor) const {
    ptx::mbarrier_wait(ptx::smem_address(barriers.full) + cursor.slot * 8, cursor.phase);
  }
  __device__ void release(const RingCursor<T::kSlots>& cursor) const {
    ptx::mbarrier_arrive(ptx::smem_address(barriers.empty) + cursor.slot * 8);
  }
};

/// Zeroes the value rows of keys that nobody may own, so that 0 * NaN cannot happen. The 128
/// threads of the score warpgroup.
template <class T>
__device__ __forceinline__ void clear_unowned(const Context<T>& c, const Piece<T::kRows>& piece,
                                              int first_key, RingCursor<T::kSlots> tile) {
  const int owned_begin = max(piece.key_begin - first_key, 0);
  const int owned_end = min(piece.key_end - first_key, kTileKeys);
  const int num_clear = owned_begin + kTileKeys - owned_end;
#pragma unroll 1
  for (int chunk = 0; chunk < T::kLatentChunks; ++chunk) {
    char* slot = c.shared + tile.ahead(chunk / T::kGroupChunks).slot * T::kSlotBytes +
                 chunk % T::kGroupChunks * T::kChunkBytes;
#pragma unroll 1
    for (int idx = c.warp * 32 + c.lane; idx < num_clear * 8; idx += 128) {
      const int i = idx / 8;
      const int key = i < owned_begin ? i : owned_end + i - owned_begin;
      *reinterpret_cast<uint4*>(slot + key * 128 + idx % 8 * 16) = uint4{0, 0, 0, 0};
    }
  }
  ptx::fence_proxy_async();
}

/// The ALiBi slopes of a piece's rows, in log2 units. The 128 threads of the score warpgroup.
template <class T>
__device__ __forceinline__ void load_slopes(const Context<T>& c, const Piece<T::kRows>& piece) {
  if (!T::kPlain && c.p.alibi_slopes != nullptr) {
    const int r = c.warp * 32 + c.lane;
    if (r < T::kRows) {
      c.small.stats.slope[r] = __ldg(c.p.alibi_slopes + piece.row_head[r]) * kLog2E;
    }
    ptx::named_barrier_sync(kScoreBarrier, 128);
  }
}

}  // namespace mla::sm90
