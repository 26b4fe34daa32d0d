// Decode attention on Hopper: one launch plans, reads pages, attends and merges.
//
// Grid: one CTA a multiprocessor, launched cooperatively. `group` adjacent CTAs form a worker: they
// read the same keys for different row blocks, and neighbours' reads merge on the way to L2.
// line.cuh gives each worker its part of all key tiles; reduce.cuh joins the results that were cut.
//
// Blocks of 16 and 32 query rows run with swapped operands (keys_*.cuh), so that nothing is padded
// to 64 on the query side; blocks of 64 rows with query rows as the wgmma's rows (rows_*.cuh).
//
// The launch may begin before the kernels in front of it have ended (programmatic dependent
// launch): barriers and registers are set up meanwhile, and the plan waits before it reads the
// first length.
//
// clang-format off
// Roles (warpgroups)   registers   job
//                      (64 rows)
//   0  warp 0: copies   64 (40)    one thread: pages -> ring, groups of 64 keys x 3 or more chunks;
//                                  of small pages one thread each of warps 0, 2 and 3, and of very
//                                  small ones these warps (load_rows.cuh)
//      warp 1: plan     64 (40)    part of the work, pieces -> piece queue; Q -> shared memory
//   1  scores          208 (152)   S, softmax, P -> shared memory; lse
//   2, 3  values       232 (160)   O; output. 64 rows: two warpgroups share the latent
//
// Timeline of a tile j (b = j mod 2; 64 rows have one P buffer):
//   copies   wait empty[slot]; copy the groups of tile j+1, j+2, ... as slots come free
//   scores   wait full[slot] of each group -> QK(j) -> maximum -> wait p_empty[b] -> P(j) -> p_full[b]
//   values   wait p_full[b] -> rescale O if the maximum moved -> PV(j), groups free one by one
//            -> p_empty[b]
// so QK(j+1) and its softmax run while PV(j) does. With more than one row block a worker the tensor
// cores are the bottleneck, and P(j) is announced late in QK(j+1) (`defer_values`).
//
// Barriers          arrives                          waits                    phase flips
//   full[slot]      the copy engine (bytes), or      scores, values           per lap of the ring
//                   3 warps
//   empty[slot]     every value warp (of Q, as many  copies                   per lap of the ring
//                   lanes of scores)
//   p_full[b]       4 score warps                    values                   every use of the buffer
//   p_empty[b]      every value warp                 scores                   every use of the buffer
//   piece_full[i]   1: plan                          copies, scores, values   every second piece
//   piece_empty[i]  copies, scores, values           plan                     every second piece
//   query_full      1: plan, and Q's bytes           scores                   every piece
//   rows_full       1: plan                          scores                   every piece
//   query_empty     4 score warps                    plan                     every piece
//   stats_full      4 score warps                    values                   every piece
//   stats_empty     every value warp                 scores                   every piece
//
// Shared memory (traits.cuh): ring kSlots x kSlotBytes | Q | P | SmallShared. At (512, 64): 8, 7, 7
// slots of 24 KB for 16, 32, 64 rows.
// clang-format on
#pragma once

#include "cuda/sm90/context.cuh"
#include "cuda/sm90/keys_values.cuh"
#include "cuda/line.cuh"
#include "cuda/sm90/load.cuh"
#include "cuda/sm90/load_rows.cuh"
#include "cuda/reduce.cuh"
#include "cuda/sm90/rows_values.cuh"
#include "cuda/trace.cuh"

