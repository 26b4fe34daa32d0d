// Swapped operands, values: O^T += V^T P^T, and the end of a piece. See keys_scores.cuh for the
// layout.
#pragma once

#include "cuda/sm90/keys_scores.cuh"

namespace mla::sm90::keys {

/// A partial: [row][dim] f32.
template <class T>
__device__ __forceinline__ void store_partial(const Context<T>& c, float* partial,
                                              const float (&o)[T::kValueChunks][T::kRows / 2]) {
  float* target =
      ptx::opaque(partial + column_of(0, 0, c.lane) * T::kLatent + 16 * c.warp + c.lane / 4);
#pragma unroll
  for (int j = 0; j < T::kRows / 8; ++j) {
#pragma unroll
    for (int chunk = 0; chunk < T::kValueChunks; ++chunk) {
      float* at = target + 8 * j * T::kLatent + chunk * 64;
      ptx::store_cg(at, o[chunk][4 * j]);
      ptx::store_cg(at + T::kLatent, o[chunk][4 * j + 1]);
      ptx::store_cg(at + 8, o[chunk][4 * j + 2]);
      ptx::store_cg(at + T::kLatent + 8, o[chunk][4 * j + 3]);
    }
  }
}

/// A whole result in 16 bits: 8 x 8 transposes between lanes give every lane two neighbouring dims
/// of a row, and an exchange in each quad of lanes eight: whole sectors, and a fourth of the
/// stores.
template <class T>
__device__ __forceinline__ void store_output(const Context<T>& c, const Piece<T::kRows>& piece,
                                             const float (&o)[T::kValueChunks][T::kRows / 2]) {
  const Stats<T::kRows>& stats = c.small.stats;
  const bool is_f16 = output_is_f16(c.p);
#pragma unroll
  for (int j = 0; j < T::kRows / 8; ++j) {
    const float2 f = *reinterpret_cast<const float2*>(&stats.final_scale[column_of(j, 0, c.lane)]);
    const int r = 8 * j + c.lane / 4;
    // After the exchange this lane has one half of one of two chunks.
    uint16_t* row = ptx::opaque(static_cast<uint16_t*>(c.p.out) + piece.row_out[r] + 16 * c.warp +
                                c.lane / 2 % 2 * 64 + c.lane % 2 * 8);
    const bool live = r < piece.num_rows;
#pragma unroll
    for (int chunk = 0; chunk < T::kValueChunks; chunk += 2) {
      uint32_t v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float* two = &o[chunk + k / 2][4 * j + 2 * (k % 2)];
        v[k] = ptx::movmatrix_trans(pack_output(two[0] * f.x, two[1] * f.y, is_f16));
      }
      ptx::quad_transpose(v, c.lane);
      if (live) *reinterpret_cast<uint4*>(row + chunk * 64) = uint4{v[0], v[1], v[2], v[3]};
    }
  }
}

/// A whole result element by element: f32, and rows that are not aligned.
template <class T>
__device__ __forceinline__ void store_elements(const Context<T>& c, const Piece<T::kRows>& piece,
                                               const float (&o)[T::kValueChunks][T::kRows / 2]) {
#pragma unroll
  for (int chunk = 0; chunk < T::kValueChunks; ++chunk) {
#pragma unroll
    for (int e = 0; e < T::kRows / 2; ++e) {
      const int r = column_of(e / 4, e % 2, c.lane);
      const int dim = chunk * 64 + 16 * c.warp + c.lane / 4 + e / 2 % 2 * 8;
      if (r < piece.num_rows) {
        store_element(c.p, piece.row_out[r] + dim, o[chunk][e] * c.small.stats.final_scale[r]);
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void value_role(const Context<T>& c) {
  using Mma = Wgmma<T::kRows, typename T::Element>;
  const KernelParams& p = c.p;
  Stats<T::kRows>& stats = c.small.stats;
  const int thread = c.warp * 32 + c.lane;

  RingCursor<T::kSlots> cursor;
  uint32_t tile_count = 0;
  TraceLaps laps(threadIdx.x == 256);
  float o[T::kValueChunks][T::kRows / 2];
#pragma unroll 1
  for (uint32_t count = 0;; ++count) {
    const Piece<T::kRows>& piece = c.wait_piece(count);
    if (!piece.valid) {
      laps.write(kSumWaitP, kSumValues);
      return;
    }
    const bool leads = c.lane == 0;
    const int num_tiles = piece.tile_end - piece.tile_begin;
#pragma unroll
    for (int i = 0; i < T::kValueChunks; ++i) {
#pragma unroll
      for (int e = 0; e < T::kRows / 2; ++e) o[i][e] = 0.0F;
    }
#pragma unroll 1
    for (int t = 0; t < num_tiles; ++t) {
      const int b = tile_count & 1;
      ptx::mbarrier_wait(ptx::smem_address(&c.barriers.p_full[b]), tile_count >> 1 & 1);
      laps.lap(kSumWaitP);
      if (t > 0 && stats.any_rescale[b][0]) {
#pragma unroll
        for (int j = 0; j < T::kRows / 8; ++j) {
          const float2 f =
              *reinterpret_cast<const float2*>(&stats.rescale[b][column_of(j, 0, c.lane)]);
#pragma unroll
          for (int i = 0; i < T::kValueChunks; ++i) {
            o[i][4 * j] *= f.x;
            o[i][4 * j + 1] *= f.y;
            o[i][4 * j + 2] *= f.x;
            o[i][4 * j + 3] *= f.y;
          }
        }
      }
      const uint32_t probabilities = ptx::uniform(matrix_operand(c.probabilities(b)));
      RingCursor<T::kSlots> done = cursor;
      wgmma_fence();
#pragma unroll
      for (int g = 0; g < T::kGroups; ++g) {
        // The scores waited for this copy already; this makes its bytes visible to this warpgroup.
        c.wait_full(cursor);
        wgmma_fence();
        const uint32_t group = ptx::uniform(matrix_operand(c.chunk(cursor, 0), T::kChunkBytes));
#pragma unroll
        for (int i = 0; i < T::kGroupChunks && g * T::kGroupChunks + i < T::kLatentChunks; ++i) {
          const uint32_t values = group + (i * T::kChunkBytes >> 4);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            Mma::template ss<1, 0>(o[g * T::kGroupChunks + i], values + (k * 2048 >> 4),
                                   probabilities + (k * 32 >> 4));
          }
        }
        wgmma_commit();
        cursor.advance();
        // Two groups stay in flight; a slot is free as soon as its products are done.
        if (g > 0) {
          wgmma_wait<1>();
          if (leads) c.release(done);
          done.advance();
        }
      }
      wgmma_wait<0>();
      if (leads) {
        c.release(done);
        ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.p_empty[b]));
      }
      laps.lap(kSumValues);
      ++tile_count;
    }

    if (thread == 0) trace(kTraceValuesDone);
    if (!piece.whole) {
      store_partial(c, partial_of<T>(p, piece), o);
    }
    ptx::mbarrier_wait(ptx::smem_address(&c.barriers.stats_full), count & 1);
    if (!piece.whole) {
      announce_partial<T>(p, piece, thread);
    } else if (T::kPlain || p.out_vector_stores) {
      store_output(c, piece, o);
    } else {
      store_elements(c, piece, o);
    }
    leave_piece(c, count);
    if (thread == 0) trace(kTraceStored);
  }
}

}  // namespace mla::sm90::keys
