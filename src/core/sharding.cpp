// [problem] Who owns a token under context parallelism, and moving tokens between a whole cache and
// the shards of its ranks.
#include "mla/sharding.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/diagnostics.hpp"
#include "core/element.hpp"
#include "core/visibility.hpp"

namespace mla {
namespace {

const std::int32_t* table_row(const CacheView& cache, std::int64_t request) noexcept {
  return static_cast<const std::int32_t*>(cache.block_table.data) +
         request * cache.block_table.stride[0];
}

std::int64_t global_len(const TensorView& lens, std::int64_t request) noexcept {
  return static_cast<const std::int32_t*>(lens.data)[request * lens.stride[0]];
}

std::byte* token_address(const CacheView& cache, std::int64_t request, std::int64_t key) noexcept {
  const std::int64_t page_size = cache.kv_cache.shape[1];
  const std::int64_t page = table_row(cache, request)[key / page_size];
  return row_address(cache.kv_cache, page, key % page_size);
}

Status check_sharding(const char* operation, const Sharding& sharding, std::int64_t rank) {
  if (sharding.world < 1) return bad_argument(operation, "world", sharding.world, "at least 1");
  if (sharding.interleave < 1) {
    return bad_argument(operation, "interleave", sharding.interleave, "at least 1");
  }
  if (rank < 0 || rank >= sharding.world) {
    return bad_argument(operation, "rank", rank, text("0 to ", sharding.world - 1));
  }
  return {};
}

Status check_lens(const char* operation, const TensorView& lens) {
  if (lens.dtype != DType::kI32 || lens.rank != 1 || (lens.shape[0] > 0 && lens.data == nullptr)) {
    return bad_argument(operation, "global_lens",
                        text("a ", to_string(lens.dtype), " tensor of rank ", lens.rank),
                        "i32 [B]");
  }
  for (std::int64_t b = 0; b < lens.shape[0]; ++b) {
    const std::int64_t length = global_len(lens, b);
    if (length < 0) {
      return bad_argument(operation, text("global_lens[", b, "]"), length, "a length from 0");
    }
  }
  return {};
}

/// Shapes and types of one side, and every page id that `keys_of(b)` keys of request b use.
template <class KeysOf>
Status check_cache(const char* operation, const std::string& name, const CacheView& cache,
                   std::int64_t num_requests, KeysOf keys_of) {
  const TensorView& kv = cache.kv_cache;
  const TensorView& table = cache.block_table;
  if (!kv.given() || kv.rank != 3 || kv.shape[1] < 1 || (kv.shape[2] > 1 && kv.stride[2] != 1)) {
    return bad_argument(operation, name + ".kv_cache",
                        text("a ", to_string(kv.dtype), " tensor of rank ", kv.rank),
                        "[pages,page_size,width] with last stride 1");
  }
  if (table.dtype != DType::kI32 || table.rank != 2 || table.shape[0] != num_requests ||
      (table.shape[1] > 1 && table.stride[1] != 1)) {
    return bad_argument(operation, name + ".block_table",
                        text("a ", to_string(table.dtype), " tensor of rank ", table.rank, " with ",
                             table.rank > 0 ? table.shape[0] : 0, " rows"),
                        text("i32 [", num_requests, ",columns] with last stride 1"));
  }
  for (std::int64_t b = 0; b < num_requests; ++b) {
    const std::int64_t keys = keys_of(b);
    if (keys == 0) continue;
    if (kv.data == nullptr || table.data == nullptr) {
      return bad_argument(operation, name, "a null pointer", "memory");
    }
    const std::int64_t columns = (keys - 1) / kv.shape[1] + 1;
    if (columns > table.shape[1]) {
      return bad_argument(operation, text(name, ".block_table columns"), table.shape[1],
                          text("at least ", columns, " for ", keys, " keys of request ", b));
    }
    for (std::int64_t column = 0; column < columns; ++column) {
      const std::int32_t page = table_row(cache, b)[column];
      if (page >= 0 && page < kv.shape[0]) continue;
      return bad_argument(operation, text(name, ".block_table[", b, "][", column, "]"), page,
                          text("0 to ", kv.shape[0] - 1));
    }
  }
  return {};
}

enum class Direction { kToShard, kToWhole };

Status move_tokens(const char* operation, const Sharding& sharding, std::int64_t rank,
                   const CacheView& whole, const TensorView& lens, const CacheView& shard,
                   Direction direction) {
  MLA_RETURN_IF_ERROR(check_sharding(operation, sharding, rank));
  MLA_RETURN_IF_ERROR(check_lens(operation, lens));
  const std::int64_t num_requests = lens.shape[0];
  const auto whole_keys = [&](std::int64_t b) { return global_len(lens, b); };
  const auto shard_keys = [&](std::int64_t b) {
    return local_seq_len(global_len(lens, b), sharding.world, rank, sharding.interleave);
  };
  MLA_RETURN_IF_ERROR(check_cache(operation, "whole", whole, num_requests, whole_keys));
  MLA_RETURN_IF_ERROR(check_cache(operation, "shard", shard, num_requests, shard_keys));
  if (shard.kv_cache.dtype != whole.kv_cache.dtype ||
      shard.kv_cache.shape[2] != whole.kv_cache.shape[2]) {
    return bad_argument(
        operation, "shard.kv_cache",
        text(to_string(shard.kv_cache.dtype), " tokens of ", shard.kv_cache.shape[2], " elements"),
        text(to_string(whole.kv_cache.dtype), " tokens of ", whole.kv_cache.shape[2],
             " elements as in whole"));
  }
  const std::size_t bytes =
      static_cast<std::size_t>(whole.kv_cache.shape[2]) * dtype_bytes(whole.kv_cache.dtype);
  for (std::int64_t b = 0; b < num_requests; ++b) {
    const std::int64_t keys = shard_keys(b);
    for (std::int64_t index = 0; index < keys; ++index) {
      std::byte* local = token_address(shard, b, index);
      std::byte* global = token_address(whole, b, global_position(sharding, {rank, index}));
      const bool to_shard = direction == Direction::kToShard;
      std::memcpy(to_shard ? local : global, to_shard ? global : local, bytes);
    }
  }
  return {};
}

}  // namespace

LocalToken local_token(const Sharding& sharding, std::int64_t position) noexcept {
  const std::int64_t chunk = position / sharding.interleave;
  return {chunk % sharding.world,
          chunk / sharding.world * sharding.interleave + position % sharding.interleave};
}

std::int64_t global_position(const Sharding& sharding, const LocalToken& token) noexcept {
  return global_position(CpLayout{sharding.world, token.rank, sharding.interleave}, token.index);
}

std::int64_t local_seq_len(std::int64_t global_len, std::int64_t cp_world, std::int64_t cp_rank,
                           std::int64_t cp_interleave) noexcept {
  if (cp_world < 1 || cp_rank < 0 || cp_rank >= cp_world || cp_interleave < 1) return 0;
  return local_keys_below({cp_world, cp_rank, cp_interleave}, global_len);
}

std::int64_t shard_slot(const Sharding& sharding, std::int64_t rank, std::int64_t position,
                        std::int64_t page_size, const std::int32_t* pages) noexcept {
  const LocalToken token = local_token(sharding, position);
  if (token.rank != rank) return -1;
  return pages[token.index / page_size] * page_size + token.index % page_size;
}

Status split_cache(const Sharding& sharding, std::int64_t rank, const CacheView& whole,
                   const TensorView& global_lens, const CacheView& shard) {
  return move_tokens("split_cache", sharding, rank, whole, global_lens, shard, Direction::kToShard);
}

Status gather_cache(const Sharding& sharding, std::int64_t rank, const CacheView& shard,
                    const TensorView& global_lens, const CacheView& whole) {
  return move_tokens("gather_cache", sharding, rank, whole, global_lens, shard,
                     Direction::kToWhole);
}

}  // namespace mla
