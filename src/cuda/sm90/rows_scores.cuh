// 64 query rows as the 64 rows of every wgmma.
//
//   S[64 x 64 keys] = Q[64 x D] K^T[D x 64]      O[64 x L] += P[64 x 64] V[64 x L]
//
// A thread holds rows 16*warp + lane/4 (+8) of S and O: a row belongs to one warp of the score
// warpgroup and to the warp of the same number of each value warpgroup, so a softmax needs no
// exchange between warps. The maximum m of a row moves only when a score exceeds it by more than
// kSlack.
//
// Plain kernels keep the first kRegisterChunks chunks of Q in the score warpgroup's registers: that
// makes room for as many more slots, and copies stay ahead of the tensor cores.
#pragma once

#include "cuda/sm90/context.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace mla::sm90::rows {

/// Scores of the tile: index 4*j + 2*half + i is row lane/4 + 8*half, key 8*j + 2*(lane%4) + i.
using Scores = float[32];

template <class T>
__device__ __forceinline__ void transform_scores(const Context<T>& c, const Piece<T::kRows>& piece,
                                                 float scale, int first_key, Scores& s) {
  const KernelParams& p = c.p;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int r = 16 * c.warp + c.lane / 4 + 8 * half;
    const float slope = p.alibi_slopes != nullptr ? c.small.stats.slope[r] : 0.0F;
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const int key = first_key + 8 * (e / 2) + 2 * (c.lane % 4) + e % 2;
      const auto position = static_cast<int>(p.cp.world > 1 ? global_position(p.cp, key) : key);
      const float x = half == 0 ? s[4 * (e / 2) + e % 2] : s[4 * (e / 2) + 2 + e % 2];
      const float y = transform_score(p, x, scale, slope, position - piece.row_position[r]);
      if (half == 0)
        s[4 * (e / 2) + e % 2] = y;
      else
        s[4 * (e / 2) + 2 + e % 2] = y;
    }
  }
}

/// Scores of keys that a row does not see become -inf, by selection.
template <class T>
__device__ __forceinline__ void mask_scores(const Context<T>& c, const Piece<T::kRows>& piece,
                                            int first_key, Scores& s) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = 16 * c.warp + c.lane / 4 + 8 * half;
    const int begin = T::kPlain ? 0 : piece.row_key_begin[r] - first_key - 2 * (c.lane % 4);
    const int end = piece.row_key_end[r] - first_key - 2 * (c.lane % 4);
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const int key = 8 * (e / 2) + e % 2;
      if ((!T::kPlain && key < begin) || key >= end) s[4 * (e / 2) + 2 * half + e % 2] = -INFINITY;
    }
  }
}

/// Q fragments of one chunk from a ring slot: one ldmatrix for each 16 values.
__device__ __forceinline__ void load_fragments(uint32_t slot, int warp, int lane,
                                               uint32_t (&q)[4][4]) {
  const int row = 16 * warp + lane % 16;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint32_t vector = (2 * step + lane / 16) ^ (row & 7);
    ptx::ldmatrix_x4(q[step], slot + row * 128 + (vector << 4));
  }
}

