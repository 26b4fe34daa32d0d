#include <algorithm>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <limits>
#include <new>
#include <optional>

#include "core/diagnostics.hpp"
#include "io/batch_file.hpp"
#include "io/batch_metadata.hpp"
#include "io/page_pool.hpp"
#include "io/safetensors_header.hpp"

namespace mla::io {
namespace {

constexpr char kOperation[] = "read_batch";
constexpr std::int64_t kMaxWidth = std::int64_t{1} << 20;  // of a cache row's part
constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();
/// Leaves room to add a position without overflow.
constexpr std::int64_t kMaxWindow = std::int64_t{1} << 62;

/// What the format asks of a tensor.
struct Wanted {
  const char* name;
  std::initializer_list<DType> types;
  std::initializer_list<int> ranks;
  const char* text;  ///< "[B] I32"
};

class BatchReader {
 public:
  BatchReader(const SafetensorsFile& file, const BatchLimits& limits)
      : file_(file), limits_(limits), metadata_(file.metadata(), file.source(), kOperation) {}

  Result<Batch> read() {
    MLA_RETURN_IF_ERROR(metadata_.format("format"));
    MLA_RETURN_IF_ERROR(sort_out_names());
    MLA_RETURN_IF_ERROR(read_scalars());
    MLA_RETURN_IF_ERROR(read_query());
    MLA_RETURN_IF_ERROR(read_lengths());
    MLA_RETURN_IF_ERROR(read_options());
    MLA_RETURN_IF_ERROR(read_cache());
    batch_.storage.push_back(std::make_shared<SafetensorsFile>(file_));
    return std::move(batch_);
  }

 private:
  std::string tensor(const char* name) const {
    return text(file_.source(), ": tensor '", name, "'");
  }
  std::string key(const char* name) const {
    return text(file_.source(), ": metadata '", name, "'");
  }

  Status sort_out_names();
  Status read_scalars();
  Status read_query();
  Status read_lengths();
  Status read_options();
  Status read_cache();
  Status place_pages(TensorView* cache);
  Result<PagePool> make_pool(const TensorView& ids, const TensorView& pages,
                             std::int64_t pool_pages, std::uint64_t page_bytes) const;

  /// The tensor, or a view that is not given when the file lacks it.
  Status take(const Wanted& wanted, TensorView* view) const;
  Status require(const Wanted& wanted, TensorView* view) const;

