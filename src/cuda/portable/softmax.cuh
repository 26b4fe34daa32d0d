// Softmax of one tile: the parts of QK are added, masked, and become P in shared memory.
//
// P is taken relative to a running maximum that may lag by kSlack: while no score exceeds that, one
// barrier shows P to all and nothing is rescaled. Else all warps take the slow path together.
#pragma once

#include "cuda/portable/context.cuh"
#include "cuda/row_end.cuh"

namespace mla::portable {

/// A softmax thread's two rows, of one row tile: g and g + 8.
struct RowState {
  float max[2];  // log2 units
  float sum[2];  // of this thread's columns
};

template <class T>
struct Softmax {
  const Context<T>& c;
  ScoreScale scale;
  bool active;    // this warp holds fragments
  int row_tile;   // of the fragments
  int row_part;   // which of kRowParts warps of these rows
  int first_key;  // of this lane in the tile
  RowState state;
  float multiplier[2];                  // of the scores of both rows
  float scores[T::kWarpFragments][4];   // of the running tile

  __device__ explicit Softmax(const Context<T>& context)
      : c(context),
        scale(score_scale<T>(context.p)),
        active(context.warp < T::kSoftmaxWarps),
        row_tile(context.warp / T::kRowParts),
        row_part(context.warp % T::kRowParts),
        first_key(row_part * T::kWarpFragments * 8 + context.lane % 4 * 2) {}

  __device__ int row(int half) const { return 16 * row_tile + c.lane / 4 + 8 * half; }

