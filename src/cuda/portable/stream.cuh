// The keys of all pieces of a CTA as one stream of tiles, copied ahead of use into the ring.
//
// All threads copy: eight a key, so that neighbours read 128 contiguous bytes. A tile is one group
// of asynchronous copies. Keys that nobody may own become zeros: neither they nor their table
// entries are read.
#pragma once

#include "cuda/portable/context.cuh"

namespace mla::portable {

template <class T>
class TileStream {
 public:
  __device__ __forceinline__ explicit TileStream(const Context<T>& c)
      : c_(c), key_in_tile_(c.thread / kThreadsPerKey), part_(c.thread % kThreadsPerKey) {}

  /// Copies tiles of the stream up to number `limit`, as far as pieces are known: `published` of
  /// them.
  __device__ __forceinline__ void fill(uint32_t limit, uint32_t published) {
#pragma unroll 1
    while (issued_ < limit) {
      if (tile_ < tile_end_) {
        issue();
        continue;
      }
      if (opened_ == published) return;
      const Piece<T::kRows>& piece = c_.small().pieces[opened_ & 1];
      if (!piece.valid) return;
      open(piece);
      ++opened_;
    }
  }

  /// Waits for this thread's part of tile number `tile`, which was issued. A barrier shows all
  /// parts to all threads.
  __device__ __forceinline__ void wait(uint32_t tile) const {
    switch (issued_ - 1 - tile) {
      case 0: return ptx::cp_async_wait<0>();
      case 1: return ptx::cp_async_wait<1>();
      case 2: return ptx::cp_async_wait<2>();
      case 3: return ptx::cp_async_wait<3>();
      case 4: return ptx::cp_async_wait<4>();
      case 5: return ptx::cp_async_wait<5>();
      case 6: return ptx::cp_async_wait<6>();
      case 7: return ptx::cp_async_wait<7>();
      default: return ptx::cp_async_wait<8>();
    }
  }

 private:
  static constexpr int kThreadsPerKey = T::kThreads / kTileKeys;
  static constexpr int kElementBytes = T::kCache == CacheKind::k16Bit ? 2 : 1;
  static constexpr int kMostVectors =
      (max_row_bytes(T::kCache) / 16 + kThreadsPerKey - 1) / kThreadsPerKey;
  static_assert(kThreadsPerKey == 8, "valid-key masks count four keys a warp");

  __device__ __forceinline__ void open(const Piece<T::kRows>& piece) {
    table_ = c_.p.block_table + piece.request * c_.p.block_table_stride;
    tile_ = piece.tile_begin;
    tile_end_ = piece.tile_end;
    key_begin_ = piece.key_begin;
    key_end_ = piece.key_end;
    entry_ = fetch(tile_);
  }

  /// The page of this thread's key, or its slot in the pool; -1: no key.
  __device__ __forceinline__ int fetch(int tile) const {
    const int key = tile * kTileKeys + key_in_tile_;
    if (tile >= tile_end_ || key < key_begin_ || key >= key_end_) return -1;
    if (!c_.p.sparse) return __ldg(table_ + c_.p.page_divisor.divide(key));
    const int slot = __ldg(table_ + key);
    return slot < c_.p.pool_tokens ? slot : -1;
  }

  __device__ __forceinline__ void issue() {
    const KernelParams& p = c_.p;
    const bool valid = entry_ >= 0;
    const char* source = static_cast<const char*>(p.kv);
    if (valid) {
      // Where the key lies: of the sequence, or of the pool.
      const int place = p.sparse ? entry_ : tile_ * kTileKeys + key_in_tile_;
      const int page_idx = p.page_divisor.divide(place);
      const int64_t page = p.sparse ? page_idx : entry_;
      const int64_t offset =
          page * p.kv_stride.page + (place - page_idx * p.page_size) * p.kv_stride.token;
      source += offset * kElementBytes;
    }
    if (p.sparse) note_valid(valid);
    char* target = c_.stage(slot_) + key_in_tile_ * T::kPitch + part_ * 16;
    source += valid ? part_ * 16 : 0;
    if (p.kv_vector_loads) {
      const uint32_t smem = ptx::smem_address(target);
#pragma unroll
      for (int i = 0; i < kMostVectors; ++i) {
        const bool inside = part_ + i * kThreadsPerKey < p.row_vectors;
        const int step = i * kThreadsPerKey * 16;
        if (inside) ptx::cp_async_16_or_zero(smem + step, source + (valid ? step : 0), valid ? 16 : 0);
      }
    } else {
      copy_unaligned(source, target, valid);
    }
    ptx::cp_async_commit();
    ++issued_;
    slot_ = slot_ + 1 == p.num_stages ? 0 : slot_ + 1;
    entry_ = fetch(++tile_);
  }

  /// Tokens that are aligned to their elements only.
  __device__ __noinline__ void copy_unaligned(const char* source, char* target, bool valid) const {
    for (int v = part_; v < c_.p.row_vectors; v += kThreadsPerKey) {
      uint32_t words[4] = {0, 0, 0, 0};
      for (int b = 0; b < 16 && valid; b += kElementBytes) {
        const uint32_t element = kElementBytes == 2
                                     ? *reinterpret_cast<const uint16_t*>(source + b)
                                     : *reinterpret_cast<const uint8_t*>(source + b);
        words[b / 4] |= element << 8 * (b % 4);
      }
      *reinterpret_cast<uint4*>(target) = uint4{words[0], words[1], words[2], words[3]};
      source += kThreadsPerKey * 16;
      target += kThreadsPerKey * 16;
    }
  }

  /// Sparse: which keys of the tile exist, four bits a warp.
  __device__ __forceinline__ void note_valid(bool valid) const {
    const uint32_t lanes = __ballot_sync(~0U, valid);
    const uint32_t four = (lanes & 1) | (lanes >> 7 & 2) | (lanes >> 14 & 4) | (lanes >> 21 & 8);
    if (c_.lane == 0) c_.small().valid_keys[slot_][c_.warp] = four;
  }

  const Context<T>& c_;
  const int key_in_tile_, part_;
  uint32_t issued_ = 0;  // tiles of the stream
  uint32_t opened_ = 0;  // pieces
  int slot_ = 0;         // of the next tile
  int tile_ = 0, tile_end_ = 0;
  int key_begin_ = 0, key_end_ = 0;
  int entry_ = -1;  // of the next tile
  const int32_t* table_ = nullptr;
};

}  // namespace mla::portable
