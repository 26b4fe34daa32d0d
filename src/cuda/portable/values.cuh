// PV of one tile, and what becomes of O: each warp holds all rows of its columns.
//
// Of column group j, lane (g, t) holds rows g and g + 8: of a 16-bit cache columns 2t, 2t+1 and
// 8+2t, 9+2t; of bytes, whose even columns are one product and odd ones the other, 4t .. 4t+3.
#pragma once

#include "cuda/portable/context.cuh"
#include "cuda/portable/convert.cuh"
#include "cuda/row_end.cuh"

namespace mla::portable {

template <class T>
using Output = float[T::kRowTiles][T::kColumnGroups][2][4];

template <class T>
__device__ __forceinline__ void clear_output(Output<T>& o) {
#pragma unroll
  for (int m = 0; m < T::kRowTiles; ++m)
#pragma unroll
    for (int j = 0; j < T::kColumnGroups; ++j)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[m][j][n][i] = 0.0F;
}

/// Multiplies every row of O by its factor.
template <class T>
__device__ __forceinline__ void scale_output(const Context<T>& c, const float* factors,
                                             Output<T>& o) {
#pragma unroll
  for (int m = 0; m < T::kRowTiles; ++m) {
    const float low = factors[16 * m + c.lane / 4];
    const float high = factors[16 * m + c.lane / 4 + 8];
#pragma unroll
    for (int j = 0; j < T::kColumnGroups; ++j) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        o[m][j][n][0] *= low;
        o[m][j][n][1] *= low;
        o[m][j][n][2] *= high;
        o[m][j][n][3] *= high;
      }
    }
  }
}

/// First column of this warp, and how many groups of 16 it has: half of them at L = 256.
template <class T>
__device__ __forceinline__ int first_column(const Context<T>& c) {
  return c.warp * (c.p.latent / T::kWarps);
}
template <class T>
__device__ __forceinline__ int column_groups(const Context<T>& c) {
  return c.full_latent() ? T::kColumnGroups : T::kColumnGroups / 2;
}

template <class T>
__device__ __forceinline__ void load_probabilities(const Context<T>& c, int key_group,
                                                   uint32_t (&a)[T::kRowTiles][4]) {
  const int version = T::kProbabilityVersions == 1 ? 0 : c.warp / 2;  // 64 of 128 columns a warp
#pragma unroll
  for (int m = 0; m < T::kRowTiles; ++m) {
    const uint4 x = c.probabilities(version)[(m * T::kKeyGroups + key_group) * 32 + c.lane];
    a[m][0] = x.x;
    a[m][1] = x.y;
    a[m][2] = x.z;
    a[m][3] = x.w;
  }
}

template <class T, int kBegin, int kEnd>
__device__ __forceinline__ void multiply_columns(const Context<T>& c, const char* stage,
                                                 Output<T>& o) {
  using Element = typename T::Element;
  const uint32_t tile = ptx::smem_address(stage);
  if constexpr (T::kCache == CacheKind::k16Bit) {
    // Matrices: columns 0..7, keys 0..7 and 8..15; columns 8..15, the same.
    const uint32_t address = tile + (c.lane / 8 % 2 * 8 + c.lane % 8) * T::kPitch +
                             (first_column(c) + c.lane / 16 * 8) * 2;
#pragma unroll
    for (int k = 0; k < T::kKeyGroups; ++k) {
      uint32_t a[T::kRowTiles][4];
      load_probabilities<T>(c, k, a);
#pragma unroll
      for (int j = kBegin; j < kEnd; ++j) {
        uint32_t b[4];
        ptx::load_matrices_transposed(b, address + k * 16 * T::kPitch + j * 32);
#pragma unroll
        for (int m = 0; m < T::kRowTiles; ++m) {
          ptx::multiply_add<Element>(o[m][j][0], a[m], b[0], b[1]);
          ptx::multiply_add<Element>(o[m][j][1], a[m], b[2], b[3]);
        }
      }
    }
  } else {
    // Matrices: 16 columns of keys 0..7, 8..15, 16..23 and 24..31.
    const uint32_t address = tile + c.lane * T::kPitch + first_column(c);
    uint32_t a[T::kKeyGroups][T::kRowTiles][4];
#pragma unroll
    for (int k = 0; k < T::kKeyGroups; ++k) load_probabilities<T>(c, k, a[k]);
#pragma unroll
    for (int j = kBegin; j < kEnd; ++j) {
      uint32_t b[4];
      ptx::load_matrices_transposed(b, address + j * 16);
#pragma unroll
      for (int k = 0; k < T::kKeyGroups; ++k) {
        const uint32_t even[2] = {even_bytes<Element>(b[2 * k]), even_bytes<Element>(b[2 * k + 1])};
        const uint32_t odd[2] = {odd_bytes<Element>(b[2 * k]), odd_bytes<Element>(b[2 * k + 1])};
#pragma unroll
        for (int m = 0; m < T::kRowTiles; ++m) {
          ptx::multiply_add<Element>(o[m][j][0], a[k][m], even[0], even[1]);
          ptx::multiply_add<Element>(o[m][j][1], a[k][m], odd[0], odd[1]);
        }
      }
    }
  }
}

