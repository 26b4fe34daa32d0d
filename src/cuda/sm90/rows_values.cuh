// 64 query rows, values: O += P V, and the end of a piece. See rows_scores.cuh for the layout.
#pragma once

#include "cuda/sm90/rows_scores.cuh"

namespace mla::sm90::rows {

/// A partial: [row][dim] f32.
template <class T>
__device__ __forceinline__ void store_partial(const Context<T>& c, float* partial, int member,
                                              const float (&o)[T::kValueChunks][32]) {
  float* target = ptx::opaque(partial + (16 * c.warp + c.lane / 4) * T::kLatent + 2 * (c.lane % 4) +
                              T::value_dim(member, 0));
#pragma unroll
  for (int chunk = 0; chunk < T::kValueChunks; ++chunk) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float* at = target + T::value_dim(0, chunk) + 8 * j;
      ptx::store_cg(at, o[chunk][4 * j], o[chunk][4 * j + 1]);
      ptx::store_cg(at + 8 * T::kLatent, o[chunk][4 * j + 2], o[chunk][4 * j + 3]);
    }
  }
}

/// A whole result. In 16 bits a quad of lanes exchanges what it holds of a row, so that each lane
/// stores eight neighbouring values: whole sectors, and a fourth of the stores.
template <class T>
__device__ __forceinline__ void store_output(const Context<T>& c, const Piece<T::kRows>& piece,
                                             int member, const float (&f)[2],
                                             const float (&o)[T::kValueChunks][32]) {
  const bool is_f16 = output_is_f16(c.p);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = 16 * c.warp + c.lane / 4 + 8 * half;
    const bool live = r < piece.num_rows;
    const int64_t offset = piece.row_out[r] + 2 * (c.lane % 4) + T::value_dim(member, 0);
    if (T::kPlain || c.p.out_vector_stores) {
      uint16_t* target = ptx::opaque(static_cast<uint16_t*>(c.p.out) + offset + 6 * (c.lane % 4));
#pragma unroll
      for (int chunk = 0; chunk < T::kValueChunks; ++chunk) {
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          uint32_t v[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            v[k] = pack_output(o[chunk][4 * (j + k) + 2 * half] * f[half],
                               o[chunk][4 * (j + k) + 2 * half + 1] * f[half], is_f16);
          }
          ptx::quad_transpose(v, c.lane);
          if (live) {
            *reinterpret_cast<uint4*>(target + T::value_dim(0, chunk) + 8 * j) =
                uint4{v[0], v[1], v[2], v[3]};
          }
        }
      }
      continue;
    }
    if (!live) continue;
#pragma unroll
    for (int chunk = 0; chunk < T::kValueChunks; ++chunk) {  // f32, and rows that are not aligned
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int dim = T::value_dim(0, chunk) + 8 * j;
        store_element(c.p, offset + dim, o[chunk][4 * j + 2 * half] * f[half]);
        store_element(c.p, offset + dim + 1, o[chunk][4 * j + 2 * half + 1] * f[half]);
      }
    }
  }
}

/// The chunks of group g that value warpgroup `member` multiplies: neighbours, so one wgmma spans
/// them and P is read once for all.
template <class T>
constexpr __host__ __device__ int first_chunk(int member, int g) {
  const int first = g * T::kGroupChunks, own = member * T::kValueChunks;
  return first > own ? first : own;
}
template <class T>
constexpr __host__ __device__ int num_chunks(int member, int g) {
  const int end = (g + 1) * T::kGroupChunks, own_end = (member + 1) * T::kValueChunks;
  const int n = (end < own_end ? end : own_end) - first_chunk<T>(member, g);
  return n > 0 ? n : 0;
}

/// O += P V of kCount neighbouring chunks, 64 keys.
template <class T, int kCount>
__device__ __forceinline__ void multiply_values(float* o, uint32_t probabilities, uint32_t values) {
  if constexpr (kCount == 4) {  // n256 does not fit beside the roles' registers
    multiply_values<T, 2>(o, probabilities, values);
    multiply_values<T, 2>(o + 64, probabilities, values + (2 * T::kChunkBytes >> 4));
  } else if constexpr (kCount > 0) {
    using Mma = Wgmma<64 * kCount, typename T::Element>;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Mma::template ss<0, 1>(o, probabilities + (k * 32 >> 4), values + (k * 2048 >> 4));
    }
  }
}

