// Producer role: latent pages through the block table into the ring, chunk by chunk.
#pragma once

#include "cuda/sm90/launch.hpp"
#include "cuda/sm90/line.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/trace.cuh"
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
  /// The cursor `chunks` further on, at most one lap.
  __device__ RingCursor ahead(int chunks) const {
    RingCursor c{slot + chunks, phase};
    if (c.slot >= kSlots) {
      c.slot -= kSlots;
      c.phase ^= 1;
    }
    return c;
  }
};

/// Chunk i of a tile in ring order: the rotary chunk first, because it is free again right after the
/// scores; then the latent chunks.
template <class T>
__device__ __forceinline__ int chunk_column(int i) {
  if (T::kRopeChunks == 0) return i;
  return i == 0 ? T::kLatentChunks : i - 1;
}

/// One thread. Copies the keys [key_begin, key_end) of each tile of a piece; keys outside are never
/// touched, not even their table entries, because nobody may own them.
template <class T>
class TileLoader {
 public:
  __device__ TileLoader(const KernelParams& p, const CUtensorMap* kv_map, uint32_t ring, uint32_t full,
                        uint32_t empty)
      : p_(p), kv_map_(kv_map), ring_(ring), full_(full), empty_(empty), box_bytes_(p.box_keys * 128) {}

  __device__ void load_piece(const Piece<T::kRows>& piece) {
    const int32_t* table = p_.block_table + piece.request * p_.block_table_stride;
    const int tile_end = piece.tile_end;
    const int key_begin = piece.key_begin;
    const int key_end = piece.key_end;
    if (p_.page_size == kTileKeys) {  // one box a chunk; the next page's id is fetched a tile ahead
      int tile = piece.tile_begin;
      int page = tile < tile_end ? __ldg(table + tile) : 0;
      for (; tile < tile_end; ++tile) {
        const int next_page = tile + 1 < tile_end ? __ldg(table + tile + 1) : 0;
#pragma unroll 3
        for (int i = 0; i < T::kChunks; ++i) {
          const uint32_t slot_full = acquire(box_bytes_);
          ptx::tma_load_3d(ring_ + cursor_.slot * T::kSlotBytes, kv_map_, chunk_column<T>(i) * 64, 0, page,
                           slot_full);
          cursor_.advance();
        }
        page = next_page;
      }
      return;
    }
    for (int tile = piece.tile_begin; tile < tile_end; ++tile) {
      load_boxes(table, tile * kTileKeys, key_begin, key_end);
    }
  }

 private:
  /// Waits for the slot at the cursor and announces its bytes.
  __device__ uint32_t acquire(uint32_t bytes) {
    ptx::mbarrier_wait(empty_ + cursor_.slot * 8, cursor_.phase);
    // The copy of max_boxes_in_flight slots ago must have landed: more in flight is slower.
    if (issued_ >= p_.max_boxes_in_flight) {
      ptx::mbarrier_wait(full_ + landing_.slot * 8, landing_.phase);
      landing_.advance();
    }
    ++issued_;
    ptx::mbarrier_expect(full_ + cursor_.slot * 8, bytes);
    return full_ + cursor_.slot * 8;
  }

  __device__ void load_boxes(const int32_t* table, int first_key, int key_begin, int key_end) {
    const int box_keys = p_.box_keys;
    const int boxes = kTileKeys / box_keys;
    const int box_begin = max(key_begin - first_key, 0) / box_keys;
    const int box_end = min((key_end - first_key + box_keys - 1) / box_keys, boxes);
    // The ids of up to four pages stay in registers for all chunks; more are read again from L1.
    int page[4], offset[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (box_begin + b >= box_end) break;
      locate(table, first_key + (box_begin + b) * box_keys, page[b], offset[b]);
    }
#pragma unroll 1
    for (int i = 0; i < T::kChunks; ++i) {
      const uint32_t slot_full = acquire((box_end - box_begin) * box_bytes_);
      const uint32_t slot = ring_ + cursor_.slot * T::kSlotBytes;
      const int column = chunk_column<T>(i) * 64;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if (box_begin + b >= box_end) break;
        ptx::tma_load_3d(slot + (box_begin + b) * box_bytes_, kv_map_, column, offset[b], page[b],
                         slot_full);
      }
      for (int b = box_begin + 4; b < box_end; ++b) {
        int late_page, late_offset;
        locate(table, first_key + b * box_keys, late_page, late_offset);
        ptx::tma_load_3d(slot + b * box_bytes_, kv_map_, column, late_offset, late_page, slot_full);
      }
      cursor_.advance();
    }
  }

  __device__ void locate(const int32_t* table, int key, int& page, int& offset) const {
    const int page_idx = p_.page_divisor.divide(key);
    page = __ldg(table + page_idx);
    offset = key - page_idx * p_.page_size;
  }

  const KernelParams& p_;
  const CUtensorMap* kv_map_;
  uint32_t ring_, full_, empty_;
  uint32_t box_bytes_;
  RingCursor<T::kSlots> cursor_{0, 1};  // the first lap finds every slot empty
  RingCursor<T::kSlots> landing_;
  int issued_ = 0;
};

/// One thread: a piece's query rows as one box a chunk, completing on `query_full`.
template <class T>
__device__ void copy_query(const KernelParams& p, const TensorMaps& maps, int token, int head,
                           uint32_t query, uint32_t query_full) {
  ptx::mbarrier_expect(query_full, T::kQueryBytes);
  const bool flat = p.query_load == QueryLoad::kFlatBox;
  const int y = flat ? token * p.num_heads + head : head;
  const int z = flat ? 0 : token;
#pragma unroll 1
  for (int chunk = 0; chunk < T::kChunks; ++chunk) {
    const bool latent = chunk < T::kLatentChunks;
    ptx::tma_load_3d(query + chunk * (T::kRows * 128), latent ? &maps.q_nope : &maps.q_pe,
                     (latent ? chunk : chunk - T::kLatentChunks) * 64, y, z, query_full);
  }
}

/// Threads of the planning warps: a piece's query rows into shared memory, 128-byte-swizzled; rows past
/// num_rows become 0.
template <class T, int kThreads>
__device__ void load_query(const KernelParams& p, const Piece<T::kRows>& piece, char* query, int thread) {
  using Element = typename T::Element;
  constexpr int kVectors = T::kChunks * 8;  // 16-byte vectors of a row
  const int num_rows = piece.num_rows;
#pragma unroll 1
  for (int idx = thread; idx < T::kRows * kVectors; idx += kThreads) {
    const int r = idx / kVectors;
    const int v = idx % kVectors;
    const int chunk = v / 8;
    char* target = query + chunk * (T::kRows * 128) + r * 128 + ((v % 8 ^ r % 8) << 4);
    const bool latent = chunk < T::kLatentChunks;
    const int64_t row =
        row_offset(latent ? p.q_nope_stride : p.q_pe_stride, piece.row_token[r], piece.row_head[r]);
    const Element* source =
        static_cast<const Element*>(latent ? p.q_nope : p.q_pe) + row + (v * 8 - (latent ? 0 : T::kLatent));
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
