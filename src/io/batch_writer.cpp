#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <exception>
#include <new>

#include "core/diagnostics.hpp"
#include "io/batch_file.hpp"
#include "io/batch_metadata.hpp"

namespace mla::io {
namespace {

constexpr char kOperation[] = "write_batch";

/// The shortest text that reads back as the same f32.
std::string number_text(float value) {
  char buffer[32];
  const std::to_chars_result result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return {buffer, result.ptr};
}

Status add_number(const char* key, float value, Metadata* metadata) {
  if (!std::isfinite(value)) {
    return bad_argument(kOperation, key, number_text(value), "a finite number");
  }
  (*metadata)[key] = number_text(value);
  return {};
}

float scale_value(const Scale& scale) noexcept {
  return scale.pointer != nullptr ? *scale.pointer : scale.value;
}

Result<Metadata> make_metadata(const DecodeProblem& problem, const DecodeTensors& tensors) {
  Metadata metadata;
  metadata["format"] = kBatchFormat;
  metadata["kv_lora_rank"] = std::to_string(problem.kv_lora_rank);
  metadata["qk_rope_head_dim"] = std::to_string(problem.qk_rope_head_dim);
  MLA_RETURN_IF_ERROR(add_number("bmm1_scale", scale_value(tensors.bmm1_scale), &metadata));
  MLA_RETURN_IF_ERROR(add_number("bmm2_scale", scale_value(tensors.bmm2_scale), &metadata));
  MLA_RETURN_IF_ERROR(add_number("logits_soft_cap", problem.logits_soft_cap, &metadata));
  metadata["causal"] = problem.causal ? "true" : "false";
  metadata["cp_world"] = std::to_string(problem.cp_world);
  metadata["cp_rank"] = std::to_string(problem.cp_rank);
  metadata["cp_interleave"] = std::to_string(problem.cp_interleave);
  metadata["sliding_window"] = std::to_string(problem.sliding_window);
  metadata.emplace("lse_base", problem.lse_base == LseBase::kTwo ? "2" : "e");
  if (problem.out_dtype != DType::kNone) {
    metadata["out_dtype"] = safetensors_dtype(problem.out_dtype);
  }
  return metadata;
}

Status check_rank(const char* name, const TensorView& view, int rank, DType dtype) {
  if (view.rank != rank || (dtype != DType::kNone && view.dtype != dtype)) {
    return bad_argument(
        kOperation, name, text(to_string(view.dtype), " of rank ", view.rank),
        text(dtype == DType::kNone ? "a tensor" : to_string(dtype), " of rank ", rank));
  }
  return {};
}

std::int32_t element(const TensorView& view, std::int64_t i, std::int64_t j = 0) noexcept {
  return static_cast<const std::int32_t*>(view.data)[i * view.stride[0] + j * view.stride[1]];
}

/// The pages that the batch reads, ascending.
Result<std::vector<std::int32_t>> owned_pages(const DecodeProblem& problem,
                                              const DecodeTensors& tensors) {
  const std::int64_t num_pages = tensors.kv_cache.shape[0];
  const std::int64_t page_size = tensors.kv_cache.shape[1];
  std::vector<std::int32_t> pages;
  if (problem.sparse()) {
    MLA_RETURN_IF_ERROR(check_rank("indices", tensors.indices, 2, DType::kI32));
    for (std::int64_t t = 0; t < tensors.indices.shape[0]; ++t) {
      for (std::int64_t k = 0; k < tensors.indices.shape[1]; ++k) {
        const std::int32_t slot = element(tensors.indices, t, k);
        if (slot < 0 || slot / page_size >= num_pages) continue;  // no key
        pages.push_back(static_cast<std::int32_t>(slot / page_size));
      }
    }
  } else {
    MLA_RETURN_IF_ERROR(check_rank("block_table", tensors.block_table, 2, DType::kI32));
    MLA_RETURN_IF_ERROR(check_rank("seq_lens", tensors.seq_lens, 1, DType::kI32));
    for (std::int64_t b = 0; b < tensors.seq_lens.shape[0]; ++b) {
      const std::int64_t used =
          (std::int64_t{element(tensors.seq_lens, b)} + page_size - 1) / page_size;
      if (used > tensors.block_table.shape[1] || b >= tensors.block_table.shape[0]) {
        return bad_argument(kOperation, text("block_table row ", b),
                            text(tensors.block_table.shape[1], " columns"), text(used, " columns"));
      }
      for (std::int64_t column = 0; column < used; ++column) {
        const std::int32_t page = element(tensors.block_table, b, column);
        if (page < 0 || page >= num_pages) {
          return bad_argument(kOperation, text("block_table[", b, ",", column, "]"), page,
                              text("a page from 0 to ", num_pages - 1));
        }
        pages.push_back(page);
      }
    }
  }
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  return pages;
}

/// The pages of a cache, gathered.
struct Gathered {
  std::vector<std::int32_t> ids;
  std::vector<std::byte> bytes;
};

Result<Gathered> gather(const DecodeProblem& problem, const DecodeTensors& tensors) {
  const TensorView& cache = tensors.kv_cache;
  if (cache.shape[1] < 1 || cache.shape[2] < 1 || cache.stride[2] != 1) {
    return bad_argument(kOperation, "kv_cache",
                        text("page_size ", cache.shape[1], ", row width ", cache.shape[2],
                             ", last stride ", cache.stride[2]),
                        "page_size and width from 1, last stride 1");
  }
  Result<std::vector<std::int32_t>> ids = owned_pages(problem, tensors);
  if (!ids.ok()) return ids.status();
  Gathered result;
  result.ids = std::move(*ids);
  const std::int64_t width = static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  const std::size_t row_bytes = static_cast<std::size_t>(cache.shape[2] * width);
  result.bytes.resize(result.ids.size() * static_cast<std::size_t>(cache.shape[1]) * row_bytes);
  std::byte* target = result.bytes.data();
  for (std::int64_t page : result.ids) {
    for (std::int64_t token = 0; token < cache.shape[1]; ++token, target += row_bytes) {
      const std::int64_t offset = page * cache.stride[0] + token * cache.stride[1];
      std::memcpy(target, static_cast<const std::byte*>(cache.data) + offset * width, row_bytes);
    }
  }
  return result;
}

Status write_checked(const std::string& path, const DecodeProblem& problem,
                     const DecodeTensors& tensors, const BatchWriteOptions& options) {
  Result<Metadata> metadata = make_metadata(problem, tensors);
  if (!metadata.ok()) return metadata.status();
  if (!tensors.kv_cache.given()) {
    return bad_argument(kOperation, "kv_cache", "no tensor", "[pages,page_size,D]");
  }
  MLA_RETURN_IF_ERROR(check_rank("kv_cache", tensors.kv_cache, 3, DType::kNone));
  if (!tensors.q.given() && !tensors.q_nope.given()) {
    return bad_argument(kOperation, "q", "no tensor", "[T,H,D], or q_nope with q_pe");
  }

  std::vector<NamedTensor> named;
  const auto add = [&named](const char* name, const TensorView& view) {
    if (view.given()) named.push_back({name, view});
  };
  Gathered gathered;
  if (options.only_owned_pages) {
    Result<Gathered> pages = gather(problem, tensors);
    if (!pages.ok()) return pages.status();
    gathered = std::move(*pages);
    const std::int64_t count = static_cast<std::int64_t>(gathered.ids.size());
    add("kv_page_ids", TensorView::contiguous(gathered.ids.data(), DType::kI32, {count}));
    add("kv_cache",
        TensorView::contiguous(gathered.bytes.data(), tensors.kv_cache.dtype,
                               {count, tensors.kv_cache.shape[1], tensors.kv_cache.shape[2]}));
    (*metadata)["kv_pool_pages"] = std::to_string(tensors.kv_cache.shape[0]);
  } else {
    add("kv_cache", tensors.kv_cache);
  }
  add("q", tensors.q);
  add("q_nope", tensors.q_nope);
  add("q_pe", tensors.q_pe);
  add("block_table", tensors.block_table);
  add("seq_lens", tensors.seq_lens);
  add("query_start_loc", tensors.query_start_loc);
  add("causal_seqlens_kv_global", tensors.causal_seqlens_kv_global);
  add("sinks", tensors.sinks);
  add("alibi_slopes", tensors.alibi_slopes);
  add("indices", tensors.indices);
  return write_safetensors(path, named, *metadata, kOperation);
}

}  // namespace

Status write_batch(const std::string& path, const DecodeProblem& problem,
                   const DecodeTensors& tensors, const BatchWriteOptions& options) try {
  return write_checked(path, problem, tensors, options);
} catch (const std::bad_alloc&) {
  return {StatusCode::kOutOfMemory,
          text(kOperation, ": ", path, ": found too little memory, needed room for the pages")};
} catch (const std::exception& error) {
  return {StatusCode::kInternal,
          text(kOperation, ": ", path, ": found ", error.what(), ", needed no exception")};
}

Status write_result(const std::string& path, const TensorView& out, const TensorView& lse,
                    const Metadata& metadata) {
  std::vector<NamedTensor> named{{"out", out}};
  if (lse.given()) named.push_back({"lse", lse});
  return write_safetensors(path, named, metadata, "write_result");
}

}  // namespace mla::io