template <class T>
__device__ __forceinline__ void score_role(const Context<T>& c) {
  using Mma = Wgmma<64, typename T::Element>;
  using Element = typename T::Element;
  const KernelParams& p = c.p;
  Stats<T::kRows>& stats = c.small.stats;
  const auto [scale, transforms, scale_log2] = score_scale<T>(p);
  const uint32_t query = ptx::uniform(matrix_operand(c.query()));
  const uint32_t probabilities = c.probabilities(0);
  const int row = 16 * c.warp + c.lane / 4;

  RingCursor<T::kSlots> cursor;
  uint32_t tile_count = 0;
  TraceLaps laps(threadIdx.x == 128);
  uint32_t q[T::kRegisterChunks > 0 ? T::kRegisterChunks : 1][4][4];
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
    float max[2] = {-INFINITY, -INFINITY};  // log2 units
    float sum[2] = {0.0F, 0.0F};            // of this thread's keys only
    const RingCursor<T::kSlots> query_start = cursor;
#pragma unroll
    for (int i = 0; i < T::kRegisterChunks; ++i) {
      if (i % T::kGroupChunks == 0) c.wait_full(cursor);
      load_fragments(c.chunk(cursor, i % T::kGroupChunks), c.warp, c.lane, q[i]);
      if (i % T::kGroupChunks == T::kGroupChunks - 1 || i == T::kRegisterChunks - 1)
        cursor.advance();
    }
    // Only after a wgmma has used the fragments: an arrival overtakes an ldmatrix that waits for
    // the shared memory behind the operands of other warpgroups' wgmmas, and the slot would be
    // overwritten too early. As many arrivals as the values make of a slot: kValueWarpgroups lanes
    // of each warp call this.
    const auto release_query = [&c, query_start] {
#pragma unroll
      for (int g = 0; g < T::kRegisterGroups; ++g) c.release(query_start.ahead(g));
    };
    ptx::mbarrier_wait(ptx::smem_address(&c.barriers.query_full), count & 1);
    ptx::mbarrier_wait(ptx::smem_address(&c.barriers.rows_full), count & 1);
    load_slopes(c, piece);
    if (threadIdx.x == 128) trace(kTraceQuery);

#pragma unroll 1
    for (int tile = tile_begin; tile < tile_end; ++tile) {
      const int first_key = tile * kTileKeys;
      const RingCursor<T::kSlots> tile_start = cursor;
      Scores s;
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = 0.0F;
      wgmma_fence();
#pragma unroll
      for (int g = 0; g < T::kGroups; ++g) {
        // Deferred values begin when most of this QK is in the tensor cores' queue: then they have
        // work while the softmax of this tile runs, and not both products at once before it.
        if (g == T::kGroups - 1 && p.defer_values && tile > tile_begin && c.lane == 0) {
          ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.p_full[0]));
        }
        c.wait_full(cursor);
        laps.lap(kSumWaitFull);
        wgmma_fence();
        const uint32_t keys = ptx::uniform(matrix_operand(c.chunk(cursor, 0)));
#pragma unroll
        for (int i = 0; i < T::kGroupChunks; ++i) {
          const int chunk = g * T::kGroupChunks + i;
          const uint32_t k = keys + (i * T::kChunkBytes >> 4);
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            if (chunk < T::kRegisterChunks) {
              Mma::template rs<0>(s, q[chunk < T::kRegisterChunks ? chunk : 0][step],
                                  k + (step * 32 >> 4));
            } else {
              const uint32_t a = query + ((chunk - T::kRegisterChunks) * T::kQueryChunkBytes >> 4);
              Mma::template ss<0, 0>(s, a + (step * 32 >> 4), k + (step * 32 >> 4));
            }
          }
        }
        cursor.advance();
      }
      wgmma_commit();
      wgmma_wait<0>();
      laps.lap(kSumProducts);
      if (threadIdx.x == 128 && tile == tile_begin) trace(kTraceFirstScores);
      if (tile == tile_begin && c.lane < T::kValueWarpgroups) release_query();
      if (tile + 1 == tile_end && leads) {
        ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.query_empty));
      }

      if (transforms) transform_scores(c, piece, scale, first_key, s);
      if (first_key < plain_begin || first_key + kTileKeys > plain_end) {
        mask_scores(c, piece, first_key, s);
      }
      float tile_max[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float m[4];  // side by side
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* two = &s[8 * e + 2 * half];
          m[e] = fmaxf(fmaxf(two[0], two[1]), fmaxf(two[4], two[5]));
        }
        tile_max[half] = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3])) * scale_log2;
      }
      const bool moves =
          __any_sync(~0U, tile_max[0] > max[0] + kSlack || tile_max[1] > max[1] + kSlack);
      float factor[2] = {1.0F, 1.0F};
      if (moves) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          tile_max[half] = fmaxf(tile_max[half], __shfl_xor_sync(~0U, tile_max[half], 1));
          tile_max[half] = fmaxf(tile_max[half], __shfl_xor_sync(~0U, tile_max[half], 2));
          // Also when max is -inf and a key is seen.
          if (tile_max[half] > max[half] + kSlack) {
            factor[half] = ptx::exp2_approx(max[half] - tile_max[half]);
            max[half] = tile_max[half];
            sum[half] *= factor[half];
          }
        }
      }
      uint32_t packed[16];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // A row that has seen nothing has max = -inf and only -inf scores.
        const float m = max[half] == -INFINITY ? 0.0F : -max[half];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float e0 = ptx::exp2_approx(fmaf(s[4 * j + 2 * half], scale_log2, m));
          const float e1 = ptx::exp2_approx(fmaf(s[4 * j + 2 * half + 1], scale_log2, m));
          sum[half] += e0 + e1;
          packed[2 * j + half] = pack<Element>(e0, e1);
        }
      }
      // P is finished before the wait: the compiler would move the work behind it.
#pragma unroll
      for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(packed[i]));
      laps.lap(kSumSoftmax);
      // The values of the tile before have read P and the factors.
      ptx::mbarrier_wait(ptx::smem_address(&c.barriers.p_empty[0]), (tile_count & 1) ^ 1);
      laps.lap(kSumWaitEmpty);
      if (moves && c.lane % 4 == 0) {
        stats.rescale[0][row] = factor[0];
        stats.rescale[0][row + 8] = factor[1];
      }
      if (c.lane == 0) stats.any_rescale[0][c.warp] = moves;
      // The four matrices of a store: rows 0-7 and 8-15 of keys 16k..16k+7, then of the next eight
      // keys.
      const int stored_row = 16 * c.warp + c.lane % 16;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t vector = (2 * k + c.lane / 16) ^ (stored_row & 7);
        ptx::stmatrix_x4(probabilities + stored_row * 128 + (vector << 4), packed[4 * k],
                         packed[4 * k + 1], packed[4 * k + 2], packed[4 * k + 3]);
      }
      if (first_key < piece.key_begin || first_key + kTileKeys > piece.key_end) {
        clear_unowned(c, piece, first_key, tile_start);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (leads && !(p.defer_values && tile + 1 < tile_end)) {
        ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.p_full[0]));
      }
      laps.lap(kSumStoreP);
      ++tile_count;
    }
    if (tile_begin >= tile_end) {
      if (c.lane < T::kValueWarpgroups) release_query();
      if (leads) ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.query_empty));
    }

    // End of the piece: sums, lse, and the factor of O.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0U, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0U, sum[half], 2);
    }
    ptx::mbarrier_wait(ptx::smem_address(&c.barriers.stats_empty), (count & 1) ^ 1);
    if (c.lane % 4 < 2) {
      const int r = row + 8 * (c.lane % 4);
      const bool second = c.lane % 4 == 1;
      stats.final_scale[r] =
          finish_row<T>(p, piece, r, second ? max[1] : max[0], second ? sum[1] : sum[0]);
    }
    __syncwarp();
    if (leads) {
      ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.stats_full));
      c.release_piece(count);
    }
    if (threadIdx.x == 128) trace(kTraceScoresDone);
  }
}

}  // namespace mla::sm90::rows
