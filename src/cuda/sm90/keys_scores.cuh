// Swapped operands, 16 or 32 query rows: keys are the 64 rows of every wgmma, query rows its
// columns.
//
//   S^T[64 keys x N] = K[64 x D] Q^T[D x N]      O^T[L x N] += V^T[L x 64] P^T[64 x N]
//
// A thread holds, of a 64-key x N score tile, keys 16*warp + lane/4 (+8) and columns 8*j +
// 2*(lane%4) (+1)
// - so N/4 columns, two keys each. The maximum m of a column moves only when a score exceeds it by
// more than kSlack: most tiles then need one vote and no exchange. The decision is made per column,
// so a row's arithmetic does not depend on its neighbours in the block.
#pragma once

#include "cuda/sm90/context.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace mla::sm90::keys {

template <int kRows>
struct SoftmaxState {
  float max[kRows / 4];  // log2 units; the same in every thread that shares the column
  float sum[kRows / 4];  // of this thread's keys only
};

/// Column of register pair element i of group j.
__device__ __forceinline__ int column_of(int j, int i, int lane) {
  return 8 * j + 2 * (lane % 4) + i;
}

template <class T>
__device__ __forceinline__ void transform_scores(const Context<T>& c, const Piece<T::kRows>& piece,
                                                 float scale, int first_key,
                                                 float (&s)[T::kRows / 2]) {
  const KernelParams& p = c.p;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = first_key + 16 * c.warp + c.lane / 4 + 8 * half;
    const auto position = static_cast<int>(p.cp.world > 1 ? global_position(p.cp, key) : key);
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = column_of(j, i, c.lane);
        const float slope = p.alibi_slopes != nullptr ? c.small.stats.slope[column] : 0.0F;
        float& x = s[4 * j + 2 * half + i];
        x = transform_score(p, x, scale, slope, position - piece.row_position[column]);
      }
    }
  }
}

/// Scores of keys that a row does not see become -inf, by selection.
template <class T>
__device__ __forceinline__ void mask_scores(const Context<T>& c, const Piece<T::kRows>& piece,
                                            int first_key, float (&s)[T::kRows / 2]) {
  const int key = first_key + 16 * c.warp + c.lane / 4;
#pragma unroll
  for (int j = 0; j < T::kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = column_of(j, i, c.lane);
      const int begin = T::kPlain ? 0 : piece.row_key_begin[column];
      const int end = piece.row_key_end[column];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (key + 8 * half < begin || key + 8 * half >= end) s[4 * j + 2 * half + i] = -INFINITY;
      }
    }
  }
}

/// Moves the maxima of the columns that need it and leaves the factors for the value warpgroup in
/// stats.rescale[buffer]. All 128 threads.
template <class T>
__device__ __forceinline__ void move_maxima(const Context<T>& c, int buffer, float scale_log2,
                                            const float (&s)[T::kRows / 2],
                                            SoftmaxState<T::kRows>& state) {
  Stats<T::kRows>& stats = c.small.stats;
#pragma unroll
  for (int j = 0; j < T::kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float column_max = fmaxf(s[4 * j + i], s[4 * j + 2 + i]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        column_max = fmaxf(column_max, __shfl_xor_sync(~0U, column_max, step));
      }
      if (c.lane < 4) stats.warp_max[c.warp][column_of(j, i, c.lane)] = column_max * scale_log2;
    }
  }
  ptx::named_barrier_sync(kScoreBarrier, 128);
#pragma unroll
  for (int j = 0; j < T::kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = column_of(j, i, c.lane);
      const float tile_max = fmaxf(fmaxf(stats.warp_max[0][column], stats.warp_max[1][column]),
                                   fmaxf(stats.warp_max[2][column], stats.warp_max[3][column]));
      const float old_max = state.max[2 * j + i];
      const bool moves =
          tile_max > old_max + kSlack;  // also when old_max is -inf and a key is seen
      const float new_max = moves ? tile_max : old_max;
      const float factor = moves ? ptx::exp2_approx(old_max - new_max) : 1.0F;
      state.max[2 * j + i] = new_max;
      state.sum[2 * j + i] *= factor;
      if (c.warp == 0 && c.lane < 4) stats.rescale[buffer][column] = factor;
    }
  }
}

/// P = exp2(s - m), summed in f32 and stored as [row][64 keys], 128-byte-swizzled.
template <class T>
__device__ __forceinline__ void store_probabilities(const Context<T>& c, uint32_t probabilities,
                                                    float scale_log2,
                                                    const float (&s)[T::kRows / 2],
                                                    SoftmaxState<T::kRows>& state) {
#pragma unroll
  for (int j = 0; j < T::kRows / 8; ++j) {
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float m = state.max[2 * j + i % 2];
      // A column that has seen nothing has m = -inf and only -inf scores.
      e[i] = ptx::exp2_approx(fmaf(s[4 * j + i], scale_log2, m == -INFINITY ? 0.0F : -m));
    }
    state.sum[2 * j] += e[0] + e[2];
    state.sum[2 * j + 1] += e[1] + e[3];
    const int row = 8 * j + c.lane % 8;
    const uint32_t vector = (2 * c.warp + (c.lane >> 3 & 1)) ^ (row & 7);
    ptx::stmatrix_x2_trans(probabilities + row * 128 + (vector << 4),
                           pack<typename T::Element>(e[0], e[1]),
                           pack<typename T::Element>(e[2], e[3]));
  }
}

