// Work division on the device: the line of key tiles, cut into equal shares, and its pieces.
//
// Every request contributes `passes` results (one for each `group` of row blocks), and every result
// costs its key tiles plus `piece_overhead`. Laid end to end they form a line; worker w takes
// [w, w+1) / workers of it. A share's end inside a result cuts it there, unless a piece smaller than
// `min_piece` would come off: then the end snaps to the result's edge. Both neighbours compute the same
// end from the same numbers, so nothing is communicated and no plan is stored. When every result can
// have a worker of its own and the longest is hardly longer than a share, nothing is cut at all: a merge
// costs more than it would save.
//
// One warp walks the pieces of its CTA and publishes them in shared memory; the roles only read. All of
// this runs alone on its scheduler, where every dependent instruction costs its full latency: hence
// the divisions by multiplication.
#pragma once

#include <cstdint>

#include "cuda/sm90/params.hpp"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/traits.cuh"

namespace mla::sm90 {

/// A request on the line.
struct LineRequest {
  int first_token = 0;
  int num_rows = 0;
  int seq_len = 0;
  int first_position = 0;      // global position of its first query token; negative when n_b > G_b
  int passes = 0;
  int tile_begin = 0;          // of the union of all its rows
  int num_tiles = 0;
  int result_cost = 0;         // piece_overhead + tiles

  __device__ int cost() const { return passes * result_cost; }
  __device__ void make_whole() { result_cost = passes > 0 ? 1 : 0; }
};

/// Context parallelism's arithmetic is long and rare: kept out of line, because instructions that run
/// once cost a fetch each (docs/kernel-sm90.md).
__device__ __noinline__ inline int sharded_keys_below(const KernelParams& p, int position) {
  return static_cast<int>(local_keys_below(p.cp, position));
}
__device__ __forceinline__ int keys_below(const KernelParams& p, int position) {
  if (p.cp.world > 1) return sharded_keys_below(p, position);
  return max(position, 0);
}

/// First key and end of the keys that a token at `position` sees.
__device__ __forceinline__ int token_key_begin(const KernelParams& p, int position) {
  if (p.sliding_window == 0) return 0;
  return keys_below(p, position - p.sliding_window + 1);
}
__device__ __forceinline__ int token_key_end(const KernelParams& p, int position, int seq_len) {
  if (!p.causal) return seq_len;
  return min(keys_below(p, position + 1), seq_len);
}

template <int kRows>
__device__ LineRequest line_request(const KernelParams& p, int request) {
  LineRequest r;
  int num_tokens = p.uniform_query_len;
  const int given = __ldg(p.seq_lens + request);
  if (p.query_start_loc != nullptr) {
    r.first_token = __ldg(p.query_start_loc + request);
    num_tokens = __ldg(p.query_start_loc + request + 1) - r.first_token;
  } else {
    r.first_token = request * num_tokens;
  }
  if (num_tokens <= 0) return r;
  r.seq_len = min(max(given, 0), p.max_seq_len);
  const int global = p.global_lens != nullptr ? __ldg(p.global_lens + request) : r.seq_len;
  r.first_position = global - num_tokens;
  r.num_rows = num_tokens * p.num_heads;
  const int blocks = (r.num_rows + kRows - 1) / kRows;
  r.passes = p.group_divisor.divide(blocks + p.group - 1);
  const int begin = token_key_begin(p, r.first_position);
  const int end = token_key_end(p, r.first_position + num_tokens - 1, r.seq_len);
  r.tile_begin = begin / kTileKeys;
  r.num_tiles = begin < end ? (end + kTileKeys - 1) / kTileKeys - r.tile_begin : 0;
  r.result_cost = p.piece_overhead + r.num_tiles;
  return r;
}

/// The share of one worker and where it begins.
struct Share {
  int total;         // cost of the whole line
  int whole_results; // 1: every result costs 1 and has a worker of its own
  int workers;       // that get any of it: every share is at least min_share, so no two cuts coincide
  int quotient, remainder;  // of total / workers
  int begin, end;    // snapped
  int request;       // the request that holds `begin`
  int prefix;        // its place on the line

  /// total * worker / workers, exactly.
  __device__ int raw_cut(int worker) const {
    if (worker >= workers) return total;
    return worker * quotient + worker * remainder / workers;
  }
};

/// Moves a cut at line position x inside the result [start, start + cost) to its edge where one of the
/// pieces would be too small.
__device__ __forceinline__ int snap_cut(const KernelParams& p, int x, int start, int cost) {
  if (x - start - p.piece_overhead < p.min_piece) return start;
  if (start + cost - x < p.min_piece) return start + cost;
  return x;
}

__device__ __forceinline__ int snap_in_request(const KernelParams& p, const LineRequest& r, int prefix,
                                               int x) {
  const int pass = r.passes == 1 ? 0 : (x - prefix) / r.result_cost;
  return snap_cut(p, x, prefix + pass * r.result_cost, r.result_cost);
}

/// Inclusive sum over the threads of the CTA below and including this one; `total` gets the whole sum.
template <int kThreads>
__device__ int scan_threads(int value, int* warp_sums, int& total) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0U, value, step);
    if (lane >= step) value += other;
  }
  __syncthreads();  // the previous use of warp_sums is over
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) value += warp_sums[w];
    total += warp_sums[w];
  }
  return value;
}

