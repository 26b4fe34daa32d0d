// Decode attention on Hopper with swapped operands: keys are the 64 rows of every wgmma, query rows its
// columns, so 16, 32 or 64 rows cost what they are and nothing is padded to 64 on the query side.
//
//   S^T[64 keys x N] = K[64 x D] Q^T[D x N]      O^T[L x N] += V^T[L x 64] P^T[64 x N]
//
// Grid: one CTA a multiprocessor, launched cooperatively. `group` adjacent CTAs form a worker: they read
// the same keys for different row blocks, and neighbours' reads merge on the way to L2. line.cuh gives
// each worker an equal share of all key tiles; reduce.cuh joins the results that were cut.
//
// Roles (warpgroups)      registers      job
//   0  warp 0: copies     40             one thread: pages -> ring, in 8 KB chunks of 64 keys x 64 values
//      warps 1-3: plan    40             pieces -> piece queue; Q -> shared memory
//   1  scores             224 (N=64:152) S^T, softmax, P -> shared memory; lse
//   2, 3  values          240 (N=64:160) O^T; output. N = 64 splits the latent between two warpgroups
//
// Timeline of a tile j (b = j mod 2; N = 64 has one P buffer):
//   copies     wait empty[slot]; copy rope, c0..c7 of tile j+1, j+2, ... as slots come free
//   scores     wait full[slot] x9 -> QK(j) -> free rope slot -> vote/maximum -> wait p_empty[b] ->
//              P(j) -> p_full[b]
//   values     wait p_full[b] -> rescale O if the maximum moved -> PV(j), c0..c7 free one by one ->
//              p_empty[b]
// so QK(j+1) and its softmax run while PV(j) does, and neither waits for memory while the ring holds.
//
// Barriers                arrives                     waits            phase flips
//   full[slot]            the copy engine (bytes)     scores, values   per lap of the ring
//   empty[slot]           4 warps: scores (rope) or   copies           per lap of the ring
//                         values (latent)
//   p_full[b]             4 score warps               values           every second tile
//   p_empty[b]            every value warp            scores           every second tile
//   piece_full[i]         1: plan                     copies, scores,  every second piece
//                                                     values
//   piece_empty[i]        copies, scores, values      plan             every second piece
//   query_full            1: plan, and Q's bytes      scores           every piece
//   rows_full             1: plan                     scores, values   every piece
//   query_empty           4 score warps               plan             every piece
//   stats_full            4 score warps               values           every piece
//   stats_empty           every value warp            scores           every piece
//   partials_full         the copy engine (bytes)     values           every chunk of a merge
//
// Shared memory (traits.cuh): ring kSlots x 8192 | Q N*1152 | P N*128 x 2 (N = 64: 1) | SmallShared N*88 + 512.
// Slots: 25 / 22 / 17 for N = 16 / 32 / 64 at (512, 64). Output is staged through the P buffer of the
// last tile, which is released after it.
#pragma once

#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/line.cuh"
#include "cuda/sm90/load.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/reduce.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/sm90/trace.cuh"
#include "cuda/sm90/traits.cuh"
#include "cuda/sm90/wgmma.cuh"

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
  uint64_t partials_full;
  uint64_t stats_full;
  uint64_t stats_empty;
  Share share;
  int warp_sums[T::kThreads / 32];
};

template <class T>
struct SmallShared {
  Stats<T::kRows> stats;
  Piece<T::kRows> pieces[2];
  CutResult<T::kRows> cuts[2];  // of later pieces, and of the first piece of a result
};

/// What every role needs.
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
};

