// Producer role for pages of fewer than 16 tokens: the copy engine takes 54 clocks a row and chunk,
// so three warps read rows with cp.async instead, 16 bytes a lane.
#pragma once

#include "cuda/sm90/load.cuh"

namespace mla::sm90 {

/// The smallest run of neighbouring tokens that is left to the copy engine.
inline constexpr int kSmallestBox = 16;

template <class T>
__device__ __forceinline__ bool loads_rows(const KernelParams& p) {
  return p.box_keys < kSmallestBox && num_copiers<T>(p) == kMostCopiers;
}

/// One warp of kMostCopiers. A slot is full when each of them has arrived. Copies the keys
/// [key_begin, key_end) of each tile of a piece and touches no others.
template <class T>
class RowLoader {
 public:
  __device__ RowLoader(const KernelParams& p, const TensorMaps& maps, uint32_t ring, uint32_t full,
                       uint32_t empty, int copier, int lane)
      : p_(p), maps_(maps), ring_(ring), full_(full), empty_(empty), copier_(copier), lane_(lane) {}

  __device__ __forceinline__ void load_piece(const Piece<T::kRows>& piece) {
    load_query_groups(piece);
    const int32_t* table = p_.block_table + piece.request * p_.block_table_stride;
    const int key_begin = piece.key_begin, key_end = piece.key_end, tile_end = piece.tile_end;
    int64_t row[2], next[2];  // offsets of keys `lane` and `lane + 32` of a tile, elements
    int tile = piece.tile_begin;
    if (tile < tile_end) locate(table, tile, key_begin, key_end, row);
#pragma unroll 1
    for (; tile < tile_end; ++tile) {
      if (tile + 1 < tile_end) locate(table, tile + 1, key_begin, key_end, next);
#pragma unroll 1
      for (int first = 0; first < T::kChunks; first += T::kGroupChunks) {
        acquire();
        for (int i = copier_; i < T::kGroupChunks; i += kMostCopiers) {
          copy_chunk(row, first + i, ring_ + cursor_.slot * T::kSlotBytes + i * T::kChunkBytes);
        }
        ptx::cp_async_commit();
        cursor_.advance();
        if (++pending_ > kInFlight) {
          ptx::cp_async_wait<kInFlight>();
          announce_oldest();
        }
      }
      row[0] = next[0];
      row[1] = next[1];
    }
    flush();
  }

 private:
  static constexpr int kInFlight = 3;  // groups whose bytes may be on their way

  /// Waits for the slot at the cursor. Whoever would free it may wait for groups that have arrived
  /// and were not announced yet: those first.
  __device__ __forceinline__ void acquire() {
    if (!__all_sync(~0U, ptx::mbarrier_test_wait(empty_ + cursor_.slot * 8, cursor_.phase))) {
      flush();
      ptx::mbarrier_wait(empty_ + cursor_.slot * 8, cursor_.phase);
    }
  }
  __device__ __forceinline__ void flush() {
    if (pending_ == 0) return;
    ptx::cp_async_wait<0>();
#pragma unroll 1
    while (pending_ > 0) announce_oldest();
  }
  /// The oldest pending group of this warp is in shared memory.
  __device__ __forceinline__ void announce_oldest() {
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(full_ + oldest_.slot * 8);
    oldest_.advance();
    --pending_;
  }

  /// The chunks of Q that go to registers come by the copy engine.
  __device__ __forceinline__ void load_query_groups(const Piece<T::kRows>& piece) {
#pragma unroll 1
    for (int first = 0; first < T::kRegisterChunks; first += T::kGroupChunks) {
      const int count = min(T::kGroupChunks, T::kRegisterChunks - first);
      const uint32_t slot_full = full_ + cursor_.slot * 8;
      ptx::mbarrier_wait(empty_ + cursor_.slot * 8, cursor_.phase);
      if (lane_ == 0 && copier_ > 0) ptx::mbarrier_arrive(slot_full);
      if (lane_ == 0 && copier_ == 0) {
        ptx::mbarrier_expect(slot_full, count * T::kQueryChunkBytes);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
          copy_query_chunk<T>(maps_, first + i, piece.query_y, piece.query_z,
                              ring_ + cursor_.slot * T::kSlotBytes + i * T::kChunkBytes, slot_full);
        }
      }
      __syncwarp();
      cursor_.advance();
    }
    oldest_ = cursor_;
  }

  /// Where keys `lane` and `lane + 32` of a tile lie; -1: nobody may own them.
  __device__ __forceinline__ void locate(const int32_t* table, int tile, int key_begin, int key_end,
                                         int64_t (&row)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = tile * kTileKeys + 32 * half + lane_;
      row[half] = -1;
      if (key >= key_begin && key < key_end) {
        const int page_idx = p_.page_divisor.divide(key);
        row[half] = __ldg(table + page_idx) * p_.kv_stride.page +
                    (key - page_idx * p_.page_size) * p_.kv_stride.token;
      }
    }
  }

  /// 64 values of 64 keys, 128-byte-swizzled: eight lanes a key, four keys at a time.
  __device__ __forceinline__ void copy_chunk(const int64_t (&row)[2], int chunk,
                                             uint32_t target) const {
    const int vector = lane_ % 8;
    const auto* source = static_cast<const uint16_t*>(p_.kv) + chunk * 64 + vector * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll 4
      for (int first_key = 0; first_key < 32; first_key += 4) {
        const int64_t offset = __shfl_sync(~0U, row[half], first_key + lane_ / 8);
        const int key = 32 * half + first_key + lane_ / 8;
        if (offset >= 0) {
          ptx::cp_async_16(target + key * 128 + ((vector ^ (key & 7)) << 4), source + offset);
        }
      }
    }
  }

  const KernelParams& p_;
  const TensorMaps& maps_;
  uint32_t ring_, full_, empty_;
  int copier_, lane_;
  RingCursor<T::kSlots> cursor_{0, 1};  // the first lap finds every slot empty
  RingCursor<T::kSlots> oldest_;
  int pending_ = 0;  // groups from oldest_ on, copied and not announced
};

}  // namespace mla::sm90