/// PV of the tile in `stage`.
template <class T>
__device__ __forceinline__ void multiply_values(const Context<T>& c, const char* stage,
                                                Output<T>& o) {
  constexpr int kHalf = T::kColumnGroups / 2;
  multiply_columns<T, 0, kHalf>(c, stage, o);
  if (c.full_latent()) multiply_columns<T, kHalf, T::kColumnGroups>(c, stage, o);
}

/// Four values of one row and what columns they are.
struct FourColumns {
  float x[4];
  int column;  // of x[0] and x[1], and of x[2] and x[3] at column + gap
  int gap;
};
template <class T>
__device__ __forceinline__ FourColumns four_columns(const Context<T>& c, const float (&o)[2][4],
                                                    int j, int half) {
  const int t = c.lane % 4;
  const int first = first_column(c) + j * 16;
  const float* even = &o[0][2 * half];
  const float* odd = &o[1][2 * half];
  if constexpr (T::kCache == CacheKind::k16Bit) {
    return {{even[0], even[1], odd[0], odd[1]}, first + 2 * t, 8};
  } else {
    return {{even[0], odd[0], even[1], odd[1]}, first + 4 * t, 2};
  }
}

/// A cut piece: O as it is, f32.
template <class T>
__device__ __forceinline__ void store_partial(const Context<T>& c, const Piece<T::kRows>& piece,
                                              const Output<T>& o) {
  float* partial = partial_of<T>(c.p, piece);
  const int groups = column_groups(c);
#pragma unroll
  for (int m = 0; m < T::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 16 * m + c.lane / 4 + 8 * half;
      if (r >= piece.num_rows) continue;
#pragma unroll
      for (int j = 0; j < T::kColumnGroups; ++j) {
        if (j >= groups) continue;
        const FourColumns four = four_columns(c, o[m][j], j, half);
        float* target = partial + r * T::kLatent + four.column;
        constexpr float kScale = T::kStoredScale;
        ptx::store_cg(target, four.x[0] * kScale, four.x[1] * kScale);
        ptx::store_cg(target + four.gap, four.x[2] * kScale, four.x[3] * kScale);
      }
    }
  }
}

/// Rows of 16-bit output whose 16-byte pieces are aligned.
template <class T>
__device__ __forceinline__ void store_row_vectors(const Context<T>& c, int64_t row, int m, int half,
                                                  float factor, bool live, const Output<T>& o) {
  const bool is_f16 = output_is_f16(c.p);
  const int t = c.lane % 4;
  uint16_t* out = static_cast<uint16_t*>(c.p.out) + row + first_column(c);
  const int groups = column_groups(c);
#pragma unroll
  for (int j = 0; j < T::kColumnGroups; j += 2) {
    if (j >= groups) continue;
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const FourColumns four = four_columns(c, o[m][j + i], j + i, half);
      a[2 * i] = pack_output(four.x[0] * factor, four.x[1] * factor, is_f16);
      a[2 * i + 1] = pack_output(four.x[2] * factor, four.x[3] * factor, is_f16);
    }
    if constexpr (T::kCache == CacheKind::k16Bit) {
      ptx::quad_transpose(a, c.lane);  // lane t has eight columns from 8t on
      if (live) *reinterpret_cast<uint4*>(out + j * 16 + 8 * t) = uint4{a[0], a[1], a[2], a[3]};
    } else if (live) {
      *reinterpret_cast<uint2*>(out + j * 16 + 4 * t) = uint2{a[0], a[1]};
      *reinterpret_cast<uint2*>(out + j * 16 + 16 + 4 * t) = uint2{a[2], a[3]};
    }
  }
}

/// A whole result: each row times its factor, in the output's type.
template <class T>
__device__ __forceinline__ void store_output(const Context<T>& c, const Piece<T::kRows>& piece,
                                             const Output<T>& o) {
  const int groups = column_groups(c);
#pragma unroll
  for (int m = 0; m < T::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 16 * m + c.lane / 4 + 8 * half;
      const bool live = r < piece.num_rows;
      const float factor = c.small().final_scale[r] * T::kStoredScale;
      const int64_t row = piece.row_out[r];
      if (c.p.out_vector_stores) {
        store_row_vectors(c, row, m, half, factor, live, o);
        continue;
      }
#pragma unroll
      for (int j = 0; j < T::kColumnGroups; ++j) {
        if (j >= groups || !live) continue;
        const FourColumns four = four_columns(c, o[m][j], j, half);
        store_element(c.p, row + four.column, four.x[0] * factor);
        store_element(c.p, row + four.column + 1, four.x[1] * factor);
        store_element(c.p, row + four.column + four.gap, four.x[2] * factor);
        store_element(c.p, row + four.column + four.gap + 1, four.x[3] * factor);
      }
    }
  }
}

}  // namespace mla::portable
