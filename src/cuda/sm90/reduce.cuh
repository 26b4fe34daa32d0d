// Cut results: every CTA that wrote a piece waits for the others, then sums a slice of the dims.
//
// The grid is launched cooperatively, so all CTAs are resident and waiting cannot deadlock. All pieces
// are written before the first wait. Partials are summed in key order: the same bits every time.
#pragma once

#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/trace.cuh"

namespace mla::sm90 {

/// A cut result that this CTA holds a piece of, kept in shared memory until the end.
template <int kRows>
struct CutResult {
  int valid;
  int first_cta;   // of the first piece; piece s lies group * s CTAs further on
  int num_pieces;
  int rank;        // of this CTA's piece
  int num_rows;
  int head[kRows];
  int64_t out[kRows];
  int64_t lse[kRows];
};

/// The partial slot of piece s: the first piece of a result is in slot 1 of its CTA, later ones in 0.
__device__ __forceinline__ int partial_slot(int first_cta, int group, int s) {
  return 2 * (first_cta + s * group) + (s == 0 ? 1 : 0);
}

template <class T>
__device__ void keep_cut(CutResult<T::kRows>& cut, const Piece<T::kRows>& piece, int thread) {
  if (thread == 0) {
    cut.valid = 1;
    cut.first_cta = piece.first_cta;
    cut.num_pieces = piece.num_pieces;
    cut.rank = piece.rank;
    cut.num_rows = piece.num_rows;
  }
  if (thread < T::kRows) {
    cut.head[thread] = piece.head[thread];
    cut.out[thread] = piece.out[thread];
    cut.lse[thread] = piece.lse[thread];
  }
}

/// After the last store of a partial by these threads.
template <int kThreads>
__device__ void announce_partial(const KernelParams& p, int first_cta, int thread) {
  __threadfence();
  ptx::named_barrier_sync(kValueBarrier, kThreads);
  if (thread == 0) ptx::atomic_add_acq_rel(p.arrived + first_cta, 1);
}

/// Weights of the pieces and the factor of every row; writes lse. Ends with a barrier.
template <class T>
__device__ void weigh_pieces(const KernelParams& p, const CutResult<T::kRows>& cut, float* weights,
                             float* factor, float* scratch, int thread) {
  constexpr int kThreads = T::kValueThreads;
  constexpr int kRows = T::kRows;
  constexpr int kParts = kThreads / kRows;  // threads that share a row
  const int num_pieces = cut.num_pieces;
  const int r = thread % kRows;
  const int part = thread / kRows;

  float m = -INFINITY;
#pragma unroll 1
  for (int s = part; s < num_pieces; s += kParts) {
    const int slot = partial_slot(cut.first_cta, p.group, s);
    const float lse = __ldcg(p.partial_lse + slot * kRows + r);
    weights[s * kRows + r] = lse;
    m = fmaxf(m, lse);
  }
  scratch[thread] = m;
  ptx::named_barrier_sync(kValueBarrier, kThreads);
#pragma unroll 1
  for (int q = 0; q < kParts; ++q) m = fmaxf(m, scratch[q * kRows + r]);
  float sum = 0.0F;
#pragma unroll 1
  for (int s = part; s < num_pieces; s += kParts) {
    const float lse = weights[s * kRows + r];
    const float w = lse == -INFINITY ? 0.0F : __expf(lse - m);
    weights[s * kRows + r] = w;
    sum += w;
  }
  scratch[kThreads + thread] = sum;
  ptx::named_barrier_sync(kValueBarrier, kThreads);
  if (part == 0) {
    sum = 0.0F;
#pragma unroll 1
    for (int q = 0; q < kParts; ++q) sum += scratch[kThreads + q * kRows + r];
    float lse = m == -INFINITY ? m : m + __logf(sum);
    float scale = 0.0F;
    if (r < cut.num_rows) {
      const float sink_weight = join_sink(p.sinks, cut.head[r], lse);
      if (sum > 0.0F) scale = sink_weight * scale_of(p.bmm2_scale, p.bmm2_scale_pointer) / sum;
      if (cut.rank == 0 && p.lse != nullptr) p.lse[cut.lse[r]] = lse * p.lse_factor;
    }
    factor[r] = scale;
  }
  ptx::named_barrier_sync(kValueBarrier, kThreads);
}

template <class T>
__device__ void reduce_result(const KernelParams& p, const CutResult<T::kRows>& cut, float* scratch,
                              int thread) {
  constexpr int kThreads = T::kValueThreads;
  constexpr int kRows = T::kRows;
  constexpr int kVectors = kRows / 4;  // float4 vectors of one dim
  const int num_pieces = cut.num_pieces;
  float* factor = scratch;                    // [kRows]
  float* sums = factor + kRows;               // [kThreads][4]
  float* weights = sums + kThreads * 4;       // [num_pieces][kRows]

  if (thread == 0) {
    while (ptx::load_acquire(p.arrived + cut.first_cta) < static_cast<uint32_t>(num_pieces)) {
    }
  }
  ptx::named_barrier_sync(kValueBarrier, kThreads);
  if (thread == 0) trace(kTraceArrived);
  weigh_pieces<T>(p, cut, weights, factor, sums, thread);
  if (thread == 0) trace(kTraceWeighed);

  // This CTA's slice of the dims, every float4 of it summed by `parts` threads over interleaved pieces.
  const int slice = (T::kLatent + num_pieces - 1) / num_pieces;
  const int dim_begin = min(cut.rank * slice, T::kLatent);
  const int num_vectors = (min(dim_begin + slice, T::kLatent) - dim_begin) * kVectors;
  int parts = 1;
  while (parts < num_pieces && 2 * parts * num_vectors <= kThreads) parts *= 2;
  const int span = kThreads / parts;  // vectors of a round
  const int part = thread / span;
  const int column = thread % span % kVectors * 4;  // span is a multiple of kVectors
  constexpr int64_t kPartialFloats = static_cast<int64_t>(T::kLatent) * kRows;
  const int64_t step = 2 * p.group * parts * kPartialFloats;
#pragma unroll 1
  for (int first = 0; first < num_vectors; first += span) {
    const int v = first + thread % span;
    const int dim = dim_begin + v / kVectors;
    float4 acc{0.0F, 0.0F, 0.0F, 0.0F};
    if (v < num_vectors) {
      // Piece 0 lies one slot beside the rest of the arithmetic progression.
      const float* source =
          p.partial_out + 2 * (cut.first_cta + part * p.group) * kPartialFloats + dim * kRows + column;
#pragma unroll 4
      for (int s = part; s < num_pieces; s += parts) {
        const float* address = s == 0 ? source + kPartialFloats : source;
        source += step;
        const float4 value = __ldcg(reinterpret_cast<const float4*>(address));
        const float4 w = *reinterpret_cast<const float4*>(weights + s * kRows + column);
        acc.x = fmaf(w.x, value.x, acc.x);
        acc.y = fmaf(w.y, value.y, acc.y);
        acc.z = fmaf(w.z, value.z, acc.z);
        acc.w = fmaf(w.w, value.w, acc.w);
      }
    }
    if (parts > 1) {
      *reinterpret_cast<float4*>(sums + thread * 4) = acc;
      ptx::named_barrier_sync(kValueBarrier, kThreads);
#pragma unroll 1
      for (int q = 1; q < parts && part == 0; ++q) {
        const float4 other = *reinterpret_cast<const float4*>(sums + (q * span + thread) * 4);
        acc.x += other.x;
        acc.y += other.y;
        acc.z += other.z;
        acc.w += other.w;
      }
    }
    if (part != 0 || v >= num_vectors) continue;
    // The sums pass through shared memory so that one store serves all four rows in a loop.
    *reinterpret_cast<float4*>(sums + thread * 4) = acc;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const int r = column + i;
      if (r < cut.num_rows) store_element(p, cut.out[r] + dim, sums[thread * 4 + i] * factor[r]);
    }
  }

  // The last CTA to finish puts the counters back to zero for the next launch.
  ptx::named_barrier_sync(kValueBarrier, kThreads);
  if (thread == 0) {
    trace(kTraceReduced);
    const auto others = static_cast<uint32_t>(num_pieces) - 1;
    if (ptx::atomic_add_acq_rel(p.finished + cut.first_cta, 1) == others) {
      p.arrived[cut.first_cta] = 0;
      p.finished[cut.first_cta] = 0;
    }
  }
}

}  // namespace mla::sm90