  __device__ __forceinline__ void begin_piece() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.max[half] = -INFINITY;
      state.sum[half] = 0.0F;
      multiplier[half] = T::kStoredScale;
      if (active && c.p.scale_query) multiplier[half] *= c.small().query_scale[row(half)];
      if (!scale.transforms) multiplier[half] *= scale.log2;
    }
  }

  /// The scores of a tile, in log2 units; whether one exceeds the running maximum.
  __device__ __forceinline__ bool load_scores(const Piece<T::kRows>& piece, int tile, int slot) {
    if (!active) return false;
    const float4* parts = c.scores() + c.warp * T::kWarpFragments * 32 + c.lane;
#pragma unroll
    for (int f = 0; f < T::kWarpFragments; ++f) {
      float4 s = parts[f * 32];
#pragma unroll
      for (int part = 1; part < T::kWidthParts; ++part) {
        const float4 other = parts[(part * T::kFragments + f) * 32];
        s = float4{s.x + other.x, s.y + other.y, s.z + other.z, s.w + other.w};
      }
      scores[f][0] = s.x * multiplier[0];
      scores[f][1] = s.y * multiplier[0];
      scores[f][2] = s.z * multiplier[1];
      scores[f][3] = s.w * multiplier[1];
    }
    const int tile_key = tile * kTileKeys;
    if (scale.transforms) transform(piece, tile_key);
    if (tile_key < piece.plain_begin || tile_key + kTileKeys > piece.plain_end) {
      mask(piece, tile_key);
    }
    if (c.p.sparse) mask_missing(slot);
    bool exceeds = false;
#pragma unroll
    for (int f = 0; f < T::kWarpFragments; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) exceeds |= scores[f][i] > state.max[i / 2] + kSlack;
    }
    return exceeds;
  }

  /// P = exp2(s - max), summed in f32, to shared memory in 16 bits.
  __device__ __forceinline__ void store_probabilities(const char* stage) {
    using Element = typename T::Element;
    if (!active) return;
#pragma unroll
    for (int f = 0; f < T::kWarpFragments; ++f) {
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float m = state.max[i / 2];
        // A row that has seen nothing has m = -inf and only -inf scores.
        e[i] = ptx::exp2_approx(scores[f][i] - (m == -INFINITY ? 0.0F : m));
      }
      state.sum[0] += e[0] + e[1];
      state.sum[1] += e[2] + e[3];
      const int fragment = row_part * T::kWarpFragments + f;  // of the row tile
      const int place = ((row_tile * T::kKeyGroups + fragment / 2) * 32 + c.lane) * 2 + fragment % 2;
      if constexpr (T::kCache == CacheKind::kFp8DsMla) {
        const char* key = stage + (first_key + 8 * f) * T::kPitch + kDsScaleOffset;
        const float4 even = *reinterpret_cast<const float4*>(key);
        const float4 odd = *reinterpret_cast<const float4*>(key + T::kPitch);
        const float scales[4][2] = {{even.x, odd.x}, {even.y, odd.y}, {even.z, odd.z}, {even.w, odd.w}};
#pragma unroll
        for (int version = 0; version < 4; ++version) {
          const float* s = scales[version];
          // Where P is 0 nothing may come of a scale that nobody owns; those are 0 as well.
          reinterpret_cast<uint2*>(c.probabilities(version))[place] =
              uint2{pack<Element>(e[0] * s[0], e[1] * s[1]), pack<Element>(e[2] * s[0], e[3] * s[1])};
        }
      } else {
        reinterpret_cast<uint2*>(c.probabilities(0))[place] =
            uint2{pack<Element>(e[0], e[1]), pack<Element>(e[2], e[3])};
      }
    }
  }

  /// Slow path, first half: the maxima of the tile's rows, by warp.
  __device__ __forceinline__ void share_maxima() {
    if (!active) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m = -INFINITY;
#pragma unroll
      for (int f = 0; f < T::kWarpFragments; ++f)
        m = fmaxf(m, fmaxf(scores[f][2 * half], scores[f][2 * half + 1]));
      m = fmaxf(m, __shfl_xor_sync(~0U, m, 1));
      m = fmaxf(m, __shfl_xor_sync(~0U, m, 2));
      if (c.lane % 4 == 0) c.small().row_max[row_part][row(half)] = m;
    }
  }
  /// Slow path, second half, behind a barrier: moves the maxima of the rows that need it. The
  /// sums were taken before the tile's P: it is stored again.
  __device__ __forceinline__ void move_maxima(const RowState& before) {
    if (!active) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_max = c.small().row_max[0][row(half)];
#pragma unroll
      for (int part = 1; part < T::kRowParts; ++part)
        tile_max = fmaxf(tile_max, c.small().row_max[part][row(half)]);
      const float old_max = before.max[half];
      const bool moves = tile_max > old_max + kSlack;  // also when old_max is -inf and a key is seen
      const float factor = moves ? ptx::exp2_approx(old_max - tile_max) : 1.0F;
      state.max[half] = moves ? tile_max : old_max;
      state.sum[half] = before.sum[half] * factor;
      if (row_part == 0 && c.lane % 4 == 0) c.small().rescale[row(half)] = factor;
    }
  }

  /// End of a piece: this warp's part of its rows' sums, and their maxima.
  __device__ __forceinline__ void share_sums() {
    if (!active) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[half];
      sum += __shfl_xor_sync(~0U, sum, 1);
      sum += __shfl_xor_sync(~0U, sum, 2);
      if (c.lane % 4 != 0) continue;
      c.small().row_sum[row_part][row(half)] = sum;
      if (row_part == 0) c.small().row_max[0][row(half)] = state.max[half];
    }
  }

 private:
  __device__ __forceinline__ void transform(const Piece<T::kRows>& piece, int tile_key) {
#pragma unroll
    for (int f = 0; f < T::kWarpFragments; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row(i / 2);
        int distance = 0;
        float slope = 0.0F;
        if (c.p.alibi_slopes != nullptr) {
          const int64_t key = tile_key + first_key + 8 * f + i % 2;
          distance = static_cast<int>(global_position(c.p.cp, key) - piece.row_position[r]);
          slope = c.small().slope[r];
        }
        scores[f][i] = transform_score(c.p, scores[f][i], scale.scale, slope, distance);
      }
    }
  }
  __device__ __forceinline__ void mask(const Piece<T::kRows>& piece, int tile_key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = piece.row_key_begin[row(half)] - tile_key - first_key;
      const int end = piece.row_key_end[row(half)] - tile_key - first_key;
#pragma unroll
      for (int f = 0; f < T::kWarpFragments; ++f) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = 8 * f + i;
          if (key < begin || key >= end) scores[f][2 * half + i] = -INFINITY;
        }
      }
    }
  }
  /// Sparse: entries that name no key.
  __device__ __forceinline__ void mask_missing(int slot) {
#pragma unroll
    for (int f = 0; f < T::kWarpFragments; ++f) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = first_key + 8 * f + i;
        if ((c.small().valid_keys[slot][key / 4] >> key % 4 & 1) == 0)
          scores[f][i] = scores[f][2 + i] = -INFINITY;
      }
    }
  }
};

}  // namespace mla::portable
