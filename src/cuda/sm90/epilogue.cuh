// Ends of pieces: what the value warps hand back.
#pragma once

#include "cuda/row_end.cuh"
#include "cuda/sm90/context.cuh"

namespace mla::sm90 {

/// A value warp has used what it reads of piece number `count`.
template <class T>
__device__ __forceinline__ void leave_piece(const Context<T>& c, uint32_t count) {
  __syncwarp();
  if (c.lane != 0) return;
  ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.stats_empty));
  c.release_piece(count);
}

/// After the last store of a partial by the value threads. One thread's release covers what the
/// barrier, and the scores' barrier before it, have shown to it.
template <class T>
__device__ __forceinline__ void announce_partial(const KernelParams& p,
                                                 const Piece<T::kRows>& piece, int thread) {
  ptx::named_barrier_sync(kValueBarrier, T::kValueThreads);
  if (thread == 0) ptx::increment_release(p.progress + piece.first_cta, 2 * piece.num_pieces - 1);
}

}  // namespace mla::sm90