/// End of a piece: the sums of its columns, lse, and the factor of O.
template <class T>
__device__ __forceinline__ void finish_scores(const Context<T>& c, const Piece<T::kRows>& piece,
                                              const SoftmaxState<T::kRows>& state,
                                              uint32_t stats_phase) {
  Stats<T::kRows>& stats = c.small.stats;
  // The values have read what the piece before left, so the sums of that piece were read too.
  ptx::mbarrier_wait(ptx::smem_address(&c.barriers.stats_empty), stats_phase ^ 1);
  float row_max = 0.0F;  // of the row that this thread finishes
#pragma unroll
  for (int j = 0; j < T::kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = state.sum[2 * j + i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0U, sum, step);
      const int column = column_of(j, i, c.lane);
      if (c.lane < 4) stats.warp_sum[c.warp][column] = sum;
      const float max = __shfl_sync(~0U, state.max[2 * j + i], (c.lane % 8) / 2);
      if (c.lane / 8 == j && c.lane % 2 == i) row_max = max;
    }
  }
  ptx::named_barrier_sync(kScoreBarrier, 128);
  const int r = c.lane;
  if (c.warp == 0 && r < T::kRows) {
    const float sum = (stats.warp_sum[0][r] + stats.warp_sum[1][r]) +
                      (stats.warp_sum[2][r] + stats.warp_sum[3][r]);
    stats.final_scale[r] = finish_row<T>(c.p, piece, r, row_max, sum);
  }
  __syncwarp();
  if (c.lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.stats_full));
}

template <class T>
__device__ __forceinline__ void score_role(const Context<T>& c) {
  using Mma = Wgmma<T::kRows, typename T::Element>;
  const KernelParams& p = c.p;
  Stats<T::kRows>& stats = c.small.stats;
  const auto [scale, transforms, scale_log2] = score_scale<T>(p);
  const uint32_t query = ptx::uniform(matrix_operand(c.query()));

  RingCursor<T::kSlots> cursor;
  uint32_t tile_count = 0;
  TraceLaps laps(threadIdx.x == 128);
  SoftmaxState<T::kRows> state;
#pragma unroll 1
  for (uint32_t count = 0;; ++count) {
    const Piece<T::kRows>& piece = c.wait_piece(count);
    if (!piece.valid) {
      laps.write(kSumWaitFull, kSumStoreP);
      return;
    }
    const bool leads = c.lane == 0;
    const int tile_begin = piece.tile_begin;
    const int tile_end = piece.tile_end;
    const int plain_begin = piece.plain_begin;
    const int plain_end = piece.plain_end;
#pragma unroll
    for (int i = 0; i < T::kRows / 4; ++i) {
      state.max[i] = -INFINITY;
      state.sum[i] = 0.0F;
    }
    ptx::mbarrier_wait(ptx::smem_address(&c.barriers.query_full), count & 1);
    ptx::mbarrier_wait(ptx::smem_address(&c.barriers.rows_full), count & 1);
    load_slopes(c, piece);
    if (threadIdx.x == 128) trace(kTraceQuery);

#pragma unroll 1
    for (int tile = tile_begin; tile < tile_end; ++tile) {
      const int first_key = tile * kTileKeys;
      const RingCursor<T::kSlots> tile_start = cursor;
      float s[T::kRows / 2];
#pragma unroll
      for (int i = 0; i < T::kRows / 2; ++i) s[i] = 0.0F;
      wgmma_fence();
#pragma unroll
      for (int g = 0; g < T::kGroups; ++g) {
        c.wait_full(cursor);
        laps.lap(kSumWaitFull);
        wgmma_fence();
        const uint32_t keys = ptx::uniform(matrix_operand(c.chunk(cursor, 0)));
#pragma unroll
        for (int i = 0; i < T::kGroupChunks; ++i) {
          const uint32_t k = keys + (i * T::kChunkBytes >> 4);
          const uint32_t q = query + ((g * T::kGroupChunks + i) * T::kQueryChunkBytes >> 4);
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            Mma::template ss<0, 0>(s, k + (step * 32 >> 4), q + (step * 32 >> 4));
          }
        }
        cursor.advance();
      }
      wgmma_commit();
      wgmma_wait<0>();
      laps.lap(kSumProducts);
      if (threadIdx.x == 128 && tile == tile_begin) trace(kTraceFirstScores);
      if (tile + 1 == tile_end && leads) {
        ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.query_empty));
      }

      if (transforms) transform_scores(c, piece, scale, first_key, s);
      if (first_key < plain_begin || first_key + kTileKeys > plain_end) {
        mask_scores(c, piece, first_key, s);
      }
      bool exceeds = false;
#pragma unroll
      for (int i = 0; i < T::kRows / 2; ++i) {
        exceeds |= s[i] * scale_log2 > state.max[i / 4 * 2 + i % 2] + kSlack;
      }
      const int b = tile_count & 1;
      laps.lap(kSumSoftmax);
      ptx::mbarrier_wait(ptx::smem_address(&c.barriers.p_empty[b]), (tile_count >> 1 & 1) ^ 1);
      laps.lap(kSumWaitEmpty);
      const bool moves = ptx::named_barrier_or(kScoreBarrier, 128, exceeds);
      if (moves) move_maxima(c, b, scale_log2, s, state);
      if (c.warp == 0 && c.lane == 0) stats.any_rescale[b][0] = moves;
      store_probabilities(c, c.probabilities(b), scale_log2, s, state);
      if (first_key < piece.key_begin || first_key + kTileKeys > piece.key_end) {
        clear_unowned(c, piece, first_key, tile_start);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (leads) ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.p_full[b]));
      laps.lap(kSumStoreP);
      ++tile_count;
    }
    if (tile_begin >= tile_end && leads)
      ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.query_empty));
    finish_scores(c, piece, state, count & 1);
    if (leads) c.release_piece(count);
    if (threadIdx.x == 128) trace(kTraceScoresDone);
  }
}

}  // namespace mla::sm90::keys
