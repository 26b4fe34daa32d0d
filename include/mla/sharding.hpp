// Context-parallel ownership: which rank stores a token, and where; splitting a paged cache into
// shards and gathering it back.
//
// W ranks share each sequence. Tokens are dealt in chunks of I = `interleave`: chunk k goes to rank
// k mod W. A rank keeps its tokens densely, in order: local key j of rank r is the token at
// position ((j div I)*W + r)*I + j mod I, and lies in its pages as any key does: column j div page_size of
// the rank's block table, offset j mod page_size. So I and the page size are independent.
#pragma once

#include <cstdint>

#include "mla/export.hpp"
#include "mla/status.hpp"
#include "mla/tensor.hpp"

namespace mla {

/// How tokens are dealt. Functions that cannot fail want world >= 1 and interleave >= 1.
struct Sharding {
  std::int64_t world = 1;       ///< W
  std::int64_t interleave = 1;  ///< I
};

/// A token's place: local key `index` of `rank`.
struct LocalToken {
  std::int64_t rank = 0;
  std::int64_t index = 0;
};

/// Where the token at global position `position` (from 0) lies.
MLA_API LocalToken local_token(const Sharding& sharding, std::int64_t position) noexcept;

/// The inverse of `local_token`.
MLA_API std::int64_t global_position(const Sharding& sharding, const LocalToken& token) noexcept;

/// Keys of a sequence of `global_len` tokens that lie on rank `cp_rank`: token g lies on rank
/// (g / cp_interleave) mod cp_world. 0 when an argument is out of range.
MLA_API std::int64_t local_seq_len(std::int64_t global_len, std::int64_t cp_world,
                                   std::int64_t cp_rank, std::int64_t cp_interleave = 1) noexcept;

/// The slot (page * page_size + offset) that rank `rank` writes the token at `position` to, or -1
/// when the token is another rank's. `pages` is the request's row of that rank's block table.
MLA_API std::int64_t shard_slot(const Sharding& sharding, std::int64_t rank, std::int64_t position,
                                std::int64_t page_size, const std::int32_t* pages) noexcept;

/// A paged cache in host memory: the pages of some requests.
struct CacheView {
  TensorView kv_cache;     ///< [pages,page_size,width], any format; strides of page and token free
  TensorView block_table;  ///< [B,columns] i32, row stride free
};

/// Copies rank `rank`'s tokens of every request from `whole`, whose requests have `global_lens` [B]
/// i32 tokens, to their places in `shard`. Formats must agree, page sizes need not. Bytes of
/// `shard` that no token owns are left alone. kInvalidArgument: shapes, types or a page id in use
/// do not fit; nothing was copied.
MLA_API Status split_cache(const Sharding& sharding, std::int64_t rank, const CacheView& whole,
                           const TensorView& global_lens, const CacheView& shard);

/// The inverse: copies rank `rank`'s tokens from its shard to their places in `whole`. Called once
/// for each rank it restores the whole cache.
MLA_API Status gather_cache(const Sharding& sharding, std::int64_t rank, const CacheView& shard,
                            const TensorView& global_lens, const CacheView& whole);

}  // namespace mla
