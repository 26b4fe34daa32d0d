// Cut results: every CTA that wrote a piece waits for the others, then merges a slice of the
// partials.
//
// The grid is launched cooperatively, so all CTAs are resident and waiting cannot deadlock. All
// pieces are written before the first wait. A slice is a contiguous range of the partial,
// [row][dim]. Groups of threads merge every G-th piece by the one rule of lse, and the groups are
// joined in order: the same bits every time. Every thread works out the weights it needs itself:
// nothing is exchanged for them.
#pragma once

#include "cuda/row_end.cuh"
#include "cuda/trace.cuh"

namespace mla::cuda {

/// Threads that merge one result, and their scratch memory.
struct MergeTeam {
  int size;     // 128 or 256
  int thread;   // in the team
  int barrier;  // named barrier
  char* scratch;

  __device__ void sync() const { ptx::named_barrier_sync(barrier, size); }
};

/// What of the partials belongs to a team, in vectors of four floats.
struct MergeSlice {
  int begin, end;
  // `groups` groups of `width` threads; a group merges every groups-th piece of up to `width`
  // vectors.
  int width, groups, group;
  int vector;  // of this thread, from its group's first
};

/// A running merge of four values of one row: sum of exp2(m_s - max) * o_s over pieces s, and of
/// the same factor * l_s, where m_s and l_s are a piece's maximum and sum.
struct MergeState {
  float4 o{0, 0, 0, 0};
  float max = -INFINITY;
  float sum = 0.0F;

  __device__ __forceinline__ void rescale(float new_max) {
    const float factor = max == -INFINITY ? 0.0F : ptx::exp2_approx(max - new_max);
    o.x *= factor;
    o.y *= factor;
    o.z *= factor;
    o.w *= factor;
    sum *= factor;
    max = new_max;
  }
  __device__ __forceinline__ void add(float weight, const float4& value) {
    o.x = fmaf(weight, value.x, o.x);
    o.y = fmaf(weight, value.y, o.y);
    o.z = fmaf(weight, value.z, o.z);
    o.w = fmaf(weight, value.w, o.w);
  }
};

/// Four neighbouring values of one row.
template <class T>
__device__ __forceinline__ void store_four(const CallParams& p, int64_t offset, const float4& v,
                                           float factor) {
  if (T::kPlain || p.out_vector_stores) {
    const bool is_f16 = output_is_f16(p);
    uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + offset);
    out[0] = pack_output(v.x * factor, v.y * factor, is_f16);
    out[1] = pack_output(v.z * factor, v.w * factor, is_f16);
  } else {
    store_element(p, offset, v.x * factor);
    store_element(p, offset + 1, v.y * factor);
    store_element(p, offset + 2, v.z * factor);
    store_element(p, offset + 3, v.w * factor);
  }
}

/// A merged vector, to out; lse of the row if the vector is its first.
template <class T>
__device__ __forceinline__ void store_merged(const CallParams& p, const CutResult<T::kRows>& cut,
                                             const MergeState& state, int vector) {
  constexpr int kRowVectors = T::kLatent / 4;
  const int row = vector / kRowVectors;
  const int dim = (vector - row * kRowVectors) * 4;
  const bool empty = saw_nothing(state.sum);
  const JoinedRow joined = join_sink(p.sinks, cut.row_head[row],
                                     empty ? -INFINITY : (state.max + __log2f(state.sum)) * kLn2);
  const float factor = empty ? 0.0F
                             : joined.weight * scale_of(p.bmm2_scale, p.bmm2_scale_pointer) *
                                   __fdividef(1.0F, state.sum);
  if (dim == 0 && p.lse != nullptr) p.lse[cut.row_lse[row]] = joined.lse * p.lse_factor;
  if (!T::kRuntimeLatent || dim < p.latent) store_four<T>(p, cut.row_out[row] + dim, state.o, factor);
}

