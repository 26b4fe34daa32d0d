// Decode attention with the tensor cores of sm_80: one launch plans, reads pages, attends and
// merges.
//
// Grid: one CTA of 8 warps a multiprocessor, launched cooperatively. cuda/line.cuh gives each
// worker its part of all key tiles, cuda/reduce.cuh joins the results that were cut.
//
// Every warp does everything; the stages of a tile j and the barriers between them:
//
//   A   scores of j are in shared memory; PV of j-1 is done, so its stage of the ring is free
//         copy ahead (deep ring) | softmax of j -> P
//   C   P is in shared memory; and, with a deep ring, tile j+1 is complete
//         [a score exceeds the running maximum: two more barriers, O is rescaled]
//         PV of j
//   E   shallow ring only: tile j+1 is complete, the stage of j is free: copy ahead
//         QK of j+1 -> scores
//
// So PV of a tile and QK of the next run side by side in different warps. QK is cut by width as
// well as by rows and keys (traits.cuh): a warp's part of Q then fits its registers, and every key
// is read from shared memory once.
//
// A row block of 16, 32 or 64 rows; 64 rows need a multiprocessor with 227 KB of shared memory.
#pragma once

#include <new>

#include "cuda/line.cuh"
#include "cuda/portable/products.cuh"
#include "cuda/portable/softmax.cuh"
#include "cuda/portable/stream.cuh"
#include "cuda/portable/values.cuh"
#include "cuda/reduce.cuh"

namespace mla::portable {

/// The plan of this CTA, kept out of registers: it is asked once a piece. Warp 0.
template <class T>
struct Plan {
  alignas(alignof(PieceWalk<T>)) char storage[sizeof(PieceWalk<T>)];

  __device__ __noinline__ void begin(const KernelParams& p, int lane) {
    const int worker = p.group_divisor.divide(static_cast<int>(blockIdx.x));
    new (storage)
        PieceWalk<T>(p, worker, static_cast<int>(blockIdx.x) - worker * p.group, lane);
  }
  /// The next piece, complete; valid = 0 behind the last.
  __device__ __noinline__ void publish(SmallShared<T>& small, uint32_t count) {
    auto& walk = *reinterpret_cast<PieceWalk<T>*>(storage);
    Piece<T::kRows>& piece = small.pieces[count & 1];
    if (walk.next(piece)) walk.finish(piece, small.cuts);
  }
};

/// One piece, from its first tile to its output or partial.
template <class T>
class PieceRunner {
 public:
  __device__ __forceinline__ PieceRunner(const Context<T>& c, TileStream<T>& stream, Plan<T>& plan)
      : c_(c), stream_(stream), plan_(plan), softmax_(c) {}

  __device__ __forceinline__ void run(const Piece<T::kRows>& piece, uint32_t count) {
    const KernelParams& p = c_.p;
    const int num_tiles = piece.tile_end - piece.tile_begin;
    stream_.fill(tile_ + p.num_stages, count + 1);
    load_rows(piece);
    clear_output<T>(output_);
    if (num_tiles > 0) stream_.wait(tile_);
    __syncthreads();
    if (c_.warp == 0) plan_.publish(c_.small(), count + 1);
    if (num_tiles > 0) multiply_scores<T>(c_, query_, c_.stage(slot_));
#pragma unroll 1
    for (int t = 0; t < num_tiles; ++t) run_tile(piece, piece.tile_begin + t, t + 1 < num_tiles, count);
    finish(piece);
  }

 private:
  /// Q, slopes, and the softmax's start.
  __device__ __forceinline__ void load_rows(const Piece<T::kRows>& piece) {
    const KernelParams& p = c_.p;
    if (p.alibi_slopes != nullptr && c_.thread < T::kRows) {
      c_.small().slope[c_.thread] = __ldg(p.alibi_slopes + piece.row_head[c_.thread]) * kLog2E;
    }
    if (p.scale_query) {
      scale_query_rows<T>(c_, piece);
      __syncthreads();
    }
    load_query<T>(c_, piece, query_);
    softmax_.begin_piece();
  }

  __device__ __forceinline__ void run_tile(const Piece<T::kRows>& piece, int tile, bool more,
                                           uint32_t count) {
    const KernelParams& p = c_.p;
    const char* stage = c_.stage(slot_);
    const int next_slot = slot_ + 1 == p.num_stages ? 0 : slot_ + 1;
    __syncthreads();  // A
    if (p.deep) stream_.fill(tile_ + p.num_stages, count + 2);
    const bool exceeds = softmax_.load_scores(piece, tile, slot_);
    const RowState before = softmax_.state;
    softmax_.store_probabilities(stage);
    if (p.deep && more) stream_.wait(tile_ + 1);
    if (__syncthreads_or(exceeds)) {  // C
      softmax_.share_maxima();
      __syncthreads();
      softmax_.move_maxima(before);
      softmax_.store_probabilities(stage);
      __syncthreads();
      scale_output(c_, c_.small().rescale, output_);
    }
    multiply_values<T>(c_, stage, output_);
    if (!p.deep) {
      if (more) stream_.wait(tile_ + 1);
      __syncthreads();  // E
      stream_.fill(tile_ + 1 + p.num_stages, count + 2);
    }
    if (more) multiply_scores<T>(c_, query_, c_.stage(next_slot));
    slot_ = next_slot;
    ++tile_;
  }

  __device__ __forceinline__ void finish(const Piece<T::kRows>& piece) {
    const KernelParams& p = c_.p;
    SmallShared<T>& small = c_.small();
    softmax_.share_sums();
    __syncthreads();
    if (c_.thread < T::kRows) {
      const int r = c_.thread;
      float sum = small.row_sum[0][r];
#pragma unroll
      for (int part = 1; part < T::kRowParts; ++part) sum += small.row_sum[part][r];
      small.final_scale[r] = finish_row<T>(p, piece, r, small.row_max[0][r], sum);
    }
    if (!piece.whole) store_partial(c_, piece, output_);
    __syncthreads();
    if (piece.whole) {
      store_output(c_, piece, output_);
    } else if (c_.thread == 0) {
      ptx::increment_release(p.progress + piece.first_cta, 2 * piece.num_pieces - 1);
    }
  }

  const Context<T>& c_;
  TileStream<T>& stream_;
  Plan<T>& plan_;
  Softmax<T> softmax_;
  QueryRegisters<T> query_;
  Output<T> output_;
  uint32_t tile_ = 0;  // of the stream
  int slot_ = 0;       // tile_ modulo the ring
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    decode_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(128) char shared[];
  const int thread = static_cast<int>(threadIdx.x);
  const Context<T> context{p, shared, thread, __shfl_sync(~0U, thread / 32, 0), thread % 32};
  SmallShared<T>& small = context.small();
  Plan<T> plan;
  if (context.warp == 0) {
    if (context.lane < 2) small.cuts[context.lane].valid = 0;
    __syncwarp();
    plan.begin(p, context.lane);
    plan.publish(small, 0);
  }
  __syncthreads();
  {
    TileStream<T> stream(context);
    PieceRunner<T> runner(context, stream, plan);
#pragma unroll 1
    for (uint32_t count = 0; small.pieces[count & 1].valid; ++count)
      runner.run(small.pieces[count & 1], count);
  }
  ptx::cp_async_wait_all();
  __syncthreads();
  merge_role<T>(p, small.cuts, shared + SharedMap<T>::kRing, thread);
  if (p.token_end != nullptr) store_padding<T::kThreads>(p, p.latent, thread);
}

}  // namespace mla::portable