namespace mla::sm90 {

/// Warps 1 to 3 of the first warpgroup, when Q is loaded row by row.
inline constexpr int kQueryThreads = 96;

/// Warp 1 of the first warpgroup: the piece queue, and Q of every piece. When Q cannot be copied in
/// boxes, warps 2 and 3 help.
template <class T>
__device__ __forceinline__ void plan_role(const Context<T>& c, PieceWalk<T>& walk,
                                          const TensorMaps& maps) {
  const bool by_rows = !T::kPlain && c.p.query_load == QueryLoad::kRows;
  const uint32_t query_full = ptx::smem_address(&c.barriers.query_full);
  const uint32_t query_empty = ptx::smem_address(&c.barriers.query_empty);
  if (c.lane == 0) trace(kTraceShare);
#pragma unroll 1
  for (uint32_t count = 0;; ++count) {
    Piece<T::kRows>& piece = c.small.pieces[count & 1];
    ptx::mbarrier_wait(ptx::smem_address(&c.barriers.piece_empty[count & 1]), (count >> 1 & 1) ^ 1);
    const bool more = walk.next(piece);
    __syncwarp();
    if (c.lane == 0) {
      ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.piece_full[count & 1]));
      if (more && !by_rows) {
        ptx::mbarrier_wait(query_empty, (count & 1) ^ 1);
        copy_query<T>(maps, piece.query_y, piece.query_z, c.query(), query_full);
      }
    }
    if (by_rows) ptx::named_barrier_sync(kQueryBarrier, kQueryThreads);
    if (!more) return;
    __syncwarp();
    walk.finish(piece, c.small.cuts);
    __syncwarp();
    if (c.lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.rows_full));
    if (by_rows) {
      ptx::mbarrier_wait(query_empty, (count & 1) ^ 1);
      load_query<T, kQueryThreads>(c.p, piece.first_token, piece.row_begin, piece.num_rows,
                                   c.shared + T::kQueryOffset, c.lane);
      ptx::named_barrier_sync(kQueryBarrier, kQueryThreads);
      if (c.lane == 0) ptx::mbarrier_arrive(query_full);
    }
  }
}

/// Warps 2 and 3 of the first warpgroup, when Q is loaded row by row.
template <class T>
__device__ __noinline__ void query_role(const Context<T>& c) {
  for (uint32_t count = 0;; ++count) {
    ptx::named_barrier_sync(kQueryBarrier, kQueryThreads);
    const Piece<T::kRows>& piece = c.small.pieces[count & 1];
    if (!piece.valid) return;
    ptx::mbarrier_wait(ptx::smem_address(&c.barriers.query_empty), (count & 1) ^ 1);
    load_query<T, kQueryThreads>(c.p, piece.first_token, piece.row_begin, piece.num_rows,
                                 c.shared + T::kQueryOffset, c.warp * 32 + c.lane - 32);
    ptx::named_barrier_sync(kQueryBarrier, kQueryThreads);
  }
}

/// copy_role for pages of a few tokens: whole warps.
template <class T>
__device__ __noinline__ void row_copy_role(const Context<T>& c, const TensorMaps& maps,
                                           int copier) {
  RowLoader<T> loader(c.p, maps, c.ring(), ptx::smem_address(c.barriers.full),
                      ptx::smem_address(c.barriers.empty), copier, c.lane);
#pragma unroll 1
  for (uint32_t count = 0;; ++count) {
    const Piece<T::kRows>& piece = c.wait_piece(count);
    if (!piece.valid) return;
    loader.load_piece(piece);
    __syncwarp();
    if (c.lane == 0) c.release_piece(count);
  }
}

template <class T>
__device__ __forceinline__ void copy_role(const Context<T>& c, const TensorMaps& maps, int copier) {
  TileLoader<T> loader(c.p, maps, c.ring(), ptx::smem_address(c.barriers.full),
                       ptx::smem_address(c.barriers.empty), copier);
#pragma unroll 1
  for (uint32_t count = 0;; ++count) {
    const Piece<T::kRows>& piece = c.wait_piece(count);
    if (!piece.valid) break;
    if (count == 0 && copier == 0) trace(kTraceFirstCopy);
    loader.load_piece(piece);
    c.release_piece(count);
  }
  if (copier == 0) trace(kTraceLastCopy);
}

/// One warp, side by side.
template <class T>
__device__ __forceinline__ void init_barriers(SharedBarriers<T>& barriers, const KernelParams& p,
                                              int lane) {
  const int copiers = num_copiers<T>(p);
  static_assert(T::kSlots <= 32, "a lane for every slot");
  if (lane < T::kSlots) {
    ptx::mbarrier_init(ptx::smem_address(&barriers.full[lane]), loads_rows<T>(p) ? copiers : 1);
    ptx::mbarrier_init(ptx::smem_address(&barriers.empty[lane]), 4 * T::kValueWarpgroups);
  }
  if (lane < 2) {
    ptx::mbarrier_init(ptx::smem_address(&barriers.p_full[lane]), 4);
    ptx::mbarrier_init(ptx::smem_address(&barriers.p_empty[lane]), 4 * T::kValueWarpgroups);
    ptx::mbarrier_init(ptx::smem_address(&barriers.piece_full[lane]), 1);
    ptx::mbarrier_init(ptx::smem_address(&barriers.piece_empty[lane]),
                       copiers + 4 + 4 * T::kValueWarpgroups);
  }
  if (lane == 0) {
    ptx::mbarrier_init(ptx::smem_address(&barriers.query_full), 1);
    ptx::mbarrier_init(ptx::smem_address(&barriers.rows_full), 1);
    ptx::mbarrier_init(ptx::smem_address(&barriers.query_empty), 4);
    ptx::mbarrier_init(ptx::smem_address(&barriers.stats_full), 4);
    ptx::mbarrier_init(ptx::smem_address(&barriers.stats_empty), 4 * T::kValueWarpgroups);
  }
  ptx::fence_mbarrier_init();
  ptx::fence_proxy_async();
}