/// PV of one tile. A group is released when its products are done; two stay in flight.
template <class T, int kMember, int kGroup = 0, int kPrevious = -1>
__device__ __forceinline__ void multiply_tile(const Context<T>& c,
                                              const RingCursor<T::kSlots>& tile,
                                              uint32_t probabilities, float* o) {
  if constexpr (kGroup == T::kGroups) {
    wgmma_wait<0>();
    if (c.lane == 0) c.release(tile.ahead(kPrevious));
  } else {
    constexpr int kCount = num_chunks<T>(kMember, kGroup);
    constexpr int kFirst = first_chunk<T>(kMember, kGroup);
    const RingCursor<T::kSlots> slot = tile.ahead(kGroup);
    if constexpr (kCount == 0) {
      if (c.lane == 0) c.release(slot);
      multiply_tile<T, kMember, kGroup + 1, kPrevious>(c, tile, probabilities, o);
    } else {
      // The scores waited for this copy already; this makes its bytes visible to this warpgroup.
      c.wait_full(slot);
      wgmma_fence();
      multiply_values<T, kCount>(
          o + (kFirst - kMember * T::kValueChunks) * 32, probabilities,
          ptx::uniform(
              matrix_operand(c.chunk(slot, kFirst - kGroup * T::kGroupChunks), T::kChunkBytes)));
      wgmma_commit();
      if constexpr (kPrevious >= 0) {
        wgmma_wait<1>();
        if (c.lane == 0) c.release(tile.ahead(kPrevious));
      }
      multiply_tile<T, kMember, kGroup + 1, kGroup>(c, tile, probabilities, o);
    }
  }
}

template <class T, int kMember>
__device__ __forceinline__ void value_role(const Context<T>& c) {
  const KernelParams& p = c.p;
  Stats<T::kRows>& stats = c.small.stats;
  const int thread = kMember * 128 + c.warp * 32 + c.lane;
  const int row = 16 * c.warp + c.lane / 4;
  const uint32_t probabilities = ptx::uniform(matrix_operand(c.probabilities(0)));

  RingCursor<T::kSlots> cursor;  // first group of the tile
  uint32_t tile_count = 0;
  TraceLaps laps(threadIdx.x == 256);
  float o[T::kValueChunks][32];
#pragma unroll 1
  for (uint32_t count = 0;; ++count) {
    const Piece<T::kRows>& piece = c.wait_piece(count);
    if (!piece.valid) {
      laps.write(kSumWaitP, kSumValues);
      return;
    }
    const bool leads = c.lane == 0;
    const int num_tiles = piece.tile_end - piece.tile_begin;
    cursor = cursor.ahead(T::kRegisterGroups);
#pragma unroll
    for (int i = 0; i < T::kValueChunks; ++i) {
#pragma unroll
      for (int e = 0; e < 32; ++e) o[i][e] = 0.0F;
    }
#pragma unroll 1
    for (int t = 0; t < num_tiles; ++t) {
      ptx::mbarrier_wait(ptx::smem_address(&c.barriers.p_full[0]), tile_count & 1);
      laps.lap(kSumWaitP);
      if (t > 0 && stats.any_rescale[0][c.warp]) {
        const float f0 = stats.rescale[0][row];
        const float f1 = stats.rescale[0][row + 8];
#pragma unroll
        for (int i = 0; i < T::kValueChunks; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            o[i][4 * j] *= f0;
            o[i][4 * j + 1] *= f0;
            o[i][4 * j + 2] *= f1;
            o[i][4 * j + 3] *= f1;
          }
        }
      }
      wgmma_fence();
      multiply_tile<T, kMember>(c, cursor, probabilities, &o[0][0]);
      if (leads) ptx::mbarrier_arrive(ptx::smem_address(&c.barriers.p_empty[0]));
      cursor = cursor.ahead(T::kGroups);
      laps.lap(kSumValues);
      ++tile_count;
    }

    if (thread == 0) trace(kTraceValuesDone);
    if (!piece.whole) {
      store_partial(c, partial_of<T>(p, piece), kMember, o);
    }
    ptx::mbarrier_wait(ptx::smem_address(&c.barriers.stats_full), count & 1);
    if (!piece.whole) {
      announce_partial<T>(p, piece, thread);
    } else {
      const float f[2] = {stats.final_scale[row], stats.final_scale[row + 8]};
      store_output(c, piece, kMember, f, o);
    }
    leave_piece(c, count);
    if (thread == 0) trace(kTraceStored);
  }
}

}  // namespace mla::sm90::rows