  const SafetensorsFile& file_;
  const BatchLimits& limits_;
  MetadataParser metadata_;
  Batch batch_;
};

bool contains(std::span<const char* const> names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Status BatchReader::sort_out_names() {
  for (const SafetensorsEntry& entry : file_.entries()) {
    if (contains(known_batch_tensors(), entry.name)) continue;
    const char* guess = likely_name(entry.name, known_batch_tensors());
    if (guess != nullptr && file_.find(guess) == nullptr) {
      return bad_argument(kOperation, file_.source() + ": tensor " + quote(entry.name),
                          "an unknown name", text("'", guess, "'"));
    }
    batch_.ignored.push_back(text("tensor ", quote(entry.name)));
  }
  for (const auto& [name, value] : file_.metadata()) {
    if (contains(known_batch_keys(), name)) continue;
    const char* guess = likely_name(name, known_batch_keys());
    if (guess != nullptr && !metadata_.has(guess)) {
      return bad_argument(kOperation, file_.source() + ": metadata " + quote(name),
                          "an unknown key", text("'", guess, "'"));
    }
    batch_.ignored.push_back(text("metadata ", quote(name)));
  }
  return {};
}

Status BatchReader::take(const Wanted& wanted, TensorView* view) const {
  const SafetensorsEntry* entry = file_.find(wanted.name);
  if (entry == nullptr) return {};
  const int rank = static_cast<int>(entry->shape.size());
  const bool right_type =
      entry->type != DType::kNone &&
      std::find(wanted.types.begin(), wanted.types.end(), entry->type) != wanted.types.end();
  if (!right_type ||
      std::find(wanted.ranks.begin(), wanted.ranks.end(), rank) == wanted.ranks.end()) {
    return bad_argument(kOperation, tensor(wanted.name), entry->to_string(), wanted.text);
  }
  Result<TensorView> result = file_.view(wanted.name);
  if (!result.ok()) return result.status();
  *view = *result;
  return {};
}

Status BatchReader::require(const Wanted& wanted, TensorView* view) const {
  MLA_RETURN_IF_ERROR(take(wanted, view));
  if (view->given()) return {};
  return bad_argument(kOperation, tensor(wanted.name), "no such tensor", wanted.text);
}

Status BatchReader::read_scalars() {
  DecodeProblem& problem = batch_.problem;
  MLA_RETURN_IF_ERROR(metadata_.require("kv_lora_rank", "the latent width L"));
  MLA_RETURN_IF_ERROR(metadata_.require("qk_rope_head_dim", "the rotary width R"));
  MLA_RETURN_IF_ERROR(metadata_.require("bmm1_scale", "the complete softmax scale"));
  MLA_RETURN_IF_ERROR(metadata_.integer("kv_lora_rank", 1, kMaxWidth, &problem.kv_lora_rank));
  MLA_RETURN_IF_ERROR(
      metadata_.integer("qk_rope_head_dim", 0, kMaxWidth, &problem.qk_rope_head_dim));
  MLA_RETURN_IF_ERROR(metadata_.number("bmm1_scale", &batch_.tensors.bmm1_scale.value));
  MLA_RETURN_IF_ERROR(metadata_.number("bmm2_scale", &batch_.tensors.bmm2_scale.value));
  MLA_RETURN_IF_ERROR(metadata_.boolean("causal", &problem.causal));
  MLA_RETURN_IF_ERROR(metadata_.integer("cp_world", 1, kMaxInt32, &problem.cp_world));
  MLA_RETURN_IF_ERROR(metadata_.integer("cp_rank", 0, problem.cp_world - 1, &problem.cp_rank));
  MLA_RETURN_IF_ERROR(metadata_.integer("cp_interleave", 1, kMaxInt32, &problem.cp_interleave));
  MLA_RETURN_IF_ERROR(metadata_.number("logits_soft_cap", &problem.logits_soft_cap));
  MLA_RETURN_IF_ERROR(metadata_.integer("sliding_window", 0, kMaxWindow, &problem.sliding_window));
  MLA_RETURN_IF_ERROR(metadata_.lse_base("lse_base", &problem.lse_base));
  return metadata_.out_dtype("out_dtype", &problem.out_dtype);
}

Status BatchReader::read_query() {
  const std::initializer_list<DType> types = {DType::kBF16, DType::kF16, DType::kE4M3};
  DecodeTensors& tensors = batch_.tensors;
  MLA_RETURN_IF_ERROR(take({"q", types, {3}, "[T,H,D] BF16, F16 or F8_E4M3"}, &tensors.q));
  MLA_RETURN_IF_ERROR(
      take({"q_nope", types, {3}, "[T,H,L] BF16, F16 or F8_E4M3"}, &tensors.q_nope));
  MLA_RETURN_IF_ERROR(take({"q_pe", types, {3}, "[T,H,R] BF16, F16 or F8_E4M3"}, &tensors.q_pe));
  const bool parts = tensors.q_nope.given() || tensors.q_pe.given();
  if (tensors.q.given() && parts) {
    return bad_argument(kOperation, tensor(tensors.q_nope.given() ? "q_nope" : "q_pe"),
                        "it beside 'q'", "either q, or q_nope with q_pe");
  }
  if (!tensors.q.given() && !tensors.q_nope.given()) {
    return bad_argument(kOperation, tensor(parts ? "q_nope" : "q"), "no such tensor",
                        "q [T,H,D], or q_nope [T,H,L] with q_pe [T,H,R]");
  }
  const bool needs_rope = batch_.problem.qk_rope_head_dim > 0;
  if (parts && tensors.q_pe.given() != needs_rope) {
    return bad_argument(kOperation, tensor("q_pe"),
                        needs_rope ? "no such tensor" : "it with qk_rope_head_dim 0",
                        needs_rope ? "q_pe [T,H,R] beside q_nope" : "q_nope alone");
  }
  const TensorView& query = tensors.q.given() ? tensors.q : tensors.q_nope;
  batch_.problem.num_tokens = query.shape[0];
  batch_.problem.num_heads = query.shape[1];
  batch_.problem.q_dtype = query.dtype;
  return {};
}

Status BatchReader::read_lengths() {
  DecodeProblem& problem = batch_.problem;
  DecodeTensors& tensors = batch_.tensors;
  MLA_RETURN_IF_ERROR(take({"indices", {DType::kI32}, {2}, "[T,K] I32"}, &tensors.indices));
  if (tensors.indices.given()) {
    problem.num_indices = tensors.indices.shape[1];
    // No entries would make the problem a dense one.
    if (problem.num_indices == 0) {
      return bad_argument(kOperation, tensor("indices"), file_.find("indices")->to_string(),
                          "[T,K] I32 with K from 1");
    }
  }
  const Wanted table = {"block_table", {DType::kI32}, {2}, "[B,width] I32"};
  const Wanted lengths = {"seq_lens", {DType::kI32}, {1}, "[B] I32"};
  MLA_RETURN_IF_ERROR(problem.sparse() ? take(table, &tensors.block_table)
                                       : require(table, &tensors.block_table));
  MLA_RETURN_IF_ERROR(problem.sparse() ? take(lengths, &tensors.seq_lens)
                                       : require(lengths, &tensors.seq_lens));
  const Wanted starts = {"query_start_loc", {DType::kI32}, {1}, "[B+1] I32"};
  const Wanted global = {"causal_seqlens_kv_global", {DType::kI32}, {1}, "[B] I32"};
  MLA_RETURN_IF_ERROR(take(starts, &tensors.query_start_loc));
  MLA_RETURN_IF_ERROR(take(global, &tensors.causal_seqlens_kv_global));
  if (tensors.query_start_loc.given() && tensors.query_start_loc.shape[0] == 0) {
    return bad_argument(kOperation, tensor("query_start_loc"), "I32 [0]", starts.text);
  }

  // A sparse batch may come without lengths; each token is then a request.
  problem.num_requests = tensors.seq_lens.given()          ? tensors.seq_lens.shape[0]
                         : tensors.block_table.given()     ? tensors.block_table.shape[0]
                         : tensors.query_start_loc.given() ? tensors.query_start_loc.shape[0] - 1
                                                           : problem.num_tokens;
  if (tensors.seq_lens.given()) {
    const auto* seq_lens = static_cast<const std::int32_t*>(tensors.seq_lens.data);
    for (std::int64_t b = 0; b < tensors.seq_lens.shape[0]; ++b) {
      problem.max_seq_len = std::max<std::int64_t>(problem.max_seq_len, seq_lens[b]);
    }
  }
  if (tensors.query_start_loc.given()) {
    const auto* start = static_cast<const std::int32_t*>(tensors.query_start_loc.data);
    for (std::int64_t b = 0; b + 1 < tensors.query_start_loc.shape[0]; ++b) {
      problem.max_query_len =
          std::max(problem.max_query_len, std::int64_t{start[b + 1]} - start[b]);
    }
  } else if (problem.num_requests > 0) {
    const std::int64_t whole = problem.num_tokens / problem.num_requests;
    const bool rest = problem.num_tokens % problem.num_requests != 0;
    problem.max_query_len = std::max<std::int64_t>(1, whole + (rest ? 1 : 0));
  }
  return {};
}

Status BatchReader::read_options() {
  DecodeTensors& tensors = batch_.tensors;
  MLA_RETURN_IF_ERROR(take({"sinks", {DType::kF32}, {1}, "[H] F32"}, &tensors.sinks));
  MLA_RETURN_IF_ERROR(take({"alibi_slopes", {DType::kF32}, {1}, "[H] F32"}, &tensors.alibi_slopes));
  batch_.problem.uses_sinks = tensors.sinks.given();
  batch_.problem.uses_alibi_slopes = tensors.alibi_slopes.given();
  return {};
}

KvFormat kv_format_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF16: return KvFormat::kF16;
    case DType::kE4M3: return KvFormat::kE4M3;
    case DType::kU8: return KvFormat::kFp8DsMla;
    default: return KvFormat::kBF16;
  }
}

Status BatchReader::read_cache() {
  TensorView cache;
  MLA_RETURN_IF_ERROR(require({"kv_cache",
                               {DType::kBF16, DType::kF16, DType::kE4M3, DType::kU8},
                               {3, 4},
                               "[pages,page_size,D] or [pages,layers,page_size,D] of BF16, F16, "
                               "F8_E4M3, or U8 with D = 656"},
                              &cache));
  MLA_RETURN_IF_ERROR(place_pages(&cache));
  if (cache.rank == 4) {
    MLA_RETURN_IF_ERROR(metadata_.require("kv_layer", "the layer of a 4-D kv_cache"));
    std::int64_t layer = 0;
    MLA_RETURN_IF_ERROR(metadata_.integer("kv_layer", 0, cache.shape[1] - 1, &layer));
    const bool empty = std::find(cache.shape, cache.shape + 4, 0) != cache.shape + 4;
    if (!empty) {
      cache.data = static_cast<std::byte*>(cache.data) +
                   layer * cache.stride[1] * static_cast<std::int64_t>(dtype_bytes(cache.dtype));
    }
    for (int axis = 1; axis < 3; ++axis) {
      cache.shape[axis] = cache.shape[axis + 1];
      cache.stride[axis] = cache.stride[axis + 1];
    }
    cache.rank = 3;
    cache.shape[3] = cache.stride[3] = 0;
  } else if (metadata_.has("kv_layer")) {
    return bad_argument(kOperation, key("kv_layer"), "a kv_cache of 3 axes",
                        "[pages,layers,page_size,D]");
  }
  batch_.tensors.kv_cache = cache;
  batch_.problem.kv_format = kv_format_of(cache.dtype);
  batch_.problem.page_size = cache.shape[1];
  return {};
}

/// Replaces the file's pages by a pool that holds them at kv_page_ids.
Status BatchReader::place_pages(TensorView* cache) {
  TensorView ids;
  MLA_RETURN_IF_ERROR(take({"kv_page_ids", {DType::kI32}, {1}, "[pages] I32"}, &ids));
  if (!ids.given()) {
    if (!metadata_.has("kv_pool_pages")) return {};
    return bad_argument(kOperation, tensor("kv_page_ids"), "no such tensor",
                        "[pages] I32 beside kv_pool_pages");
  }
  MLA_RETURN_IF_ERROR(metadata_.require("kv_pool_pages", "the pages of the pool of kv_page_ids"));
  std::int64_t pool_pages = 0;
  MLA_RETURN_IF_ERROR(metadata_.integer("kv_pool_pages", 0, kMaxInt32, &pool_pages));
  if (ids.shape[0] != cache->shape[0]) {
    return bad_argument(kOperation, tensor("kv_page_ids"), file_.find("kv_page_ids")->to_string(),
                        text("[", cache->shape[0], "] I32, an id for each page of kv_cache"));
  }
  std::uint64_t page_bytes = dtype_bytes(cache->dtype);
  for (int axis = 1; axis < cache->rank; ++axis) {
    page_bytes *= static_cast<std::uint64_t>(cache->shape[axis]);  // fits: checked with the header
  }
  std::uint64_t pool_bytes = 0;
  if (__builtin_mul_overflow(page_bytes, static_cast<std::uint64_t>(pool_pages), &pool_bytes) ||
      pool_bytes > limits_.max_pool_bytes) {
    return bad_argument(kOperation, key("kv_pool_pages"),
                        text(pool_pages, " pages of ", page_bytes, " bytes"),
                        text("a pool of at most ", limits_.max_pool_bytes, " bytes"));
  }
  Result<PagePool> pool = make_pool(ids, *cache, pool_pages, page_bytes);
  if (!pool.ok()) return pool.status();
  cache->data = pool->data();
  cache->shape[0] = pool_pages;
  batch_.storage.push_back(pool->owner());
  return {};
}

Result<PagePool> BatchReader::make_pool(const TensorView& ids, const TensorView& pages,
                                        std::int64_t pool_pages, std::uint64_t page_bytes) const {
  const auto* id = static_cast<const std::int32_t*>(ids.data);
  std::vector<std::int32_t> sorted(id, id + ids.shape[0]);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    return bad_argument(kOperation, tensor("kv_page_ids"), text(*twice, " twice"), "each id once");
  }
  if (!sorted.empty() && (sorted.front() < 0 || sorted.back() >= pool_pages)) {
    return bad_argument(kOperation, tensor("kv_page_ids"),
                        sorted.front() < 0 ? sorted.front() : sorted.back(),
                        text("ids from 0 to kv_pool_pages - 1 = ", pool_pages - 1));
  }
  Result<PagePool> pool = PagePool::create(page_bytes * static_cast<std::uint64_t>(pool_pages));
  if (!pool.ok()) return pool;
  const auto* source = static_cast<const std::byte*>(pages.data);
  for (std::int64_t page = 0; page_bytes > 0 && page < ids.shape[0]; ++page) {
    std::memcpy(pool->data() + static_cast<std::uint64_t>(id[page]) * page_bytes,
                source + static_cast<std::uint64_t>(page) * page_bytes, page_bytes);
  }
  return pool;
}

/// Errors of the file itself, then of the batch in it; no exception leaves.
template <class Open>
Result<Batch> read_guarded(const std::string& source, const BatchLimits& limits,
                           Open&& open) noexcept try {
  const Result<SafetensorsFile> file = open();
  if (!file.ok()) return file.status();
  return BatchReader(*file, limits).read();
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kOutOfMemory,
                text(kOperation, ": ", source, ": found too little memory, needed more"));
} catch (const std::exception& error) {
  return Status(StatusCode::kInternal,
                text(kOperation, ": ", source, ": found ", error.what(), ", needed no exception"));
}

}  // namespace

Result<Batch> read_batch(const std::string& path, const BatchLimits& limits) {
  return read_guarded(path, limits, [&] { return SafetensorsFile::open(path, kOperation); });
}

Result<Batch> parse_batch(std::span<const std::byte> bytes, const std::string& source,
                          const BatchLimits& limits) {
  return read_guarded(source, limits,
                      [&] { return SafetensorsFile::parse(bytes, source, kOperation); });
}

}  // namespace mla::io