/// Called by every thread of the CTA. Finds the worker's share; ends with a barrier.
template <int kRows, int kThreads>
__device__ void find_share(const KernelParams& p, int worker, int* warp_sums, Share* share) {
  // The first kThreads requests stay in registers: usually that is all of them.
  LineRequest first;
  if (threadIdx.x < p.num_requests) first = line_request<kRows>(p, threadIdx.x);
  int total;
  const int first_prefix = scan_threads<kThreads>(first.cost(), warp_sums, total) - first.cost();
  const int first_total = total;
#pragma unroll 1
  for (int b0 = kThreads; b0 < p.num_requests; b0 += kThreads) {
    const int b = b0 + static_cast<int>(threadIdx.x);
    const int cost = b < p.num_requests ? line_request<kRows>(p, b).cost() : 0;
    int chunk_total;
    scan_threads<kThreads>(cost, warp_sums, chunk_total);
    total += chunk_total;
  }

  Share found{};
  found.total = total;
  found.workers = min(p.num_workers, max(1, total / p.min_share));
  int prefix = first_prefix;
  if (p.num_requests <= kThreads) {
    const int longest = total / found.workers + p.cut_cost;
    const int results = __syncthreads_count(first.passes > 0);
    if (!__syncthreads_or(first.passes > 1 || first.result_cost > longest) && results <= p.num_workers) {
      found.whole_results = 1;
      found.total = found.workers = max(results, 1);
      first.make_whole();
      int count;
      prefix = scan_threads<kThreads>(first.cost(), warp_sums, count) - first.cost();
    }
  }
  found.quotient = found.total / found.workers;
  found.remainder = found.total - found.quotient * found.workers;
  found.begin = found.end = found.prefix = found.total;
  found.request = p.num_requests;
  if (threadIdx.x == 0) *share = found;
  __syncthreads();

  const int begin = found.raw_cut(worker);
  const int end = found.raw_cut(worker + 1);
  LineRequest r = first;
  int base = first_total;
#pragma unroll 1
  for (int b0 = 0;;) {
    const int cost = r.cost();
    if (cost > 0 && begin >= prefix && begin < prefix + cost) {
      share->begin = snap_in_request(p, r, prefix, begin);
      share->request = b0 + static_cast<int>(threadIdx.x);
      share->prefix = prefix;
    }
    if (cost > 0 && end >= prefix && end < prefix + cost) share->end = snap_in_request(p, r, prefix, end);
    b0 += kThreads;
    if (b0 >= p.num_requests || base > end) break;
    const int b = b0 + static_cast<int>(threadIdx.x);
    r = b < p.num_requests ? line_request<kRows>(p, b) : LineRequest();
    int chunk_total;
    prefix = base + scan_threads<kThreads>(r.cost(), warp_sums, chunk_total) - r.cost();
    base += chunk_total;
  }
  __syncthreads();
}

/// One piece of one result for one CTA, as the roles read it from shared memory.
template <int kRows>
struct Piece {
  int valid;                   // 0: there are no more
  int request;                 // row of the block table
  int tile_begin, tile_end;    // absolute key tiles
  int key_begin, key_end;      // union of the rows' visible keys
  int plain_begin, plain_end;  // keys that every row sees
  int num_rows;                // 1..kRows
  int whole;                   // holds all tiles of its result
  // Of a cut result.
  int first_cta;               // CTA of its first piece
  int num_pieces;
  int rank;                    // of this piece
  int position;                // global position of the first row
  int token;                   // of the first row
  // By row.
  int row_key_begin[kRows];
  int row_key_end[kRows];
  int row_token[kRows];
  int row_head[kRows];

  __device__ int row_position(int r) const { return position + row_token[r] - token; }
};

/// Element offset of a row.
__device__ __forceinline__ int64_t row_offset(const RowStrides& stride, int token, int head) {
  return token * stride.token + head * stride.head;
}

/// Walks the pieces of one CTA's share. One warp, convergent. A piece is written in two steps, so that
/// copies can begin after the first.
template <int kRows>
class PieceWalk {
 public:
  __device__ PieceWalk(const KernelParams& p, const Share& share, int member, int lane)
      : p_(p), share_(share), member_(member), lane_(lane), request_(share.request),
        prefix_(share.prefix) {}

