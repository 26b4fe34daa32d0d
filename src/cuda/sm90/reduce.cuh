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
  int token[kRows];
  int head[kRows];
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
    cut.token[thread] = piece.row_token[thread];
    cut.head[thread] = piece.row_head[thread];
  }
}

/// After the last store of a partial by these threads. One thread's release covers what the barrier, and
/// the scores' barrier before it, have shown to that thread.
template <int kThreads>
__device__ void announce_partial(const KernelParams& p, int first_cta, int thread) {
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
      if (cut.rank == 0 && p.lse != nullptr) p.lse[row_offset(p.lse_stride, cut.token[r], cut.head[r])] = lse * p.lse_factor;
    }
    factor[r] = scale;
  }
  ptx::named_barrier_sync(kValueBarrier, kThreads);
}

/// Shared memory of the merge.
struct ReduceScratch {
  float* partials;           // [pieces][chunk of dims][rows], filled by the copy engine
  int partials_bytes;
  float* weights;            // factors, sums, then [pieces][rows]
  uint32_t partials_full;
  uint32_t phase;
};

/// Eight dims of one row.
__device__ __forceinline__ void store_eight(const KernelParams& p, int64_t offset, const float (&v)[8]) {
  if (p.out_vector_stores) {
    const bool is_f16 = static_cast<DType>(p.out_dtype) == DType::kF16;
    uint4 packed;
    packed.x = pack_output(v[0], v[1], is_f16);
    packed.y = pack_output(v[2], v[3], is_f16);
    packed.z = pack_output(v[4], v[5], is_f16);
    packed.w = pack_output(v[6], v[7], is_f16);
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + offset) = packed;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) store_element(p, offset + i, v[i]);
}

template <class T>
__device__ void reduce_result(const KernelParams& p, const CutResult<T::kRows>& cut,
                              ReduceScratch& scratch, int thread) {
  constexpr int kThreads = T::kValueThreads;
  constexpr int kRows = T::kRows;
  constexpr int kStep = 8;  // dims of one store
  const int num_pieces = cut.num_pieces;
  float* factor = scratch.weights;            // [kRows]
  float* sums = factor + kRows;               // [2 * kThreads]
  float* weights = sums + 2 * kThreads;       // [num_pieces][kRows]

  // This CTA's slice of the dims, in chunks that fit the scratch memory with all pieces; where not even
  // eight dims do, the pieces come in groups too.
  const int slice = ((T::kLatent + num_pieces - 1) / num_pieces + kStep - 1) / kStep * kStep;
  const int dim_begin = min(cut.rank * slice, T::kLatent);
  const int dim_end = min(dim_begin + slice, T::kLatent);
  const int most_dims = scratch.partials_bytes / (num_pieces * kRows * 4) / kStep * kStep;
  const int chunk = max(min(slice, most_dims), kStep);
  const int group = most_dims > 0 ? num_pieces : scratch.partials_bytes / (kStep * kRows * 4);
  const auto copy_chunk = [&](int dim, int dims, int first_piece, int last_piece) {
    ptx::mbarrier_expect(scratch.partials_full, (last_piece - first_piece) * dims * kRows * 4);
#pragma unroll 1
    for (int s = first_piece; s < last_piece; ++s) {
      const int64_t slot = partial_slot(cut.first_cta, p.group, s);
      ptx::bulk_load(ptx::smem_address(scratch.partials + (s - first_piece) * dims * kRows),
                     p.partial_out + (slot * T::kLatent + dim) * kRows, dims * kRows * 4,
                     scratch.partials_full);
    }
  };

  if (thread == 0) {
    while (ptx::load_acquire(p.arrived + cut.first_cta) < static_cast<uint32_t>(num_pieces)) {
    }
    ptx::fence_proxy_async_all();  // the copy engine reads what other CTAs stored
    if (dim_begin < dim_end) copy_chunk(dim_begin, min(chunk, dim_end - dim_begin), 0, group);
  }
  ptx::named_barrier_sync(kValueBarrier, kThreads);
  if (thread == 0) trace(kTraceArrived);
  weigh_pieces<T>(p, cut, weights, factor, sums, thread);
  if (thread == 0) trace(kTraceWeighed);

  int dim = dim_begin;
  int first_piece = 0;
  float acc[kStep];  // lives across groups of pieces: then every thread has one task
#pragma unroll 1
  while (dim < dim_end) {
    const int dims = min(chunk, dim_end - dim);
    const int last_piece = min(first_piece + group, num_pieces);
    ptx::mbarrier_wait(scratch.partials_full, scratch.phase);
    scratch.phase ^= 1;
#pragma unroll 1
    for (int task = thread; task < dims / kStep * kRows; task += kThreads) {
      const int r = task % kRows;
      const int first = task / kRows * kStep;
      if (first_piece == 0) {
#pragma unroll
        for (int i = 0; i < kStep; ++i) acc[i] = 0.0F;
      }
      const float* source = scratch.partials + first * kRows + r;
#pragma unroll 2
      for (int s = first_piece; s < last_piece; ++s) {
        const float w = weights[s * kRows + r];
#pragma unroll
        for (int i = 0; i < kStep; ++i) acc[i] = fmaf(w, source[i * kRows], acc[i]);
        source += dims * kRows;
      }
      if (last_piece < num_pieces || r >= cut.num_rows) continue;
#pragma unroll
      for (int i = 0; i < kStep; ++i) acc[i] *= factor[r];
      store_eight(p, row_offset(p.out_stride, cut.token[r], cut.head[r]) + dim + first, acc);
    }
    first_piece = last_piece;
    if (last_piece == num_pieces) {
      first_piece = 0;
      dim += chunk;
    }
    ptx::named_barrier_sync(kValueBarrier, kThreads);
    if (thread == 0 && dim < dim_end) {
      copy_chunk(dim, min(chunk, dim_end - dim), first_piece, min(first_piece + group, num_pieces));
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