/// Zeroes the value rows of keys that nobody may own, so that 0 * NaN cannot happen.
template <class T>
__device__ void clear_unowned(const Context<T>& c, const Piece<T::kRows>& piece, int first_key,
                              RingCursor<T::kSlots> tile) {
  const int thread = c.warp * 32 + c.lane;
  const int owned_begin = max(piece.key_begin - first_key, 0);
  const int owned_end = min(piece.key_end - first_key, kTileKeys);
  const int num_clear = owned_begin + kTileKeys - owned_end;
#pragma unroll 1
  for (int chunk = 0; chunk < T::kLatentChunks; ++chunk) {
    const RingCursor<T::kSlots> cursor = tile.ahead(T::kRopeChunks + chunk);
    char* slot = c.shared + cursor.slot * T::kSlotBytes;
    for (int idx = thread; idx < num_clear * 8; idx += 128) {
      const int i = idx / 8;
      const int key = i < owned_begin ? i : owned_end + i - owned_begin;
      *reinterpret_cast<uint4*>(slot + key * 128 + idx % 8 * 16) = uint4{0, 0, 0, 0};
    }
  }
  ptx::fence_proxy_async();
}

/// Warps 1-3 of the first warpgroup: the piece queue, and Q of every piece. Warps 2 and 3 only help when
/// Q cannot be copied in boxes.
template <class T>
__device__ void plan_role(const Context<T>& c, const Share& share, int member, const TensorMaps& maps) {
  constexpr int kPlanThreads = 96;
  const bool by_rows = c.p.query_load == QueryLoad::kRows;
  if (c.warp > 1 && !by_rows) return;
  const uint32_t query_full = ptx::smem_address(&c.barriers.query_full);
  const uint32_t query_empty = ptx::smem_address(&c.barriers.query_empty);
  PieceWalk<T::kRows> walk(c.p, share, member, c.lane);
#pragma unroll 1
  for (uint32_t count = 0;; ++count) {
    Piece<T::kRows>& piece = c.small.pieces[count & 1];
    if (c.warp == 1) {
      ptx::mbarrier_wait(ptx::smem_address(&c.barriers.piece_empty[count & 1]), (count >> 1 & 1) ^ 1);
      const bool more = walk.next(piece);
      __syncwarp();
      if (c.lane == 0) {
        ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.piece_full[count & 1]));
        if (more && !by_rows) {
          ptx::mbarrier_wait(query_empty, (count & 1) ^ 1);
          copy_query<T>(c.p, maps, walk.first_token(), walk.first_head(), c.query(), query_full);
        }
      }
      __syncwarp();
      if (more) {
        walk.finish(piece);
        __syncwarp();
        if (c.lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.rows_full));
      } else if (!by_rows) {
        return;
      }
    }
    if (!by_rows) continue;
    ptx::named_barrier_sync(kQueryBarrier, kPlanThreads);
    if (!piece.valid) return;
    ptx::mbarrier_wait(query_empty, (count & 1) ^ 1);
    load_query<T, kPlanThreads>(c.p, piece, c.shared + T::kQueryOffset, threadIdx.x - 32);
    ptx::named_barrier_sync(kQueryBarrier, kPlanThreads);
    if (threadIdx.x == 32) ptx::mbarrier_arrive(query_full);
  }
}

template <class T>
__device__ void copy_role(const Context<T>& c, const CUtensorMap* kv_map) {
  TileLoader<T> loader(c.p, kv_map, c.ring(), ptx::smem_address(c.barriers.full),
                       ptx::smem_address(c.barriers.empty));
  for (uint32_t count = 0;; ++count) {
    const Piece<T::kRows>& piece = c.wait_piece(count);
    if (!piece.valid) break;
    if (count == 0) trace(kTraceFirstCopy);
    loader.load_piece(piece);
    c.release_piece(count);
  }
  trace(kTraceLastCopy);
}

