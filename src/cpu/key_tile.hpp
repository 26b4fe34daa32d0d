// Plain bookkeeping of a split that every instruction set shares: which keys a tile holds, which
// rows form a group, and the lines to prefetch.
//
// Nothing here is hot, so the baseline code generation of the including file is good enough.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/kv_layout.hpp"
#include "core/visibility.hpp"
#include "cpu/kernel.hpp"

namespace mla::cpu {

/// Keys of a lanes-kernel tile; also KernelTable::key_tile. A multiple of every strip height (6,
/// 12) and of the few-row chunk.
inline constexpr int kKeyTile = 48;

/// Keys of a few-row chunk: its second reading must find it in the L1.
inline constexpr int kKeyChunk = 8;
static_assert(kKeyTile % kKeyChunk == 0, "splits are cut at multiples of kKeyTile");

/// Values of one block of the f32 copies: a cache line. L and R are multiples of it.
inline constexpr int kBlock = 16;

inline constexpr float kLog2E = 1.44269504088896340736F;

/// The keys of an absolute interval that exist and lie in the job's range, in ascending order.
struct KeyTile {
  std::int64_t begin = 0;              ///< absolute key of the interval's start
  int width = 0;                       ///< keys of the interval
  int count = 0;                       ///< listed keys
  const std::byte* address[kKeyTile];  ///< [count]
  std::int8_t offset[kKeyTile];        ///< [count] key - begin
  std::int8_t rank[kKeyTile + 1];      ///< [width + 1] listed keys with offset below the index

  /// List index of the first listed key that is not below absolute key `key`.
  int index_of(std::int64_t key) const noexcept {
    return rank[std::clamp<std::int64_t>(key - begin, 0, width)];
  }
};

/// Lists keys [begin, begin + width) of the job's range. Keys without an address are left out, so
/// that no later stage has to know of them.
inline void collect_keys(const CallView& call, const SplitJob& job, std::int64_t begin, int width,
                         KeyTile* tile) noexcept {
  const std::int64_t first = std::max(begin, job.key_begin);
  const std::int64_t last = std::min(begin + width, job.key_end);
  tile->begin = begin;
  tile->width = width;
  tile->count = 0;
  if (first >= last) {
    std::fill(tile->rank, tile->rank + width + 1, std::int8_t{0});
    return;
  }
  const int num_keys = static_cast<int>(last - first);
  const int first_offset = static_cast<int>(first - begin);
  std::fill(tile->rank, tile->rank + first_offset, std::int8_t{0});
  const std::byte* resolved[kKeyTile];
  resolve_keys(call, job.request, first, num_keys, resolved);
  int count = 0;
  for (int k = 0; k < num_keys; ++k) {
    tile->rank[first_offset + k] = static_cast<std::int8_t>(count);
    if (resolved[k] == nullptr) continue;
    tile->address[count] = resolved[k];
    tile->offset[count] = static_cast<std::int8_t>(first_offset + k);
    ++count;
  }
  std::fill(tile->rank + first_offset + num_keys, tile->rank + width + 1,
            static_cast<std::int8_t>(count));
  tile->count = count;
}

/// Bytes of one cached token.
inline std::int64_t token_bytes(const CallView& call) noexcept {
  const std::int64_t head_dim = call.kv_lora_rank + call.qk_rope_head_dim;
  switch (call.kv_format) {
    case KvFormat::kBF16:
    case KvFormat::kF16: return 2 * head_dim;
    case KvFormat::kE4M3: return head_dim;
    case KvFormat::kFp8DsMla: return fp8_ds_mla::kTokenBytes;
  }
  return 0;
}

/// How a raw product q.k becomes a score in base-2 units. All multiplications that can be folded
/// into the packed queries are.
struct ScoreRule {
  float q_factor = 1.0F;  ///< folded into the packed queries
  float cap_log2 = 0.0F;  ///< 0: no cap; else score = cap_log2 * tanh(product)
  bool uses_alibi = false;

