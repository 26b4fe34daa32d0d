// Producer role: latent pages through the block table into the ring, group by group; queries.
#pragma once

#include "cuda/sm90/launch.hpp"
#include "cuda/piece.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/trace.cuh"
#include "cuda/sm90/traits.cuh"

namespace mla::sm90 {

/// A place in the ring and the parity of its current lap.
template <int kSlots>
struct RingCursor {
  int slot = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
  /// The cursor `slots` further on, at most one lap.
  __device__ RingCursor ahead(int slots) const {
    RingCursor c{slot + slots, phase};
    if (c.slot >= kSlots) {
      c.slot -= kSlots;
      c.phase ^= 1;
    }
    return c;
  }
};

/// One box of a block's query rows: chunk 0..kChunks-1 in the order of the latent, then rotary.
template <class T>
__device__ __forceinline__ void copy_query_chunk(const TensorMaps& maps, int chunk, int y, int z,
                                                 uint32_t target, uint32_t barrier) {
  const bool latent = chunk < T::kLatentChunks;
  ptx::tma_load_3d(target, latent ? &maps.q_nope : &maps.q_pe,
                   (latent ? chunk : chunk - T::kLatentChunks) * 64, y, z, barrier);
}

/// One thread: the chunks of Q that live in shared memory, completing on `query_full`.
template <class T>
__device__ __forceinline__ void copy_query(const TensorMaps& maps, int y, int z, uint32_t query,
                                           uint32_t query_full) {
  ptx::mbarrier_expect(query_full, T::kQueryBytes);
#pragma unroll 1
  for (int chunk = T::kRegisterChunks; chunk < T::kChunks; ++chunk) {
    copy_query_chunk<T>(maps, chunk, y, z, query, query_full);
    query += T::kQueryChunkBytes;
  }
}

/// Threads that issue copies. Pages smaller than a tile need so many boxes that one thread cannot
/// issue them as fast as memory delivers: then each takes its share of every group's chunks.
inline constexpr int kMostCopiers = 3;
template <class T>
__device__ __forceinline__ int num_copiers(const KernelParams& p) {
  const bool helpers_load_query = !T::kPlain && p.query_load == QueryLoad::kRows;
  return p.box_keys < kTileKeys && !helpers_load_query ? kMostCopiers : 1;
}

/// One thread of `num_copiers`; the first announces the bytes of all. Copies the keys [key_begin,
/// key_end) of each tile of a piece; keys outside are never touched, not even their table entries,
/// because nobody may own them.
template <class T>
class TileLoader {
 public:
  __device__ TileLoader(const KernelParams& p, const TensorMaps& maps, uint32_t ring, uint32_t full,
                        uint32_t empty, int copier)
      : p_(p),
        maps_(maps),
        copier_(copier),
        ring_(ring),
        full_(full),
        empty_(empty),
        policy_(ptx::evict_first_policy()) {}

  __device__ __forceinline__ void load_piece(const Piece<T::kRows>& piece) {
    const int32_t* table = p_.block_table + piece.request * p_.block_table_stride;
    const int tile_end = piece.tile_end;
    int tile = piece.tile_begin;
    if (p_.box_keys == kTileKeys) {  // one box a group; the next page's id is fetched a tile ahead
      int page = 0, offset = 0;
      if (tile < tile_end) locate(table, tile * kTileKeys, page, offset);
      load_query_groups(piece);
#pragma unroll 1
      for (; tile < tile_end; ++tile) {
        int next_page = 0, next_offset = 0;
        if (tile + 1 < tile_end) locate(table, (tile + 1) * kTileKeys, next_page, next_offset);
#pragma unroll 1
        for (int chunk = 0; chunk < T::kChunks; chunk += T::kGroupChunks) {
          const uint32_t slot_full = acquire(T::kSlotBytes);
          ptx::tma_load_4d(ring_ + cursor_.slot * T::kSlotBytes, &maps_.kv, 0, offset, chunk, page,
                           slot_full, policy_);
          cursor_.advance();
        }
        page = next_page;
        offset = next_offset;
      }
      return;
    }
    load_query_groups(piece);
    const int key_begin = piece.key_begin;
    const int key_end = piece.key_end;
#pragma unroll 1
    for (; tile < tile_end; ++tile) load_boxes(table, tile * kTileKeys, key_begin, key_end);
  }

 private:
  /// Waits for the slot at the cursor and announces its bytes.
  __device__ __forceinline__ uint32_t acquire(uint32_t bytes) {
    ptx::mbarrier_wait(empty_ + cursor_.slot * 8, cursor_.phase);
    // The copy of max_copies_in_flight slots ago must have landed: more in flight is slower.
    if (T::kSwapped) {
      if (issued_ >= p_.max_copies_in_flight) {
        ptx::mbarrier_wait(full_ + landing_.slot * 8, landing_.phase);
        landing_.advance();
      }
      ++issued_;
    }
    if (copier_ == 0) ptx::mbarrier_expect(full_ + cursor_.slot * 8, bytes);
    return full_ + cursor_.slot * 8;
  }