/// End of a piece: the sums of its columns, lse, and the factor of O.
template <class T>
__device__ void finish_scores(const Context<T>& c, const Piece<T::kRows>& piece,
                              const SoftmaxState<T::kRows>& state, uint32_t stats_phase) {
  const KernelParams& p = c.p;
  Stats<T::kRows>& stats = c.small.stats;
#pragma unroll
  for (int j = 0; j < T::kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = state.sum[2 * j + i];
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0U, sum, step);
      if (c.lane < 4) {
        const int column = column_of(j, i, c.lane);
        stats.warp_max[c.warp][column] = sum;
        if (c.warp == 0) stats.row_max[column] = state.max[2 * j + i];
      }
    }
  }
  ptx::mbarrier_wait(ptx::smem_address(&c.barriers.stats_empty), stats_phase ^ 1);
  ptx::named_barrier_sync(kScoreBarrier, 128);
  const int r = c.warp * 32 + c.lane;
  if (r < T::kRows) {
    const float sum = (stats.warp_max[0][r] + stats.warp_max[1][r]) +
                      (stats.warp_max[2][r] + stats.warp_max[3][r]);
    const bool empty = !(sum > 0.0F) && stats.row_max[r] == -INFINITY;
    float lse = empty ? -INFINITY : (stats.row_max[r] + __log2f(sum)) * kLn2;
    float factor = empty ? 0.0F : 1.0F / sum;
    if (!piece.whole) {
      const int slot = partial_slot(piece.first_cta, p.group, piece.rank);
      __stcg(p.partial_lse + slot * T::kRows + r, r < piece.num_rows ? lse : -INFINITY);
    } else if (r < piece.num_rows) {
      factor *= join_sink(p.sinks, piece.row_head[r], lse) * scale_of(p.bmm2_scale, p.bmm2_scale_pointer);
      if (p.lse != nullptr) {
        p.lse[row_offset(p.lse_stride, piece.row_token[r], piece.row_head[r])] = lse * p.lse_factor;
      }
    }
    stats.final_scale[r] = factor;
  }
  __syncwarp();
  if (c.lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.stats_full));
}

template <class T>
__device__ void score_role(const Context<T>& c) {
  using Mma = Wgmma<T::kRows, typename T::Element>;
  const KernelParams& p = c.p;
  Stats<T::kRows>& stats = c.small.stats;
  const float scale = scale_of(p.bmm1_scale, p.bmm1_scale_pointer);
  const bool transforms = p.logits_soft_cap > 0 || p.alibi_slopes != nullptr || !(scale > 0.0F);
  const float scale_log2 = transforms ? 1.0F : scale * kLog2E;
  const uint32_t full = ptx::smem_address(c.barriers.full);
  const uint32_t empty = ptx::smem_address(c.barriers.empty);
  const uint64_t query = matrix_descriptor(c.query(), 16, 1024);

  RingCursor<T::kSlots> cursor;
  uint32_t tile_count = 0;
  SoftmaxState<T::kRows> state;
  for (uint32_t count = 0;; ++count) {
    const Piece<T::kRows>& piece = c.wait_piece(count);
    if (!piece.valid) return;
    const int tile_end = piece.tile_end;
    const int plain_begin = piece.plain_begin;
    const int plain_end = piece.plain_end;
    state.reset();
    ptx::mbarrier_wait(ptx::smem_address(&c.barriers.rows_full), count & 1);
    ptx::mbarrier_wait(ptx::smem_address(&c.barriers.query_full), count & 1);
    if (p.alibi_slopes != nullptr) {
      const int r = c.warp * 32 + c.lane;
      if (r < T::kRows) stats.slope[r] = __ldg(p.alibi_slopes + piece.row_head[r]) * kLog2E;
      ptx::named_barrier_sync(kScoreBarrier, 128);
    }
    if (threadIdx.x == 128) trace(kTraceQuery);

#pragma unroll 1
    for (int tile = piece.tile_begin; tile < tile_end; ++tile) {
      const int first_key = tile * kTileKeys;
      const RingCursor<T::kSlots> tile_start = cursor;
      float s[T::kRows / 2];
#pragma unroll
      for (int i = 0; i < T::kRows / 2; ++i) s[i] = 0.0F;
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < T::kChunks; ++i) {
        ptx::mbarrier_wait(full + cursor.slot * 8, cursor.phase);
        wgmma_fence();
        const uint64_t keys = matrix_descriptor(c.ring() + cursor.slot * T::kSlotBytes, 8192, 1024);
        const uint64_t q = query + (chunk_column<T>(i) * T::kRows * 128 >> 4);
#pragma unroll
        for (int k = 0; k < 4; ++k) Mma::template ss<0>(s, keys + (k * 32 >> 4), q + (k * 32 >> 4));
        cursor.advance();
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (threadIdx.x == 128 && tile == piece.tile_begin) trace(kTraceFirstScores);
      if (T::kRopeChunks > 0 && c.lane == 0) ptx::mbarrier_arrive(empty + tile_start.slot * 8);
      if (tile + 1 == tile_end && c.lane == 0) {
        ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.query_empty));
      }

      if (transforms) {
        transform_scores(p, stats, piece, scale, first_key, c.warp, c.lane, s);
      }
      if (first_key < plain_begin || first_key + kTileKeys > plain_end) {
        mask_scores(piece, first_key, c.warp, c.lane, s);
      }
      bool exceeds = false;
#pragma unroll
      for (int i = 0; i < T::kRows / 2; ++i) {
        exceeds |= s[i] * scale_log2 > state.max[i / 4 * 2 + i % 2] + kSlack;
      }
      const int b = tile_count % T::kProbabilityBuffers;
      const uint32_t lap = tile_count / T::kProbabilityBuffers & 1;
      ptx::mbarrier_wait(ptx::smem_address(&c.barriers.p_empty[b]), lap ^ 1);
      const bool moves = ptx::named_barrier_or(kScoreBarrier, 128, exceeds);
      if (moves) move_maxima(stats, b, scale_log2, c.warp, c.lane, s, state);
      if (c.warp == 0 && c.lane == 0) stats.any_rescale[b] = moves;
      store_probabilities<T>(c.probabilities(b), scale_log2, c.warp, c.lane, s, state);
      if (first_key < piece.key_begin || first_key + kTileKeys > piece.key_end) {
        clear_unowned(c, piece, first_key, tile_start);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (c.lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.p_full[b]));
      ++tile_count;
    }
    if (piece.tile_begin >= tile_end && c.lane == 0) {
      ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.query_empty));
    }
    finish_scores(c, piece, state, count & 1);
    if (c.lane == 0) c.release_piece(count);
    if (threadIdx.x == 128) trace(kTraceScoresDone);
  }
}

