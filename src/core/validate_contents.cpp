// [validate] What the integer arrays say, for backends whose arrays lie in host memory.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/diagnostics.hpp"
#include "core/stages.hpp"

namespace mla {
namespace {

std::string at(const char* name, std::int64_t index) { return text(name, '[', index, ']'); }

Status check_query_start_loc(const char* operation, const DecodeProblem& problem,
                             const std::int32_t* query_start_loc) {
  if (query_start_loc == nullptr) {
    if (problem.num_requests == 0 ? problem.num_tokens != 0
                                  : problem.num_tokens % problem.num_requests != 0) {
      return bad_argument(operation, "query_start_loc", "none",
                          text("it, because ", problem.num_tokens, " tokens do not divide among ",
                               problem.num_requests, " requests"));
    }
    if (problem.num_requests == 0) return {};
    const std::int64_t uniform = problem.num_tokens / problem.num_requests;
    if (uniform <= problem.max_query_len) return {};
    return bad_argument(operation, "num_tokens / num_requests", uniform,
                        text("at most max_query_len = ", problem.max_query_len));
  }
  if (query_start_loc[0] != 0) {
    return bad_argument(operation, "query_start_loc[0]", query_start_loc[0], 0);
  }
  for (std::int64_t b = 0; b < problem.num_requests; ++b) {
    const std::int64_t begin = query_start_loc[b];
    const std::int64_t end = query_start_loc[b + 1];
    if (end < begin) {
      return bad_argument(operation, at("query_start_loc", b + 1), end,
                          text("at least query_start_loc[", b, "] = ", begin));
    }
    if (end > problem.num_tokens) {
      return bad_argument(operation, at("query_start_loc", b + 1), end,
                          text("at most num_tokens = ", problem.num_tokens));
    }
    if (end - begin > problem.max_query_len) {
      return bad_argument(operation, text("query length of request ", b), end - begin,
                          text("at most max_query_len = ", problem.max_query_len));
    }
  }
  return {};
}

/// Table entries of the pages that some row of the request sees.
Status check_block_table(const char* operation, const DecodeProblem& problem,
                         const DecodeTensors& tensors, const BatchLengths& lengths) {
  const TensorView& table = tensors.block_table;
  const std::int64_t width = table.shape[1];
  const std::int64_t num_pages = tensors.kv_cache.shape[0];
  for (std::int64_t b = 0; b < problem.num_requests; ++b) {
    const RequestShape shape = request_shape(problem, lengths, b);
    const std::int64_t needed = (shape.seq_len + problem.page_size - 1) / problem.page_size;
    if (needed > width) {
      return bad_argument(operation, "block_table width", width,
                          text("at least ", needed, " pages for seq_lens[", b, "] = ", shape.seq_len));
    }
    KeyRange seen;
    for (std::int64_t i = 0; i < shape.num_tokens; ++i) {
      const KeyRange keys = token_keys(problem, shape, i);
      if (keys.empty()) continue;
      if (seen.empty()) seen = keys;
      seen.begin = std::min(seen.begin, keys.begin);
      seen.end = std::max(seen.end, keys.end);
    }
    if (seen.empty()) continue;
    const auto* row = static_cast<const std::int32_t*>(table.data) + b * table.stride[0];
    for (std::int64_t p = seen.begin / problem.page_size; p <= (seen.end - 1) / problem.page_size; ++p) {
      if (row[p] >= 0 && row[p] < num_pages) continue;
      return bad_argument(operation, text("block_table[", b, "][", p, ']'), row[p],
                          text("0 to ", num_pages - 1, " (kv_cache has ", num_pages, " pages)"));
    }
  }
  return {};
}

Status check_scale_value(const char* operation, const char* name, const Scale& scale) {
  if (scale.pointer == nullptr || std::isfinite(*scale.pointer)) return {};
  return bad_argument(operation, text("the value ", name, " points to"), *scale.pointer, "a finite factor");
}

}  // namespace

Status validate_lengths(const char* operation, const DecodeProblem& problem,
                        const BatchLengths& lengths) {
  MLA_RETURN_IF_ERROR(check_query_start_loc(operation, problem, lengths.query_start_loc));
  if (problem.sparse()) return {};
  if (problem.cp_world > 1 && problem.uses_positions() && problem.num_requests > 0 &&
      lengths.causal_seqlens_kv_global == nullptr) {
    return bad_argument(operation, "causal_seqlens_kv_global", "none",
                        text(problem.num_requests, " global lengths, because cp_world is ",
                             problem.cp_world));
  }
  for (std::int64_t b = 0; b < problem.num_requests; ++b) {
    const std::int64_t seq_len = lengths.seq_lens[b];
    if (seq_len < 0 || seq_len > problem.max_seq_len) {
      return bad_argument(operation, at("seq_lens", b), seq_len,
                          text("0 to max_seq_len = ", problem.max_seq_len));
    }
    if (lengths.causal_seqlens_kv_global != nullptr && lengths.causal_seqlens_kv_global[b] < 0) {
      return bad_argument(operation, at("causal_seqlens_kv_global", b),
                          lengths.causal_seqlens_kv_global[b], "0 or more");
    }
  }
  return {};
}

Status validate_contents(const DecodeProblem& problem, const DecodeTensors& tensors) {
  constexpr const char* kOperation = "run";
  const BatchLengths lengths = batch_lengths(tensors);
  MLA_RETURN_IF_ERROR(validate_lengths(kOperation, problem, lengths));
  MLA_RETURN_IF_ERROR(check_scale_value(kOperation, "bmm1_scale", tensors.bmm1_scale));
  MLA_RETURN_IF_ERROR(check_scale_value(kOperation, "bmm2_scale", tensors.bmm2_scale));
  if (problem.sparse()) return {};
  return check_block_table(kOperation, problem, tensors, lengths);
}

}  // namespace mla
