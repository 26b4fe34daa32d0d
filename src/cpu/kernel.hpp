// What the CPU driver (driver.cpp) asks of an instruction set: a table of plain functions.
//
// The driver owns threads, the schedule, partial slots and merging. A kernel owns one split: some rows
// of one request against one key range. It never allocates; its scratch comes from the workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/kv_layout.hpp"
#include "core/split.hpp"
#include "mla/problem.hpp"

namespace mla::cpu {

/// Rows of one split at most. Scratch per worker grows with it.
inline constexpr std::int64_t kMaxRows = 128;

/// Up to this many rows the few-row kernel runs (keys in lanes); above it the rows are the lanes.
inline constexpr std::int64_t kFewRows = 5;

/// Everything of a call that all its splits share. Pointers are resolved and validated.
struct CallView {
  std::int64_t num_heads = 0;
  std::int64_t kv_lora_rank = 0;       ///< L, a multiple of 16
  std::int64_t qk_rope_head_dim = 0;   ///< R, a multiple of 16 or 0
  DType q_dtype = DType::kBF16;
  KvFormat kv_format = KvFormat::kBF16;

  KvLayout kv;
  const std::int32_t* block_table = nullptr;  ///< null in sparse mode
  std::int64_t block_table_stride = 0;
  const std::int32_t* indices = nullptr;      ///< null in dense mode
  std::int64_t indices_stride = 0;

  float bmm1_scale = 1.0F;
  float logits_soft_cap = 0.0F;               ///< 0: off
  CpLayout cp;                                ///< for ALiBi distances
  bool uses_alibi_slopes = false;
};

/// One row of a split. Rows of one token are adjacent; row order is (token, head).
struct SplitRow {
  const std::byte* q_nope = nullptr;  ///< L values of q_dtype, contiguous, any alignment of the type
  const std::byte* q_pe = nullptr;    ///< R values of q_dtype
  std::int64_t key_begin = 0;         ///< visible local keys, already cut to the split's range;
  std::int64_t key_end = 0;           ///< key_begin == key_end: none
  std::int64_t position = 0;          ///< global position of the row (ALiBi)
  float alibi_slope = 0.0F;
};

/// One split: the rows, the union of their visible keys, and where the result goes.
struct SplitJob {
  const SplitRow* rows = nullptr;
  std::int64_t num_rows = 0;          ///< 1..kMaxRows
  std::int64_t request = 0;           ///< row of block_table; sparse mode: row of indices
  std::int64_t key_begin = 0;         ///< the smallest key_begin and the largest key_end of the rows
  std::int64_t key_end = 0;           ///< that see any key; key_begin < key_end
  bool few_rows = false;              ///< which kernel; decided by the driver, so that fixed_split
                                      ///< mode never lets batch-mates change it
  float* out = nullptr;               ///< [num_rows, L] f32, normalised; a row without keys gets 0
  float* lse = nullptr;               ///< [num_rows] natural log; a row without keys gets -inf
};

/// The instruction-set dependent functions of a row of the backend table.
struct KernelTable {
  const char* name;
  /// Keys of one tile. Tiles begin at absolute multiples of it, so that a row's arithmetic depends
  /// neither on where its split begins nor on its batch-mates. Splits are cut at multiples of it.
  std::int64_t key_tile;
  /// Scratch of one worker in bytes (a multiple of 64), from shapes alone.
  std::size_t (*scratch_bytes)(std::int64_t kv_lora_rank, std::int64_t qk_rope_head_dim);
  /// Computes out and lse of a split. `scratch` is 64-byte aligned and holds anything.
  void (*run_split)(const CallView& call, const SplitJob& job, std::byte* scratch);
  /// out[i] = value[i] * factor, rounded to out_dtype (round to nearest even). A -0 becomes +0, so
  /// that a term of weight 0 can never change a bit.
  void (*store_row)(const float* value, float factor, std::int64_t count, DType out_dtype,
                    std::byte* out);
  /// acc[i] = weight_acc * acc[i] + weight_value * value[i]; a zero weight kills its term even when
  /// that is NaN.
  void (*merge_row)(float* acc, float weight_acc, const float* value, float weight_value,
                    std::int64_t count);
};

/// Addresses of keys [first, first + count) of a request, local order. In sparse mode an entry
/// outside the pool gives nullptr: no key. In dense mode every key asked for must be below seq_len,
/// so no table entry beyond the length is read.
inline void resolve_keys(const CallView& call, std::int64_t request, std::int64_t first,
                         std::int64_t count, const std::byte** addresses) noexcept {
  if (call.indices != nullptr) {
    const std::int32_t* row = call.indices + request * call.indices_stride;
    const std::int64_t num_slots = call.kv.num_slots();
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t slot = row[first + k];
      addresses[k] = slot >= 0 && slot < num_slots ? call.kv.slot(slot) : nullptr;
    }
    return;
  }
  const std::int32_t* row = call.block_table + request * call.block_table_stride;
  std::int64_t page_idx = first / call.kv.page_size;
  std::int64_t offset = first % call.kv.page_size;
  for (std::int64_t k = 0; k < count; ++k) {
    addresses[k] = call.kv.token(row[page_idx], offset);
    if (++offset == call.kv.page_size) {
      offset = 0;
      ++page_idx;
    }
  }
}

/// Kernels of one instruction set, or null when this build or machine lacks it.
const KernelTable* avx2_kernels() noexcept;        // highway_kernels.cpp
const KernelTable* avx512_kernels() noexcept;      // highway_kernels.cpp
const KernelTable* portable_kernels() noexcept;    // highway_kernels.cpp: SSE4, NEON, ...
const KernelTable* avx512bf16_kernels() noexcept;  // avx512bf16_kernels.cpp
const KernelTable* amx_kernels() noexcept;         // amx_kernels.cpp

}  // namespace mla::cpu
