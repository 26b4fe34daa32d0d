// [plan] Lengths -> splits. Pure integers, no allocation, deterministic.
//
// The rows of a request (query token x head, head fastest) are cut into row blocks of at most max_rows.
// A block costs (keys it sees) x (rows, as the kernel pads them, plus a constant for reading a key).
// The workers' shares are equal slices of the total cost, laid end to end over the blocks in order: a
// block that straddles the end of a share is cut there, at a multiple of the key tile. So at most one
// cut a worker is made, whatever the batch, and partial results stay few.
//
// num_splits cuts every block into that many parts instead. fixed_split cuts at its multiples, and
// either every part is kept as a partial and merged in key order, or - when the partial slots do not
// suffice or the block is small - one worker walks the parts and merges them in the same order: both
// give the same bits.
#include <algorithm>
#include <limits>

#include "core/split.hpp"

namespace mla {
namespace {

constexpr std::int64_t kLaneRows = 16;        // rows are padded to this by the vector kernels
constexpr std::int64_t kKeyCost = 4;          // reading and converting a key, in rows
constexpr std::int64_t kMinWorkerCost = 2000; // row-keys below which another worker does not pay
constexpr std::int64_t kMinCutTiles = 4;      // smallest piece, in key tiles, worth a partial
constexpr std::int64_t kFixedSlotBlocks = 64; // fixed_split: partial slots per worker, in row blocks

std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t b) noexcept { return ceil_div(a, b) * b; }

struct RowBlock {
  std::int64_t request = 0;
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  KeyRange keys;  // union over its tokens

  std::int64_t num_rows() const noexcept { return row_end - row_begin; }
  std::int64_t num_keys() const noexcept { return keys.empty() ? 0 : keys.end - keys.begin; }
  std::int64_t key_cost() const noexcept {
    const std::int64_t rows = num_rows();
    return (rows < kLaneRows / 2 ? rows : round_up(rows, kLaneRows / 2)) + kKeyCost;
  }
  std::int64_t cost() const noexcept { return num_keys() * key_cost(); }
};

KeyRange block_keys(const DecodeProblem& problem, const RequestShape& shape, std::int64_t row_begin,
                    std::int64_t row_end) noexcept {
  KeyRange seen;
  const std::int64_t last_token = (row_end - 1) / problem.num_heads;
  for (std::int64_t i = row_begin / problem.num_heads; i <= last_token; ++i) {
    const KeyRange keys = token_keys(problem, shape, i);
    if (keys.empty()) continue;
    if (seen.empty()) {
      seen = keys;
      continue;
    }
    seen.begin = std::min(seen.begin, keys.begin);
    seen.end = std::max(seen.end, keys.end);
  }
  return seen;
}

/// Calls visit(RowBlock) for every block in order.
template <class Visit>
void for_each_block(const PlanState& state, const BatchLengths& lengths, Visit&& visit) {
  const DecodeProblem& problem = state.problem;
  const std::int64_t num_requests = num_planned_requests(problem);
  for (std::int64_t b = 0; b < num_requests; ++b) {
    const RequestShape shape = request_shape(problem, lengths, b);
    const std::int64_t num_rows = shape.num_tokens * problem.num_heads;
    if (num_rows == 0) continue;
    const std::int64_t num_blocks = ceil_div(num_rows, state.max_rows);
    const std::int64_t block_rows =
        std::min(state.max_rows, round_up(ceil_div(num_rows, num_blocks), kLaneRows));
    for (std::int64_t row = 0; row < num_rows; row += block_rows) {
      RowBlock block{b, row, std::min(num_rows, row + block_rows), {}};
      block.keys = block_keys(problem, shape, block.row_begin, block.row_end);
      visit(block);
    }
  }
}

/// Writes splits and merges, and deals the workers' shares.
class Emitter {
 public:
  Emitter(const PlanState& state, Schedule& schedule, std::int64_t total_cost) noexcept
      : schedule_(schedule),
        num_workers_(state.num_workers),
        active_(std::clamp<std::int64_t>(total_cost / kMinWorkerCost, 1, state.num_workers)),
        total_(total_cost) {
    schedule_.num_splits = 0;
    schedule_.num_merges = 0;
    schedule_.worker_begin[0] = 0;
  }

