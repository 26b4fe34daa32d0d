// Work division on the device: the line of key tiles, cut into equal shares, and its pieces.
//
// Every request contributes `passes` results (one for each `group` of row blocks), and every result
// costs its key tiles plus `piece_overhead`. Laid end to end they form a line; worker w takes
// [w, w+1) / workers of it. A share's end inside a result cuts it there, unless a piece smaller
// than `min_piece` would come off: then the end snaps to the result's edge. Both neighbours compute
// the same end from the same numbers, so nothing is communicated and no plan is stored.
//
// Such a cut gives most workers two pieces. Where there are at least as many workers as results,
// and it hardly lengthens the longest share, every result is cut into even parts instead, each a
// worker's only piece: half the partials, half the starts and ends, and no merge at all of results
// that fit a part.
//
// One warp of each CTA does all of this and publishes pieces in shared memory; the roles only read.
// It is the first thing of a launch and nothing can hide it: hence one pass over the lengths, lanes
// side by side, one scan, and hardly a division.
#pragma once

#include "cuda/piece.cuh"

namespace mla::cuda {

/// Finds one CTA's share of the work and walks its pieces. One warp, convergent. A piece is written
/// in two steps, so that copies can begin after the first.
template <class T>
class PieceWalk {
 public:
  __device__ __forceinline__ PieceWalk(const CallParams& p, int worker, int member, int lane)
      : p_(p), worker_(worker), member_(member), lane_(lane) {
    // A lane takes `per_lane` neighbouring requests; what they cost stays in registers while they
    // are few.
    per_lane_ = (p.num_requests + 31) / 32;
    first_request_ = lane * per_lane_;
    // All loads come before the first use.
    RequestLengths lengths[kCached];
#pragma unroll
    for (int i = 0; i < kCached; ++i) {
      if (i < per_lane_)
        lengths[i] = load_lengths<T>(p, min(first_request_ + i, p.num_requests - 1));
    }
    Costs costs[kCached];
#pragma unroll
    for (int i = 0; i < kCached; ++i) {
      if (i < per_lane_) costs[i] = costs_of(first_request_ + i, lengths[i]);
    }
    int cost = 0, longest = 0, results = 0;
    for_requests(costs, [&](int, const Costs& r) {
      cost += r.passes * (p_.piece_overhead + r.num_tiles);
      longest = max(longest, r.num_tiles);
      results += r.passes;
    });
    total_ = __reduce_add_sync(~0U, cost);
    const int num_results = __reduce_add_sync(~0U, results);
    workers_ = min(p.num_workers, max(1, total_ >> p.min_share_log2));
    quotient_ = divide(total_, workers_);
    even_tiles_ = 0;
    if (num_results > 0 && p.even_slack >= 0) longest = __reduce_max_sync(~0U, longest);
    if (num_results > p.num_workers && p.even_slack >= 0) {
      // Equally long results stay whole, so many a worker, where that is hardly uneven.
      const int share = divide(num_results + p.num_workers - 1, p.num_workers);
      const bool equal = longest * num_results == total_ - num_results * p.piece_overhead;
      if (equal && share * (longest + p.piece_overhead) <= quotient_ + (quotient_ >> 4) + 1) {
        even_tiles_ = max(longest, 1);
        cost = results;
        total_ = num_results;
        workers_ = divide(num_results + share - 1, share);
        quotient_ = divide(total_, workers_);
      }
    } else if (num_results > 0 && p.even_slack >= 0) {
      // Even parts of at most `tiles` each: nearly the smallest number for which the workers
      // suffice. Where all results are equally long the first guess is right.
      const int parts = divide(p.num_workers, num_results);
      int tiles = max(divide(longest + parts - 1, parts), quotient_ - p.piece_overhead);
      if (longest * num_results != total_ - num_results * p.piece_overhead)
        tiles = quotient_ - p.piece_overhead;
      tiles = max(tiles, 1 << p.min_share_log2);
      const int tile_limit = quotient_ + 1 + (quotient_ * p.even_slack >> 6);
#pragma unroll 1
      while (tiles <= tile_limit || longest <= tiles) {
        int lane_parts = 0;
        for_requests(costs, [&](int, const Costs& r) {
          lane_parts += r.passes * parts_of(r.num_tiles, tiles);
        });
        const int all_parts = __reduce_add_sync(~0U, lane_parts);
        if (all_parts <= p.num_workers) {
          even_tiles_ = tiles;
          cost = lane_parts;
          total_ = workers_ = all_parts;
          quotient_ = 1;
          break;
        }
        tiles += 1 + (tiles >> 5);
      }
    }
    remainder_ = total_ - quotient_ * workers_;

    int prefix = cost;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0U, prefix, step);
      if (lane >= step) prefix += other;
    }
    prefix -= cost;
    const int begin = raw_cut(worker);
    const int end = raw_cut(worker + 1);
    int snapped_begin = total_, snapped_end = total_, request = p.num_requests,
        request_prefix = total_;
    if (begin < prefix + cost && end >= prefix) {
      for_requests(costs, [&](int b, const Costs& r) {
        const int result_cost = cost_of(r.num_tiles);
        const int request_end = prefix + r.passes * result_cost;
        if (begin >= prefix && begin < request_end) {
          snapped_begin = snap(begin, prefix, result_cost, r.passes);
          request = b;
          request_prefix = prefix;
        }
        if (end >= prefix && end < request_end)
          snapped_end = snap(end, prefix, result_cost, r.passes);
        prefix = request_end;
      });
    }
    begin_ = __reduce_min_sync(~0U, snapped_begin);
    end_ = __reduce_min_sync(~0U, snapped_end);
    request_ = __reduce_min_sync(~0U, request);
    prefix_ = __reduce_min_sync(~0U, request_prefix);
  }

  /// Step 1: which keys. False, and valid = 0, when there are no more pieces.
  __device__ __forceinline__ bool next(Piece<T::kRows>& piece) {
#pragma unroll 1
    while (request_ < p_.num_requests && prefix_ < end_) {
      if (pass_ == 0) {
        current_ = line_request<T>(p_, load_lengths<T>(p_, request_));
        current_.result_cost = current_.passes > 0 ? cost_of(current_.num_tiles) : 0;
      }
#pragma unroll 1
      while (pass_ < current_.passes) {
        if (begin_piece(pass_++, piece)) return true;
      }
      prefix_ += current_.cost();
      ++request_;
      pass_ = 0;
    }
    if (lane_ == 0) piece.valid = 0;
    return false;
  }

  /// Step 2: its rows, and of a cut result its other pieces.
  __device__ __forceinline__ void finish(Piece<T::kRows>& piece, CutResult<T::kRows> (&cuts)[2]) {
    int first_cta = 0, num_pieces = 0, rank = 0;
    if (!whole_) {
      find_cuts(first_cta, num_pieces, rank);
      if (lane_ == 0) {
        piece.first_cta = first_cta;
        piece.num_pieces = num_pieces;
        piece.partial_slot = partial_slot(first_cta, p_.group, rank);
      }
    }
    CutResult<T::kRows>& cut = cuts[rank == 0 ? 1 : 0];
    if (!whole_ && lane_ == 0) {
      cut.valid = 1;
      cut.first_cta = first_cta;
      cut.num_pieces = num_pieces;
      cut.rank = rank;
      cut.num_rows = num_rows_;
    }
#pragma unroll 1
    for (int r = lane_; r < T::kRows; r += 32) {
      // Rows past num_rows repeat the last row; their results are dropped.
      const int row = row_begin_ + min(r, num_rows_ - 1);
      const int i = p_.heads_divisor.divide(row);
      const int token = current_.first_token + i;
      const int head = row - i * p_.num_heads;
      const int position = current_.first_position + i;
      const int64_t out = row_offset(p_.out_stride, token, head);
      const int64_t lse = row_offset(p_.lse_stride, token, head);
      piece.row_out[r] = out;
      piece.row_lse[r] = lse;
      piece.row_head[r] = head;
      piece.row_key_end[r] = token_key_end<T::kPlain>(p_, position, current_.seq_len);
      if (!T::kPlain) {
        piece.row_key_begin[r] = token_key_begin<T::kPlain>(p_, position);
        piece.row_position[r] = position;
      }
      if (!whole_) {
        cut.row_out[r] = out;
        cut.row_lse[r] = lse;
        cut.row_head[r] = head;
      }
    }
  }

 private:
  /// Where worker w's share begins: total / workers each, the first `remainder` workers one more.
  __device__ int raw_cut(int w) const {
    return w >= workers_ ? total_ : w * quotient_ + min(w, remainder_);
  }
  /// The first worker whose share begins at x or later.
  __device__ int first_worker_at(int x) const {
    const int long_shares = remainder_ * (quotient_ + 1);
    const bool among_long = x <= long_shares;
    const int base = among_long ? 0 : long_shares;
    const int share = quotient_ + (among_long ? 1 : 0);
    return (among_long ? 0 : remainder_) + divide(x - base + share - 1, share);
  }

  /// What the division needs to know of a request.
  struct Costs {
    int passes = 0;
    int num_tiles = 0;
  };
  static constexpr int kCached = 4;  // requests of a lane in registers: 128 of a batch

  __device__ __forceinline__ Costs costs_of(int request, const RequestLengths& lengths) const {
    if (request >= p_.num_requests) return {};
    const LineRequest r = line_request<T>(p_, lengths);
    return {r.passes, r.num_tiles};
  }
  /// Calls f(request, costs) for every request of this lane.
  template <class F>
  __device__ __forceinline__ void for_requests(const Costs (&costs)[kCached], F f) const {
    if (per_lane_ <= kCached) {
#pragma unroll
      for (int i = 0; i < kCached; ++i) {
        if (i < per_lane_) f(first_request_ + i, costs[i]);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < per_lane_; ++i) {
        const int request = min(first_request_ + i, p_.num_requests - 1);
        f(first_request_ + i, costs_of(first_request_ + i, load_lengths<T>(p_, request)));
      }
    }
  }

  /// Even parts of a result: ceil(num_tiles / tiles), at least 1.
  __device__ static int parts_of(int num_tiles, int tiles) {
    // Half a unit is far more than the error of the product.
    const float quotient =
        (static_cast<float>(num_tiles + tiles) - 0.5F) * __frcp_rn(static_cast<float>(tiles));
    return max(static_cast<int>(quotient), 1);
  }
  /// Cost of a result of a request that has rows.
  __device__ int cost_of(int num_tiles) const {
    return even_tiles_ == 0 ? p_.piece_overhead + num_tiles : parts_of(num_tiles, even_tiles_);
  }

  /// Moves a cut at line position x to the edge of its result where a piece would be too small.
  __device__ int snap(int x, int prefix, int result_cost, int passes) const {
    if (even_tiles_ > 0) return x;
    const int start = prefix + (passes == 1 ? 0 : divide(x - prefix, result_cost) * result_cost);
    if (x - start - p_.piece_overhead < p_.min_piece) return start;
    if (start + result_cost - x < p_.min_piece) return start + result_cost;
    return x;
  }

  __device__ __forceinline__ bool begin_piece(int pass, Piece<T::kRows>& piece) {
    start_ = prefix_ + pass * current_.result_cost;
    const int from = max(start_, begin_);
    const int to = min(start_ + current_.result_cost, end_);
    row_begin_ = (pass * p_.group + member_) * T::kRows;
    if (from >= to || row_begin_ >= current_.num_rows) return false;
    num_rows_ = min(T::kRows, current_.num_rows - row_begin_);
    // Ranges move up with the token: the first row begins lowest and ends lowest.
    const int first_index = p_.heads_divisor.divide(row_begin_);
    const int first = current_.first_position + first_index;
    const int last = current_.first_position + p_.heads_divisor.divide(row_begin_ + num_rows_ - 1);
    const int key_begin = token_key_begin<T::kPlain>(p_, first);
    const int key_end = token_key_end<T::kPlain>(p_, last, current_.seq_len);
    // Tiles of the piece, then those of them that the row block sees.
    whole_ = from == start_ && to == start_ + current_.result_cost;
    const int all_begin = current_.tile_begin;
    const int offset = all_begin - start_ - p_.piece_overhead;
    int piece_begin = max(from + offset, all_begin);
    int piece_end = max(to + offset, all_begin);
    if (even_tiles_ > 0) {  // part from - start_ of result_cost parts
      // The same rounding on both sides of a cut.
      const float step = __fdividef(static_cast<float>(current_.num_tiles),
                                    static_cast<float>(current_.result_cost));
      const auto cut = [step](int part) {
        return static_cast<int>(static_cast<float>(part) * step + 0.5F);
      };
      piece_begin = all_begin + cut(from - start_);
      piece_end = all_begin + cut(to - start_);
    }
    const int tile_begin = max(piece_begin, key_begin / T::kTileKeys);
    const int tile_end = min(piece_end, (key_end + T::kTileKeys - 1) / T::kTileKeys);
    if (lane_ == 0) {
      if (tile_begin < tile_end) {  // on its way while the piece is written down
        const int page_idx = p_.page_divisor.divide(tile_begin * T::kTileKeys);
        ptx::prefetch_l2(p_.block_table + request_ * p_.block_table_stride + page_idx);
      }
      piece.valid = 1;
      piece.request = request_;
      piece.num_rows = num_rows_;
      piece.key_begin = key_begin;
      piece.key_end = key_end;
      piece.plain_begin = T::kPlain ? 0 : token_key_begin<T::kPlain>(p_, last);
      piece.plain_end = token_key_end<T::kPlain>(p_, first, current_.seq_len);
      piece.tile_begin = tile_begin;
      piece.tile_end = key_begin < key_end ? max(tile_end, tile_begin) : tile_begin;
      piece.whole = whole_;
      const bool flat = p_.query_load == QueryLoad::kFlatBox;
      const int token = current_.first_token + first_index;
      piece.query_y = flat ? current_.first_token * p_.num_heads + row_begin_
                           : row_begin_ - first_index * p_.num_heads;
      piece.query_z = flat ? 0 : token;
      piece.first_token = current_.first_token;
      piece.row_begin = row_begin_;
    }
    return true;
  }

  /// The cuts that fall inside a result belong to consecutive workers.
  __device__ __forceinline__ void find_cuts(int& first_cta, int& num_pieces, int& rank) const {
    if (even_tiles_ > 0) {
      first_cta = start_ * p_.group + member_;
      num_pieces = current_.result_cost;
      rank = worker_ - start_;
      return;
    }
    // Raw cuts that snap to an edge do not count.
    const int first = first_worker_at(start_ + p_.piece_overhead + p_.min_piece);
    const int last = first_worker_at(start_ + current_.result_cost - p_.min_piece + 1);
    first_cta = (first - 1) * p_.group + member_;
    num_pieces = last - first + 1;
    rank = worker_ - (first - 1);
  }

  const CallParams& p_;
  int worker_, member_, lane_;
  int per_lane_, first_request_;
  int total_, workers_, quotient_, remainder_;
  int even_tiles_;   // most tiles of an even part; 0: the line is cut at equal cost
  int begin_, end_;  // of the share, snapped
  int request_;      // the running request and its place on the line
  int prefix_;
  int pass_ = 0;
  int start_ = 0;      // of the current result on the line
  int row_begin_ = 0;  // rows of the current piece
  int num_rows_ = 0;
  bool whole_ = true;
  LineRequest current_;
};

}  // namespace mla::cuda
