// Requests as the work division sees them, and the pieces that it hands to the roles.
#pragma once

#include <cstdint>

#include "cuda/arithmetic.cuh"
#include "cuda/call_params.hpp"
#include "cuda/ptx.cuh"

namespace mla::cuda {

/// Context parallelism's arithmetic is long and rare: kept out of line, because instructions that
/// run once cost a fetch each (docs/kernel-sm90.md).
__device__ __noinline__ inline int sharded_keys_below(const CallParams& p, int position) {
  return static_cast<int>(local_keys_below(p.cp, position));
}
template <bool kPlain>
__device__ __forceinline__ int keys_below(const CallParams& p, int position) {
  if (!kPlain && p.cp.world > 1) return sharded_keys_below(p, position);
  return max(position, 0);
}

/// First key and end of the keys that a token at `position` sees.
template <bool kPlain>
__device__ __forceinline__ int token_key_begin(const CallParams& p, int position) {
  if (kPlain || p.sliding_window == 0) return 0;
  return keys_below<kPlain>(p, position - p.sliding_window + 1);
}
template <bool kPlain>
__device__ __forceinline__ int token_key_end(const CallParams& p, int position, int seq_len) {
  if (!p.causal) return seq_len;
  return min(keys_below<kPlain>(p, position + 1), seq_len);
}

/// A request on the line.
struct LineRequest {
  int first_token = 0;
  int num_rows = 0;
  int seq_len = 0;
  int first_position = 0;  // global position of its first query token; negative when n_b > G_b
  int passes = 0;
  int tile_begin = 0;  // of the union of all its rows
  int num_tiles = 0;
  int result_cost = 0;  // set by the walk: tiles and overhead, or even parts

  __device__ int cost() const { return passes * result_cost; }
};

/// What memory says about a request.
struct RequestLengths {
  int seq_len, first_token, num_tokens, global_len;
};

template <class T>
__device__ __forceinline__ RequestLengths load_lengths(const CallParams& p, int request) {
  RequestLengths l;
  l.seq_len =
      T::kSparse && p.seq_lens == nullptr ? p.max_seq_len : __ldg(p.seq_lens + request);
  l.first_token = request * p.uniform_query_len;
  l.num_tokens = p.uniform_query_len;
  if (p.query_start_loc != nullptr) {
    l.first_token = __ldg(p.query_start_loc + request);
    l.num_tokens = __ldg(p.query_start_loc + request + 1) - l.first_token;
  }
  // Sparse: every token is a request, padding tokens included.
  if (T::kSparse && p.seq_lens == nullptr && p.token_end != nullptr && request >= __ldg(p.token_end))
    l.num_tokens = 0;
  l.global_len =
      !T::kPlain && p.global_lens != nullptr ? __ldg(p.global_lens + request) : INT32_MIN;
  return l;
}

template <class T>
__device__ __forceinline__ LineRequest line_request(const CallParams& p,
                                                    const RequestLengths& l) {
  LineRequest r;
  r.first_token = l.first_token;
  if (l.num_tokens <= 0) return r;
  r.seq_len = min(max(l.seq_len, 0), p.max_seq_len);
  r.first_position =
      (!T::kPlain && p.global_lens != nullptr ? l.global_len : r.seq_len) - l.num_tokens;
  r.num_rows = l.num_tokens * p.num_heads;
  const int blocks = (r.num_rows + T::kRows - 1) / T::kRows;
  r.passes = p.group_divisor.divide(blocks + p.group - 1);
  const int begin = token_key_begin<T::kPlain>(p, r.first_position);
  const int end = token_key_end<T::kPlain>(p, r.first_position + l.num_tokens - 1, r.seq_len);
  r.tile_begin = begin / T::kTileKeys;
  r.num_tiles = begin < end ? (end + T::kTileKeys - 1) / T::kTileKeys - r.tile_begin : 0;
  return r;
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
  int first_cta, num_pieces;   // of a cut result: CTA of its first piece; pieces
  int partial_slot;            // of a cut result: where this piece's partial goes
  int query_y, query_z;        // box coordinates of the first row
  int first_token, row_begin;  // of the request; of the block in it
  // By row.
  int64_t row_out[kRows];  // element offsets
  int64_t row_lse[kRows];
  int row_head[kRows];
  int row_key_begin[kRows];
  int row_key_end[kRows];
  int row_position[kRows];  // global position
};

/// A cut result that this CTA holds a piece of, kept in shared memory until the end.
template <int kRows>
struct CutResult {
  int valid;
  int first_cta;  // of the first piece; piece s lies group * s CTAs further on
  int num_pieces;
  int rank;  // of this CTA's piece
  int num_rows;
  int64_t row_out[kRows];
  int64_t row_lse[kRows];
  int row_head[kRows];
};

/// The partial slot of piece s: the first piece of a result is in slot 1 of its CTA, later ones in
/// 0.
__device__ __forceinline__ int partial_slot(int first_cta, int group, int s) {
  return 2 * (first_cta + s * group) + (s == 0 ? 1 : 0);
}

/// Element offset of a row.
__device__ __forceinline__ int64_t row_offset(const RowStrides& stride, int token, int head) {
  return token * stride.token + head * stride.head;
}

}  // namespace mla::cuda