  /// Cost that still fits the current worker's share; the last worker takes everything.
  std::int64_t room() const noexcept {
    return worker_ + 1 >= active_ ? total_ : share_end(worker_) - spent_;
  }
  bool is_last() const noexcept { return worker_ + 1 >= active_; }

  void next_worker() noexcept {
    ++worker_;
    schedule_.worker_begin[worker_] = static_cast<std::int32_t>(schedule_.num_splits);
  }

  void emit(const RowBlock& block, KeyRange keys, std::int64_t partial) noexcept {
    schedule_.splits[schedule_.num_splits++] = {
        static_cast<std::int32_t>(block.request),   static_cast<std::int32_t>(block.row_begin),
        static_cast<std::int32_t>(block.row_end),   keys.begin,
        keys.end,                                   static_cast<std::int32_t>(worker_),
        static_cast<std::int32_t>(partial)};
    spent_ += (keys.end - keys.begin) * block.key_cost();
  }

  void merge(const RowBlock& block, std::int64_t partial, std::int64_t num_splits) noexcept {
    schedule_.merges[schedule_.num_merges++] = {
        static_cast<std::int32_t>(block.request), static_cast<std::int32_t>(block.row_begin),
        static_cast<std::int32_t>(block.row_end), static_cast<std::int32_t>(partial),
        static_cast<std::int32_t>(num_splits)};
    next_partial_ += num_splits * block.num_rows();
  }

  std::int64_t next_partial() const noexcept { return next_partial_; }

  /// Moves on while the share of the current worker is used up.
  void settle(std::int64_t half_piece) noexcept {
    while (!is_last() && room() <= half_piece) next_worker();
  }

  void finish() noexcept {
    while (worker_ + 1 < num_workers_) next_worker();
    schedule_.worker_begin[num_workers_] = static_cast<std::int32_t>(schedule_.num_splits);
  }

 private:
  std::int64_t share_end(std::int64_t worker) const noexcept {
    // total * (worker + 1) / active without forming the product.
    return total_ / active_ * (worker + 1) + total_ % active_ * (worker + 1) / active_;
  }

  Schedule& schedule_;
  std::int64_t num_workers_;
  std::int64_t active_;
  std::int64_t total_;
  std::int64_t worker_ = 0;
  std::int64_t spent_ = 0;
  std::int64_t next_partial_ = 0;
};

/// Equal shares: the block goes to the current worker up to its share's end, the rest to the next.
void emit_by_cost(const PlanState& state, const RowBlock& block, Emitter& emitter) noexcept {
  const std::int64_t tile = state.key_tile;
  const std::int64_t tile_cost = tile * block.key_cost();
  const std::int64_t slot = emitter.next_partial();
  std::int64_t num_pieces = 0;
  std::int64_t begin = block.keys.begin;
  while (true) {
    emitter.settle(kMinCutTiles * tile_cost / 2);
    const std::int64_t tiles = (emitter.room() + tile_cost / 2) / tile_cost;
    const std::int64_t cut = (begin / tile + std::max(tiles, kMinCutTiles)) * tile;
    const bool rest_too_small = block.keys.end - cut < kMinCutTiles * tile;
    if (emitter.is_last() || rest_too_small) break;
    emitter.emit(block, {begin, cut}, slot + num_pieces * block.num_rows());
    ++num_pieces;
    begin = cut;
    emitter.next_worker();
  }
  if (num_pieces == 0) {
    emitter.emit(block, block.keys, -1);
    return;
  }
  emitter.emit(block, {begin, block.keys.end}, slot + num_pieces * block.num_rows());
  emitter.merge(block, slot, num_pieces + 1);
}

/// Parts of `length` keys at absolute multiples of it.
void emit_parts(const RowBlock& block, std::int64_t length, Emitter& emitter) noexcept {
  const std::int64_t first = block.keys.begin / length;
  const std::int64_t num_parts = ceil_div(block.keys.end, length) - first;
  const std::int64_t slot = emitter.next_partial();
  for (std::int64_t part = 0; part < num_parts; ++part) {
    const KeyRange keys{std::max(block.keys.begin, (first + part) * length),
                        std::min(block.keys.end, (first + part + 1) * length)};
    emitter.settle((keys.end - keys.begin) * block.key_cost() / 2);
    emitter.emit(block, keys, num_parts == 1 ? -1 : slot + part * block.num_rows());
  }
  if (num_parts > 1) emitter.merge(block, slot, num_parts);
}

std::int64_t forced_part_length(const PlanState& state, const RowBlock& block) noexcept {
  return round_up(ceil_div(block.keys.end, state.options.num_splits), state.key_tile);
}

std::int64_t fixed_slots(const PlanState& state) noexcept {
  return kFixedSlotBlocks * state.num_workers * state.max_rows;
}

}  // namespace