  /// The chunks of Q that go to registers.
  __device__ __forceinline__ void load_query_groups(const Piece<T::kRows>& piece) {
#pragma unroll 1
    for (int first = 0; first < T::kRegisterChunks; first += T::kGroupChunks) {
      const int count = min(T::kGroupChunks, T::kRegisterChunks - first);
      const uint32_t slot_full = acquire(count * T::kQueryChunkBytes);
#pragma unroll 1
      for (int i = 0; i < count && copier_ == 0; ++i) {
        copy_query_chunk<T>(maps_, first + i, piece.query_y, piece.query_z,
                            ring_ + cursor_.slot * T::kSlotBytes + i * T::kChunkBytes, slot_full);
      }
      cursor_.advance();
    }
  }

  /// Pages that are not whole tiles: a box for every chunk and every box_keys keys.
  __device__ __forceinline__ void load_boxes(const int32_t* table, int first_key, int key_begin,
                                             int key_end) {
    const int box_keys = p_.box_keys;
    const int box_bytes = box_keys * 128;
    const int shift = 31 - __clz(box_keys);  // a divisor of 64
    const int box_begin = max(key_begin - first_key, 0) >> shift;
    const int box_end = min((key_end - first_key + box_keys - 1) >> shift, kTileKeys >> shift);
    const int step = num_copiers<T>(p_);
    // The ids of up to four pages stay in registers for all chunks; more are read again from L1.
    int page[4], offset[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (box_begin + b >= box_end) break;
      locate(table, first_key + (box_begin + b) * box_keys, page[b], offset[b]);
    }
#pragma unroll 1
    for (int first = 0; first < T::kChunks; first += T::kGroupChunks) {
      const uint32_t slot_full = acquire((box_end - box_begin) * box_bytes * T::kGroupChunks);
#pragma unroll 1
      for (int i = copier_; i < T::kGroupChunks; i += step) {
        const uint32_t target = ring_ + cursor_.slot * T::kSlotBytes + i * T::kChunkBytes;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          if (box_begin + b >= box_end) break;
          ptx::tma_load_4d(target + (box_begin + b) * box_bytes, &maps_.kv, 0, offset[b], first + i,
                           page[b], slot_full, policy_);
        }
#pragma unroll 1
        for (int b = box_begin + 4; b < box_end; ++b) {
          int late_page, late_offset;
          locate(table, first_key + b * box_keys, late_page, late_offset);
          ptx::tma_load_4d(target + b * box_bytes, &maps_.kv, 0, late_offset, first + i, late_page,
                           slot_full, policy_);
        }
      }
      cursor_.advance();
    }
  }

  __device__ __forceinline__ void locate(const int32_t* table, int key, int& page,
                                         int& offset) const {
    const int page_idx = p_.page_divisor.divide(key);
    page = __ldg(table + page_idx);
    offset = key - page_idx * p_.page_size;
  }

  const KernelParams& p_;
  const TensorMaps& maps_;
  const int copier_;
  uint32_t ring_, full_, empty_;
  uint64_t policy_;
  RingCursor<T::kSlots> cursor_{0, 1};  // the first lap finds every slot empty
  RingCursor<T::kSlots> landing_;
  int issued_ = 0;
};

/// kThreads threads: query rows [row_begin, row_begin + num_rows) of the request whose first token
/// is `first_token`, into shared memory, 128-byte-swizzled; rows past num_rows become 0.
template <class T, int kThreads>
__device__ void load_query(const KernelParams& p, int first_token, int row_begin, int num_rows,
                           char* query, int thread) {
  using Element = typename T::Element;
  constexpr int kVectors = T::kChunks * 8;  // 16-byte vectors of a row
#pragma unroll 1
  for (int idx = thread; idx < T::kRows * kVectors; idx += kThreads) {
    const int r = idx / kVectors;
    const int v = idx % kVectors;
    const int chunk = v / 8;
    char* target = query + chunk * (T::kRows * 128) + r * 128 + ((v % 8 ^ r % 8) << 4);
    const bool latent = chunk < T::kLatentChunks;
    const int row_idx = min(r, num_rows - 1) + row_begin;
    const int i = p.heads_divisor.divide(row_idx);
    const int64_t row = row_offset(latent ? p.q_nope_stride : p.q_pe_stride, first_token + i,
                                   row_idx - i * p.num_heads);
    const Element* source = static_cast<const Element*>(latent ? p.q_nope : p.q_pe) + row +
                            (v * 8 - (latent ? 0 : T::kLatent));
    if (r >= num_rows) {
      *reinterpret_cast<uint4*>(target) = uint4{0, 0, 0, 0};
    } else if (p.q_vector_loads) {
      ptx::cp_async_16(ptx::smem_address(target), source);
    } else {
#pragma unroll 1
      for (int e = 0; e < 8; ++e) reinterpret_cast<Element*>(target)[e] = source[e];
    }
  }
  ptx::cp_async_wait_all();
  ptx::fence_proxy_async();
}

}  // namespace mla::sm90