  explicit ScoreRule(const CallView& call) noexcept : uses_alibi(call.uses_alibi_slopes) {
    if (call.logits_soft_cap > 0.0F) {
      cap_log2 = call.logits_soft_cap * kLog2E;
      q_factor = call.bmm1_scale / call.logits_soft_cap;
    } else {
      q_factor = call.bmm1_scale * kLog2E;
    }
  }
  bool plain() const noexcept { return cap_log2 == 0.0F && !uses_alibi; }
};

/// Natural-log lse of a row from its base-2 maximum and sum; -inf for a row without keys.
inline float natural_lse(float max_log2, float sum) noexcept {
  constexpr double kLn2 = 0.69314718055994530942;
  return static_cast<float>(static_cast<double>(max_log2) * kLn2 +
                            std::log(static_cast<double>(sum)));
}

/// Rows that share vectors in the lanes kernel. Rows without keys are lanes whose content nobody
/// reads, like the padding lanes; they do not count in the ranges.
struct RowGroup {
  int first = 0;                              ///< row of the job, and lane of the padded arrays
  int count = 0;                              ///< rows; the other lanes are padding
  int width = 0;                              ///< lanes
  std::int64_t begin_min = 0, begin_max = 0;  ///< of key_begin over the rows that see a key
  std::int64_t end_min = 0, end_max = 0;      ///< begin_min >= end_max: no row sees any
};

/// Vector shapes of an instruction set in lanes. `narrow` is 0 where there is none.
struct GroupWidths {
  int pair = 0;
  int one = 0;
  int narrow = 0;
};

/// Cuts rows into groups: pairs of vectors while they fill, then the cheapest cover of the rest.
inline int make_groups(const SplitJob& job, const GroupWidths& widths, RowGroup* groups) noexcept {
  const int num_rows = static_cast<int>(job.num_rows);
  int num_groups = 0;
  for (int first = 0; first < num_rows;) {
    const int left = num_rows - first;
    int width = widths.pair;
    if (widths.narrow > 0 && left <= widths.narrow) {
      width = widths.narrow;
    } else if (left <= widths.one + widths.narrow) {
      width = widths.one;
    }
    RowGroup group;
    group.first = first;
    group.width = width;
    group.count = std::min(left, width);
    bool any = false;
    for (int r = first; r < first + group.count; ++r) {
      const SplitRow& row = job.rows[r];
      if (row.key_begin >= row.key_end) continue;
      group.begin_min = any ? std::min(group.begin_min, row.key_begin) : row.key_begin;
      group.begin_max = any ? std::max(group.begin_max, row.key_begin) : row.key_begin;
      group.end_min = any ? std::min(group.end_min, row.key_end) : row.key_end;
      group.end_max = any ? std::max(group.end_max, row.key_end) : row.key_end;
      any = true;
    }
    groups[num_groups++] = group;
    first += group.count;
  }
  return num_groups;
}

/// Hands out the cache lines of the next tile a few at a time, so that its memory time hides under
/// the arithmetic of this one. The next level is the target: a tile of 48 rows exceeds the L1.
class LinePrefetcher {
 public:
  LinePrefetcher() noexcept = default;
  /// `num_steps`: how many steps will be taken, about.
  LinePrefetcher(const KeyTile& tile, std::int64_t row_bytes, std::int64_t num_steps) noexcept
      : tile_(&tile), row_bytes_(row_bytes) {
    const std::int64_t bytes = tile.count * (row_bytes + kLine);
    bytes_per_step_ = (bytes / std::max<std::int64_t>(num_steps, 1) / kLine + 1) * kLine;
  }
  void step() noexcept {
    if (tile_ == nullptr) return;
    std::int64_t budget = bytes_per_step_;
    while (budget > 0 && row_ < tile_->count) {
      const std::byte* row = tile_->address[row_];
      const std::int64_t end = std::min(at_ + budget, row_bytes_);
      budget -= end - at_;
      for (; at_ < end; at_ += kLine) __builtin_prefetch(row + at_, 0, 2);
      if (at_ >= row_bytes_) {
        at_ = 0;
        ++row_;
      }
    }
  }

 private:
  static constexpr std::int64_t kLine = 64;
  const KeyTile* tile_ = nullptr;
  std::int64_t row_bytes_ = 0;
  std::int64_t bytes_per_step_ = 0;
  std::int64_t at_ = 0;
  int row_ = 0;
};

/// Takes 64-byte aligned arrays out of the scratch argument; with a null base it only counts.
class ScratchCarver {
 public:
  explicit ScratchCarver(std::byte* base) noexcept : base_(base) {}
  float* floats(std::int64_t count) noexcept {
    float* result = base_ == nullptr ? nullptr : reinterpret_cast<float*>(base_ + used_);
    used_ += (static_cast<std::size_t>(count) * sizeof(float) + 63) / 64 * 64;
    return result;
  }
  std::size_t used() const noexcept { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace mla::cpu