ScheduleBounds schedule_bounds(const PlanState& state) noexcept {
  const DecodeProblem& problem = state.problem;
  const std::int64_t num_rows = problem.num_tokens * problem.num_heads;
  const std::int64_t num_blocks =
      problem.sparse() ? problem.num_tokens * ceil_div(problem.num_heads, state.max_rows)
                       : ceil_div(num_rows, state.max_rows) + std::min(problem.num_requests, num_rows);
  // max_seq_len may over-estimate without limit; lengths themselves are int32.
  const std::int64_t max_keys = std::min<std::int64_t>(
      problem.sparse() ? problem.num_indices : problem.max_seq_len,
      std::numeric_limits<std::int32_t>::max());
  ScheduleBounds bounds;
  if (state.options.num_splits > 0) {
    // A part is at least one key tile, so the bound on keys caps the parts.
    const std::int64_t parts =
        std::min(state.options.num_splits, max_keys / state.key_tile + 1);
    bounds.num_splits = num_blocks * parts;
    bounds.num_merges = num_blocks;
    bounds.num_partials = num_rows * parts;
  } else if (state.options.fixed_split > 0) {
    bounds.num_partials = std::min(fixed_slots(state),
                                   num_rows * (max_keys / state.options.fixed_split + 1));
    bounds.num_splits = num_blocks + bounds.num_partials;
    bounds.num_merges = num_blocks;
  } else {
    // A share's end cuts one block; c cuts of a block make c + 1 <= 2c partials of its rows.
    bounds.num_splits = num_blocks + state.num_workers;
    bounds.num_merges = state.num_workers;
    bounds.num_partials = 2 * static_cast<std::int64_t>(state.num_workers - 1) * state.max_rows;
  }
  return bounds;
}

void make_schedule(const PlanState& state, const BatchLengths& lengths,
                   Schedule& schedule) noexcept {
  std::int64_t total_cost = 0;
  for_each_block(state, lengths, [&](const RowBlock& block) { total_cost += block.cost(); });
  Emitter emitter(state, schedule, total_cost);

  const std::int64_t fixed_split = state.options.fixed_split;
  for_each_block(state, lengths, [&](const RowBlock& block) {
    if (block.keys.empty()) {
      emitter.emit(block, {0, 0}, -1);
    } else if (state.options.num_splits > 0) {
      emit_parts(block, forced_part_length(state, block), emitter);
    } else if (fixed_split > 0) {
      const std::int64_t num_parts =
          ceil_div(block.keys.end, fixed_split) - block.keys.begin / fixed_split;
      const bool fits =
          emitter.next_partial() + num_parts * block.num_rows() <= fixed_slots(state);
      // A block that is a small part of one share gains nothing from being spread.
      const bool large = block.cost() * state.num_workers * 4 > total_cost;
      if (fits && large && state.num_workers > 1) {
        emit_parts(block, fixed_split, emitter);
      } else {
        emitter.settle(block.cost() / 2);
        emitter.emit(block, block.keys, -1);
      }
    } else {
      emit_by_cost(state, block, emitter);
    }
  });
  emitter.finish();
}

}  // namespace mla