/// The roles meet once, each in its own code, which __syncthreads does not allow.
template <class T>
__device__ __forceinline__ void start_together() {
  ptx::named_barrier_sync(kStartBarrier, T::kThreads);
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    decode_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ KernelParams p) {
  extern __shared__ char shared_raw[];
  __shared__ __align__(8) SharedBarriers<T> barriers;
  // By an offset, not by a cast: so the compiler still knows that this is shared memory.
  char* shared = shared_raw + (0U - ptx::smem_address(shared_raw)) % 1024;
  SmallShared<T>& small = *reinterpret_cast<SmallShared<T>*>(shared + T::kSmallOffset);
  static_assert(sizeof(SmallShared<T>) <= T::kSmallBytes, "SmallShared outgrew its place");

  // The warpgroup index is made uniform, so that each role is one branch.
  const int warpgroup = __shfl_sync(~0U, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0U, threadIdx.x / 32 % 4, 0);
  const Context<T> context{p, barriers, small, shared, warp, static_cast<int>(threadIdx.x % 32)};
  if (warpgroup == 0) {
    ptx::decrease_registers<T::kProducerRegisters>();
    if (warp == 1) {  // the lengths are on their way while the barriers are made
      // Nothing of the kernels before may be read or overwritten until they have ended. The other
      // roles touch global memory only after this warp's first piece.
      ptx::wait_for_dependencies();
      const int worker = p.group_divisor.divide(blockIdx.x);
      PieceWalk<T> walk(p, worker, static_cast<int>(blockIdx.x) - worker * p.group, context.lane);
      start_together<T>();
      plan_role<T>(context, walk, maps);
      return;
    }
    if (warp == 0) {
      if (context.lane == 0) {
        trace(kTraceStart);
        ptx::launch_dependents();
      }
      init_barriers(barriers, p, context.lane);
      if (context.lane < 2) small.cuts[context.lane].valid = 0;
    } else if (warp == 2 && context.lane == 0) {
      ptx::prefetch_tensor_map(&maps.kv);
      ptx::prefetch_tensor_map(&maps.q_nope);
      ptx::prefetch_tensor_map(&maps.q_pe);
    }
    start_together<T>();
    if (!T::kPlain && warp > 1 && p.query_load == QueryLoad::kRows) {
      query_role<T>(context);
    } else if (const int copier = warp == 0 ? 0 : warp - 1; copier < num_copiers<T>(p)) {
      if (loads_rows<T>(p))
        row_copy_role<T>(context, maps, copier);
      else if (context.lane == 0)
        copy_role<T>(context, maps, copier);
    }
    return;
  }
  start_together<T>();
  if (!T::kPlain) ptx::wait_for_dependencies();  // scores read a scale in device memory at once
  if (warpgroup == 1) {
    ptx::increase_registers<T::kScoreRegisters>();
    if constexpr (T::kSwapped) {
      keys::score_role<T>(context);
    } else {
      rows::score_role<T>(context);
      return;
    }
  } else {
    ptx::increase_registers<T::kValueRegisters>();
    if constexpr (T::kSwapped)
      keys::value_role<T>(context);
    else if (warpgroup == 2)
      rows::value_role<T, 0>(context);
    else
      rows::value_role<T, 1>(context);
  }
  const int thread = static_cast<int>(threadIdx.x) - (T::kThreads - 256);
  merge_role<T>(p, small.cuts, shared, thread);
  if (p.token_end != nullptr) store_padding<256>(p, T::kLatent, thread);
  if (thread == 0) trace(kTraceEnd);
}

}  // namespace mla::sm90