/// Merges a slice, kPieces pieces of kVectors vectors in flight.
template <class T, int kPieces, int kVectors>
__device__ __forceinline__ void merge_slice(const CallParams& p, const CutResult<T::kRows>& cut,
                                            const MergeTeam& team, const MergeSlice& slice) {
  constexpr int kRowVectors = T::kLatent / 4;
  constexpr int kPartialVectors = T::kRows * kRowVectors;
  const int num_pieces = cut.num_pieces;
#pragma unroll 1
  for (int base = slice.begin + slice.vector; base < slice.end + slice.vector;
       base += slice.width * kVectors) {
    MergeState state[kVectors];
#pragma unroll 1
    for (int s0 = slice.group; s0 < num_pieces && slice.group < slice.groups;
         s0 += kPieces * slice.groups) {
      float4 x[kPieces][kVectors];
      float2 stats[kPieces][kVectors];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int s = s0 + i * slice.groups;
        const int slot = partial_slot(cut.first_cta, p.group, s);
        const float2* row_stats = p.partial_stats + slot * T::kRows;
        const auto* partials =
            reinterpret_cast<const float4*>(p.partial_out) + int64_t{slot} * kPartialVectors;
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          const int vector = base + j * slice.width;
          stats[i][j] = float2{-INFINITY, 0.0F};
          if (s < num_pieces && vector < slice.end) {
            stats[i][j] = __ldcg(row_stats + vector / kRowVectors);
            x[i][j] = __ldcg(partials + vector);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float new_max = state[j].max;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) new_max = fmaxf(new_max, stats[i][j].x);
        if (s0 != slice.group) state[j].rescale(new_max);
        state[j].max = new_max;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          if (saw_nothing(stats[i][j].y)) continue;  // also what was not loaded
          const float weight = ptx::exp2_approx(stats[i][j].x - new_max);
          state[j].sum = fmaf(weight, stats[i][j].y, state[j].sum);
          state[j].add(weight, x[i][j]);
        }
      }
    }
    if (kVectors == 1 && slice.groups > 1) {  // then there is one base
      auto* states = reinterpret_cast<MergeState*>(team.scratch);
      states[team.thread] = state[0];
      team.sync();
#pragma unroll 1
      for (int g = 1; g < slice.groups && slice.group == 0; ++g) {
        const MergeState other = states[g * slice.width + slice.vector];
        if (saw_nothing(other.sum)) continue;
        if (other.max > state[0].max) state[0].rescale(other.max);
        const float weight = ptx::exp2_approx(other.max - state[0].max);
        state[0].sum = fmaf(weight, other.sum, state[0].sum);
        state[0].add(weight, other.o);
      }
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int vector = base + j * slice.width;
      if (vector < slice.end && slice.group == 0) store_merged<T>(p, cut, state[j], vector);
    }
  }
}

template <class T>
__device__ __forceinline__ void merge_result(const CallParams& p, const CutResult<T::kRows>& cut,
                                             const MergeTeam& team) {
  constexpr int kGrain = 32;  // vectors of the smallest slice
  const int num_pieces = cut.num_pieces;
  const int all = cut.num_rows * (T::kLatent / 4);  // rows that exist
  const int size = (divide(all + num_pieces - 1, num_pieces) + kGrain - 1) / kGrain * kGrain;
  MergeSlice slice;
  slice.begin = min(cut.rank * size, all);
  slice.end = min(slice.begin + size, all);
  slice.width = min(size, team.size);
  slice.groups = divide(team.size, slice.width);
  slice.group = divide(team.thread, slice.width);
  slice.vector = team.thread - slice.group * slice.width;
  if (num_pieces <= 4 && slice.groups == 1)
    merge_slice<T, 4, 2>(p, cut, team, slice);
  else
    merge_slice<T, 8, 1>(p, cut, team, slice);
}

/// Every cut result of this CTA: one by all 256 threads of the last two warpgroups, or two side by
/// side.
template <class T>
__device__ __forceinline__ void merge_role(const CallParams& p,
                                           const CutResult<T::kRows> (&cuts)[2], char* ring,
                                           int thread) {
  constexpr int kThreads = 256;
  constexpr int kScratchBytes = 128 * sizeof(MergeState);  // of half the threads
  ptx::named_barrier_sync(T::kMergeBarrier, kThreads);        // the ring is idle from here on
  if (!cuts[0].valid && !cuts[1].valid) return;
  MergeTeam team{kThreads, thread, T::kMergeBarrier, ring};
  int which = cuts[0].valid ? 0 : 1;
  if (cuts[0].valid && cuts[1].valid) {
    which = thread / 128;
    team = {128, thread % 128, T::kMergeBarrier + which, ring + which * kScratchBytes};
  }
  const CutResult<T::kRows>& cut = cuts[which];
  uint32_t* progress = p.progress + cut.first_cta;
  const auto num_pieces = static_cast<uint32_t>(cut.num_pieces);
  if (team.thread == 0) {
    while (ptx::load_acquire(progress) < num_pieces) {
    }
    trace(kTraceArrived);
  }
  team.sync();
  merge_result<T>(p, cut, team);
  // Departures bring the counter back to zero for the next launch. Every thread has read its part.
  team.sync();
  if (team.thread == 0) {
    trace(kTraceReduced);
    ptx::increment_release(progress, 2 * num_pieces - 1);
  }
}

}  // namespace mla::cuda