/// A finished piece: to out, or to this CTA's partial slot. `buffer` is the P buffer of its last tile,
/// -1 when it has none.
template <class T>
__device__ void store_piece(const Context<T>& c, const Piece<T::kRows>& piece,
                            const float (&o)[T::kValueChunks][T::kRows / 2], int member, int thread,
                            int buffer) {
  const KernelParams& p = c.p;
  const Stats<T::kRows>& stats = c.small.stats;
  if (!piece.whole) {
    const int64_t slot = partial_slot(piece.first_cta, p.group, piece.rank);
    store_partial<T>(p.partial_out + slot * T::kLatent * T::kRows, stats, o, member, c.warp, c.lane);
    keep_cut<T>(c.small.cuts[piece.rank == 0 ? 1 : 0], piece, thread);
    announce_partial<T::kValueThreads>(p, piece.first_cta, thread);
    return;
  }
  if (p.out_vector_stores && buffer >= 0) {
    char* stage =
        c.shared + T::kProbabilityOffset + buffer * T::kProbabilityBytes + member * T::kStageBytes;
    store_staged<T>(p, piece, stats, o, member, stage, c.warp, c.lane);
    return;
  }
  // f32 output, unaligned rows and rows without keys pass through a partial slot of their own.
  float* partial =
      p.partial_out + (2 * gridDim.x + static_cast<int64_t>(blockIdx.x)) * T::kLatent * T::kRows;
  store_partial<T>(partial, stats, o, member, c.warp, c.lane);
  ptx::named_barrier_sync(kValueBarrier, T::kValueThreads);
  store_elements<T>(p, piece, partial, thread);
  ptx::named_barrier_sync(kValueBarrier, T::kValueThreads);
}