  /// Step 1: which keys. False, and valid = 0, when there are no more pieces.
  __device__ bool next(Piece<kRows>& piece) {
    bool found = false;
#pragma unroll 1
    while (request_ < p_.num_requests && prefix_ < share_.end) {
      if (pass_ == 0) {
        current_ = line_request<kRows>(p_, request_);
        if (share_.whole_results) current_.make_whole();
      }
      while (!found && pass_ < current_.passes) found = begin_piece(pass_++, piece);
      if (found) return true;
      prefix_ += current_.cost();
      ++request_;
      pass_ = 0;
    }
    if (lane_ == 0) piece.valid = 0;
    return false;
  }

  /// The token and head of its first row.
  __device__ int first_token() const { return current_.first_token + p_.heads_divisor.divide(row_begin_); }
  __device__ int first_head() const {
    return row_begin_ - p_.heads_divisor.divide(row_begin_) * p_.num_heads;
  }

  /// Step 2: its rows, and of a cut result its other pieces.
  __device__ void finish(Piece<kRows>& piece) {
    const int num_rows = piece.num_rows;
#pragma unroll 1
    for (int r = lane_; r < kRows; r += 32) {
      // Columns past num_rows repeat the last row with Q = 0; their results are dropped.
      const int row = row_begin_ + min(r, num_rows - 1);
      const int i = p_.heads_divisor.divide(row);
      piece.row_token[r] = current_.first_token + i;
      piece.row_head[r] = row - i * p_.num_heads;
      const int position = current_.first_position + i;
      piece.row_key_begin[r] = token_key_begin(p_, position);
      piece.row_key_end[r] = token_key_end(p_, position, current_.seq_len);
    }
    if (lane_ == 0 && !piece.whole) find_cuts(piece);
  }

 private:
  __device__ bool begin_piece(int pass, Piece<kRows>& piece) {
    start_ = prefix_ + pass * current_.result_cost;
    const int from = max(start_, share_.begin);
    const int to = min(start_ + current_.result_cost, share_.end);
    row_begin_ = (pass * p_.group + member_) * kRows;
    if (from >= to || row_begin_ >= current_.num_rows) return false;
    if (lane_ != 0) return true;

    const int num_rows = min(kRows, current_.num_rows - row_begin_);
    // Ranges move up with the token: the first row begins lowest and ends lowest.
    const int first = current_.first_position + p_.heads_divisor.divide(row_begin_);
    const int last = current_.first_position + p_.heads_divisor.divide(row_begin_ + num_rows - 1);
    const int key_begin = token_key_begin(p_, first);
    const int key_end = token_key_end(p_, last, current_.seq_len);
    // Tiles of the piece, then those of them that the row block sees.
    const bool whole = from == start_ && to == start_ + current_.result_cost;
    const int all_begin = current_.tile_begin;
    const int offset = all_begin - start_ - p_.piece_overhead;
    const int piece_begin = whole ? all_begin : max(from + offset, all_begin);
    const int piece_end = whole ? all_begin + current_.num_tiles : max(to + offset, all_begin);
    const int tile_begin = max(piece_begin, key_begin / kTileKeys);
    const int tile_end = min(piece_end, (key_end + kTileKeys - 1) / kTileKeys);
    piece.valid = 1;
    piece.request = request_;
    piece.position = first;
    piece.token = first - current_.first_position + current_.first_token;
    piece.num_rows = num_rows;
    piece.key_begin = key_begin;
    piece.key_end = key_end;
    piece.plain_begin = token_key_begin(p_, last);
    piece.plain_end = token_key_end(p_, first, current_.seq_len);
    piece.tile_begin = tile_begin;
    piece.tile_end = key_begin < key_end ? tile_end : tile_begin;
    piece.whole = whole;
    return true;
  }

  /// The cuts that fall inside a result belong to consecutive workers. Both ends are guessed and then
  /// moved by a step or two.
  __device__ void find_cuts(Piece<kRows>& piece) const {
    const int start = start_;
    const int end = start + current_.result_cost;
    const float workers_per_cost = static_cast<float>(share_.workers) / static_cast<float>(share_.total);
    // The first worker whose cut lies inside: raw cuts that snap to the start do not count.
    int first = max(static_cast<int>(static_cast<float>(start) * workers_per_cost) - 1, 0);
#pragma unroll 1
    while (share_.raw_cut(first) < start + p_.piece_overhead + p_.min_piece) ++first;
    // The first worker past it.
    int last = max(static_cast<int>(static_cast<float>(end) * workers_per_cost) - 2, first);
#pragma unroll 1
    while (last < share_.workers && share_.raw_cut(last) <= end - p_.min_piece) ++last;
    const int first_worker = first - 1;
    piece.first_cta = first_worker * p_.group + member_;
    piece.num_pieces = last - first + 1;
    piece.rank = p_.group_divisor.divide(blockIdx.x) - first_worker;
  }

  const KernelParams& p_;
  Share share_;
  int member_;
  int lane_;
  int request_;
  int prefix_;
  int pass_ = 0;
  int start_ = 0;      // of the current result on the line
  int row_begin_ = 0;
  LineRequest current_;
};

}  // namespace mla::sm90
