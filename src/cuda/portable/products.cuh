// QK of one tile: each warp multiplies its rows and keys over its part of the width and leaves the
// sums in shared memory, fragment by fragment.
#pragma once

#include "cuda/portable/query.cuh"

namespace mla::portable {

/// The query fragments of a warp that stay in registers.
template <class T>
struct QueryRegisters {
  static constexpr int kSteps = T::kQueryInRegisters ? T::kLatentSteps + T::kRopeSteps : 1;
  uint32_t a[T::kQueryInRegisters ? T::kScoreRowTiles : 1][kSteps][4];
  // What bf16 rounding took from f16 queries (split_query).
  uint32_t rest[T::kRows == 16 ? kSteps : 1][4];
};

/// Fetches the query rows of a piece: a warp's own fragments, or its share of all of them.
template <class T>
__device__ __forceinline__ void load_query(const Context<T>& c, const Piece<T::kRows>& piece,
                                           QueryRegisters<T>& query) {
  const KernelParams& p = c.p;
  const int g = c.lane / 4;
  const int latent_steps = p.latent / 16, rope_steps = p.rope / 16;
  if constexpr (T::kQueryInRegisters) {
    const int part_latent = latent_steps / T::kWidthParts, part_rope = rope_steps / T::kWidthParts;
#pragma unroll
    for (int m = 0; m < T::kScoreRowTiles; ++m) {
      const QueryRow low = query_row<T>(p, piece, 16 * m + g);
      const QueryRow high = query_row<T>(p, piece, 16 * m + g + 8);
      const float low_scale = p.scale_query ? inverse_power(c.small().query_scale[16 * m + g]) : 1.0F;
      const float high_scale =
          p.scale_query ? inverse_power(c.small().query_scale[16 * m + g + 8]) : 1.0F;
#pragma unroll
      for (int i = 0; i < T::kLatentSteps + T::kRopeSteps; ++i) {
        const bool latent = i < T::kLatentSteps;
        const int j = latent ? i : i - T::kLatentSteps;
        if (j >= (latent ? part_latent : part_rope)) continue;
        const int step = c.width_part() * (latent ? part_latent : part_rope) + j;
        uint32_t(&a)[4] = query.a[m][i];
        load_query_fragment(c, low, latent, step, low_scale, QueryPart::kRounded, a[0], a[2]);
        load_query_fragment(c, high, latent, step, high_scale, QueryPart::kRounded, a[1], a[3]);
        if (T::kRows == 16 && p.split_query) {
          uint32_t(&rest)[4] = query.rest[T::kRows == 16 ? i : 0];
          load_query_fragment(c, low, latent, step, 1.0F, QueryPart::kRest, rest[0], rest[2]);
          load_query_fragment(c, high, latent, step, 1.0F, QueryPart::kRest, rest[1], rest[3]);
        }
      }
    }
  } else {
    const int num_steps = latent_steps + rope_steps;
    const int m = c.warp % T::kRowTiles;
    const QueryRow low = query_row<T>(p, piece, 16 * m + g);
    const QueryRow high = query_row<T>(p, piece, 16 * m + g + 8);
    const float low_scale = p.scale_query ? inverse_power(c.small().query_scale[16 * m + g]) : 1.0F;
    const float high_scale =
        p.scale_query ? inverse_power(c.small().query_scale[16 * m + g + 8]) : 1.0F;
#pragma unroll 2
    for (int s = c.warp / T::kRowTiles; s < num_steps; s += T::kWarps / T::kRowTiles) {
      const bool latent = s < latent_steps;
      const int step = latent ? s : s - latent_steps;
      uint4 a;
      load_query_fragment(c, low, latent, step, low_scale, QueryPart::kRounded, a.x, a.z);
      load_query_fragment(c, high, latent, step, high_scale, QueryPart::kRounded, a.y, a.w);
      // The rotary steps have fixed places behind the widest latent.
      c.query()[(m * T::kQuerySteps + (latent ? s : kMaxLatent / 16 + step)) * 32 + c.lane] = a;
    }
  }
}

template <class T>
using ScoreSums = float[T::kScoreRowTiles][2][4];

/// Two or four products: the warp's rows times 16 keys over one step.
template <class T>
__device__ __forceinline__ void multiply_step(const Context<T>& c, const QueryRegisters<T>& query,
                                              int register_step, int shared_step,
                                              const uint32_t (&low)[2], const uint32_t (&high)[2],
                                              ScoreSums<T>& sums) {
  using Element = typename T::Element;
#pragma unroll
  for (int m = 0; m < T::kScoreRowTiles; ++m) {
    uint32_t a[4];
    if constexpr (T::kQueryInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = query.a[m][register_step][i];
    } else {
      const int tile = c.row_group() * T::kScoreRowTiles + m;
      const uint4 x = c.query()[(tile * T::kQuerySteps + shared_step) * 32 + c.lane];
      a[0] = x.x;
      a[1] = x.y;
      a[2] = x.z;
      a[3] = x.w;
    }
    ptx::multiply_add<Element>(sums[m][0], a, low[0], low[1]);
    ptx::multiply_add<Element>(sums[m][1], a, high[0], high[1]);
    if constexpr (T::kRows == 16) {
      if (c.p.split_query) {
        ptx::multiply_add<Element>(sums[m][0], query.rest[register_step], low[0], low[1]);
        ptx::multiply_add<Element>(sums[m][1], query.rest[register_step], high[0], high[1]);
      }
    }
  }
}

/// Steps [kBegin, kEnd) of the warp's part, 16-bit values from `keys` on.
template <class T, int kBegin, int kEnd>
__device__ __forceinline__ void multiply_halves(const Context<T>& c,
                                                const QueryRegisters<T>& query, uint32_t keys,
                                                int first_shared, int first_register,
                                                ScoreSums<T>& sums) {
  // Matrices: keys 0..7, first and second half of the step; keys 8..15, the same.
  const uint32_t address = keys + (c.lane / 16 * 8 + c.lane % 8) * T::kPitch + c.lane / 8 % 2 * 16;
#pragma unroll
  for (int i = kBegin; i < kEnd; ++i) {
    uint32_t b[4];
    ptx::load_matrices(b, address + i * 32);
    multiply_step<T>(c, query, first_register + i, first_shared + i, {b[0], b[1]}, {b[2], b[3]},
                     sums);
  }
}

/// The same of e4m3 bytes, two steps at a time.
template <class T, int kBegin, int kEnd>
__device__ __forceinline__ void multiply_bytes(const Context<T>& c, const QueryRegisters<T>& query,
                                               uint32_t keys, int first_shared, int first_register,
                                               ScoreSums<T>& sums) {
  using Element = typename T::Element;
  // Matrices: keys 0..7, even and odd step; keys 8..15, the same.
  const uint32_t address = keys + (c.lane / 16 * 8 + c.lane % 8) * T::kPitch + c.lane / 8 % 2 * 16;
#pragma unroll
  for (int i = kBegin; i < kEnd; i += 2) {
    uint32_t b[4];
    ptx::load_matrices(b, address + i * 16);
#pragma unroll
    for (int odd = 0; odd < 2 && i + odd < kEnd; ++odd) {
      multiply_step<T>(c, query, first_register + i + odd, first_shared + i + odd,
                       {even_bytes<Element>(b[odd]), odd_bytes<Element>(b[odd])},
                       {even_bytes<Element>(b[2 + odd]), odd_bytes<Element>(b[2 + odd])}, sums);
    }
  }
}

/// Multiplies the sums by the keys' scales of a group of 128 values (fp8_ds_mla).
template <class T>
__device__ __forceinline__ void scale_sums(const Context<T>& c, const char* stage, int group,
                                           ScoreSums<T>& sums) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = c.key_group() * 16 + n * 8 + c.lane % 4 * 2 + i;
      const float scale =
          *reinterpret_cast<const float*>(stage + key * T::kPitch + kDsScaleOffset + group * 4);
#pragma unroll
      for (int m = 0; m < T::kScoreRowTiles; ++m) {
        sums[m][n][i] *= scale;
        sums[m][n][2 + i] *= scale;
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void add_sums(ScoreSums<T>& sums, const ScoreSums<T>& more) {
#pragma unroll
  for (int m = 0; m < T::kScoreRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] += more[m][n][i];
}

/// QK of the tile in `stage`. The widths are 512 or 256, and 64 or 0: of a part, all steps or half
/// of them, so that no step needs a branch.
template <class T>
__device__ __forceinline__ void multiply_scores(const Context<T>& c,
                                                const QueryRegisters<T>& query, const char* stage) {
  constexpr int kHalf = T::kLatentSteps / 2;
  constexpr bool kBytes = T::kCache != CacheKind::k16Bit;
  const uint32_t keys = ptx::smem_address(stage) + c.key_group() * 16 * T::kPitch;
  const int first = c.width_part() * c.latent_steps();
  ScoreSums<T> sums{};
  if constexpr (T::kCache == CacheKind::k16Bit) {
    multiply_halves<T, 0, kHalf>(c, query, keys + first * 32, first, 0, sums);
    if (c.full_latent())
      multiply_halves<T, kHalf, T::kLatentSteps>(c, query, keys + first * 32, first, 0, sums);
  } else if constexpr (T::kCache == CacheKind::kE4M3) {
    multiply_bytes<T, 0, kHalf>(c, query, keys + first * 16, first, 0, sums);
    if (c.full_latent())
      multiply_bytes<T, kHalf, T::kLatentSteps>(c, query, keys + first * 16, first, 0, sums);
  } else {
    constexpr int kGroupSteps = 8;
#pragma unroll
    for (int group = 0; group < T::kLatentSteps / kGroupSteps; ++group) {
      ScoreSums<T> part{};
      multiply_bytes<T, 0, kGroupSteps>(c, query, keys + (first + group * kGroupSteps) * 16,
                                        first + group * kGroupSteps, group * kGroupSteps, part);
      scale_sums<T>(c, stage, first / kGroupSteps + group, part);
      add_sums<T>(sums, part);
    }
  }
  if (c.has_rope()) {
    const int rope = c.width_part() * T::kRopeSteps;
    if constexpr (T::kCache == CacheKind::kE4M3) {
      multiply_bytes<T, 0, T::kRopeSteps>(c, query, keys + c.p.latent + rope * 16,
                                          kMaxLatent / 16 + rope, T::kLatentSteps, sums);
    } else {
      const int offset = kBytes ? kDsRopeOffset : c.p.latent * 2;
      multiply_halves<T, 0, T::kRopeSteps>(c, query, keys + offset + rope * 32,
                                           kMaxLatent / 16 + rope, T::kLatentSteps, sums);
    }
  }
  float4* scores = c.scores() + c.width_part() * T::kFragments * 32 + c.lane;
#pragma unroll
  for (int m = 0; m < T::kScoreRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int tile = c.row_group() * T::kScoreRowTiles + m;
      scores[(tile * (kTileKeys / 8) + c.key_group() * 2 + n) * 32] =
          float4{sums[m][n][0], sums[m][n][1], sums[m][n][2], sums[m][n][3]};
    }
  }
}

}  // namespace mla::portable