template <class T>
__device__ void value_role(const Context<T>& c, int member) {
  using Mma = Wgmma<T::kRows, typename T::Element>;
  const KernelParams& p = c.p;
  Stats<T::kRows>& stats = c.small.stats;
  const int thread = member * 128 + c.warp * 32 + c.lane;
  const uint32_t full = ptx::smem_address(c.barriers.full);
  const uint32_t empty = ptx::smem_address(c.barriers.empty);

  RingCursor<T::kSlots> tile_start;
  uint32_t tile_count = 0;
  float o[T::kValueChunks][T::kRows / 2];
  for (uint32_t count = 0;; ++count) {
    const Piece<T::kRows>& piece = c.wait_piece(count);
    if (!piece.valid) break;
    const int tile_end = piece.tile_end;
    int last_buffer = -1;
#pragma unroll
    for (int i = 0; i < T::kValueChunks; ++i) {
#pragma unroll
      for (int e = 0; e < T::kRows / 2; ++e) o[i][e] = 0.0F;
    }
#pragma unroll 1
    for (int tile = piece.tile_begin; tile < tile_end; ++tile) {
      const int b = tile_count % T::kProbabilityBuffers;
      const uint32_t lap = tile_count / T::kProbabilityBuffers & 1;
      ptx::mbarrier_wait(ptx::smem_address(&c.barriers.p_full[b]), lap);
      if (stats.any_rescale[b]) {
#pragma unroll
        for (int j = 0; j < T::kRows / 8; ++j) {
          const float f0 = stats.rescale[b][column_of(j, 0, c.lane)];
          const float f1 = stats.rescale[b][column_of(j, 1, c.lane)];
#pragma unroll
          for (int i = 0; i < T::kValueChunks; ++i) {
            o[i][4 * j] *= f0;
            o[i][4 * j + 1] *= f1;
            o[i][4 * j + 2] *= f0;
            o[i][4 * j + 3] *= f1;
          }
        }
      }
      const uint64_t probabilities = matrix_descriptor(c.probabilities(b), 16, 1024);
      const RingCursor<T::kSlots> first =
          tile_start.ahead(T::kRopeChunks + member);
      RingCursor<T::kSlots> cursor = first;
      RingCursor<T::kSlots> done = first;
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < T::kValueChunks; ++i) {
        // The scores waited for this copy already; this makes its bytes visible to this warpgroup.
        ptx::mbarrier_wait(full + cursor.slot * 8, cursor.phase);
        wgmma_fence();
        const uint64_t values = matrix_descriptor(c.ring() + cursor.slot * T::kSlotBytes, 8192, 1024);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          Mma::template ss<1>(o[i], values + (k * 2048 >> 4), probabilities + (k * 32 >> 4));
        }
        wgmma_commit();
        cursor = cursor.ahead(T::kValueWarpgroups);
        // Two chunks stay in flight; a slot is free as soon as its product is done.
        if (i > 0) {
          wgmma_wait<1>();
          if (c.lane == 0) ptx::mbarrier_arrive(empty + done.slot * 8);
          done = done.ahead(T::kValueWarpgroups);
        }
      }
      wgmma_wait<0>();
      if (c.lane == 0) ptx::mbarrier_arrive(empty + done.slot * 8);
      // The last tile's P buffer stages the output first.
      last_buffer = b;
      if (tile + 1 < tile_end && c.lane == 0) {
        ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.p_empty[b]));
      }
      tile_start = tile_start.ahead(T::kChunks);
      ++tile_count;
    }

    if (thread == 0) trace(kTraceValuesDone);
    ptx::mbarrier_wait(ptx::smem_address(&c.barriers.stats_full), count & 1);
    store_piece(c, piece, o, member, thread, last_buffer);
    __syncwarp();
    if (c.lane == 0) {
      if (last_buffer >= 0) ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.p_empty[last_buffer]));
      ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.stats_empty));
      c.release_piece(count);
    }
    if (thread == 0) trace(kTraceStored);
  }

  store_padding<T::kValueThreads>(p, T::kLatent, thread);
  // The ring and Q are idle from here on: they serve as scratch.
  ReduceScratch reduce{reinterpret_cast<float*>(c.shared), T::kQueryOffset,
                       reinterpret_cast<float*>(c.shared + T::kQueryOffset),
                       ptx::smem_address(&c.barriers.partials_full), 0};
  ptx::named_barrier_sync(kValueBarrier, T::kValueThreads);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (c.small.cuts[i].valid) {
      reduce_result<T>(p, c.small.cuts[i], reduce, thread);
    }
  }
  if (thread == 0) trace(kTraceEnd);
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    decode_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ KernelParams p) {
  extern __shared__ char shared_raw[];
  __shared__ __align__(8) SharedBarriers<T> barriers;
  char* shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared_raw) + 1023) &
                                         ~static_cast<uintptr_t>(1023));
  SmallShared<T>& small = *reinterpret_cast<SmallShared<T>*>(shared + T::kStatsOffset);
  static_assert(sizeof(SmallShared<T>) <= T::kStatsBytes, "SmallShared outgrew its place");

  if (threadIdx.x == 0) {
    trace(kTraceStart);
    ptx::prefetch_tensor_map(&maps.kv);
    for (int s = 0; s < T::kSlots; ++s) {
      ptx::mbarrier_init(ptx::smem_address(&barriers.full[s]), 1);
      ptx::mbarrier_init(ptx::smem_address(&barriers.empty[s]), 4);
    }
    for (int b = 0; b < 2; ++b) {
      ptx::mbarrier_init(ptx::smem_address(&barriers.p_full[b]), 4);
      ptx::mbarrier_init(ptx::smem_address(&barriers.p_empty[b]), 4 * T::kValueWarpgroups);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(ptx::smem_address(&barriers.piece_full[i]), 1);
      ptx::mbarrier_init(ptx::smem_address(&barriers.piece_empty[i]), 5 + 4 * T::kValueWarpgroups);
      small.cuts[i].valid = 0;
    }
    ptx::mbarrier_init(ptx::smem_address(&barriers.query_full), 1);
    ptx::mbarrier_init(ptx::smem_address(&barriers.rows_full), 1);
    ptx::mbarrier_init(ptx::smem_address(&barriers.partials_full), 1);
    ptx::mbarrier_init(ptx::smem_address(&barriers.query_empty), 4);
    ptx::mbarrier_init(ptx::smem_address(&barriers.stats_full), 4);
    ptx::mbarrier_init(ptx::smem_address(&barriers.stats_empty), 4 * T::kValueWarpgroups);
    ptx::fence_mbarrier_init();
    ptx::fence_proxy_async();
  }
  // find_share ends with a barrier, which also publishes the initialised barriers.
  const int worker = p.group_divisor.divide(blockIdx.x);
  find_share<T::kRows, T::kThreads>(p, worker, barriers.warp_sums, &barriers.share);
  if (threadIdx.x == 0) trace(kTraceShare);

  // The warpgroup index is made uniform, so that each role is one branch.
  const int warpgroup = __shfl_sync(~0U, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0U, threadIdx.x / 32 % 4, 0);
  const Context<T> context{p, barriers, small, shared, warp, static_cast<int>(threadIdx.x % 32)};
  if (warpgroup == 0) {
    ptx::decrease_registers<T::kProducerRegisters>();
    if (warp > 0) {
      plan_role<T>(context, barriers.share, static_cast<int>(blockIdx.x) - worker * p.group, maps);
    } else if (threadIdx.x == 0) {
      copy_role<T>(context, &maps.kv);
    }
  } else if (warpgroup == 1) {
    ptx::increase_registers<T::kScoreRegisters>();
    score_role<T>(context);
  } else {
    ptx::increase_registers<T::kValueRegisters>();
    value_role<T>(context, warpgroup - 2);
  }
}

}  // namespace mla::sm90
