// [problem] Names, derived sizes and the printed form of a DecodeProblem.
#include "mla/problem.hpp"

#include <sstream>

#include "core/kv_layout.hpp"

namespace mla {

const char* to_string(KvFormat format) noexcept {
  switch (format) {
    case KvFormat::kBF16: return "bf16";
    case KvFormat::kF16: return "f16";
    case KvFormat::kE4M3: return "e4m3";
    case KvFormat::kFp8DsMla: return "fp8_ds_mla";
  }
  return "unknown";
}

DType kv_dtype(KvFormat format) noexcept {
  switch (format) {
    case KvFormat::kBF16: return DType::kBF16;
    case KvFormat::kF16: return DType::kF16;
    case KvFormat::kE4M3: return DType::kE4M3;
    case KvFormat::kFp8DsMla: return DType::kU8;
  }
  return DType::kNone;
}

std::int64_t kv_row_elements(const DecodeProblem& problem) noexcept {
  return problem.kv_format == KvFormat::kFp8DsMla ? fp8_ds_mla::kTokenBytes : problem.head_dim();
}

std::int64_t kv_page_bytes(const DecodeProblem& problem) noexcept {
  return problem.page_size * kv_row_elements(problem) *
         static_cast<std::int64_t>(dtype_bytes(kv_dtype(problem.kv_format)));
}

std::string to_string(const DecodeProblem& problem) {
  const DecodeProblem defaults;
  std::ostringstream out;
  out << "b=" << problem.num_requests;
  const auto add = [&out](const char* key, const auto& value, const auto& default_value) {
    if (value != default_value) out << ',' << key << '=' << value;
  };
  add("t", problem.num_tokens, problem.num_requests * problem.max_query_len);
  out << ",h=" << problem.num_heads;
  add("l", problem.kv_lora_rank, defaults.kv_lora_rank);
  add("r", problem.qk_rope_head_dim, defaults.qk_rope_head_dim);
  add("page", problem.page_size, defaults.page_size);
  add("maxq", problem.max_query_len, defaults.max_query_len);
  if (!problem.sparse()) out << ",maxlen=" << problem.max_seq_len;
  add("k", problem.num_indices, defaults.num_indices);
  if (problem.q_dtype != defaults.q_dtype) out << ",q=" << to_string(problem.q_dtype);
  if (problem.kv_format != defaults.kv_format) out << ",kv=" << to_string(problem.kv_format);
  if (problem.out_dtype != defaults.out_dtype) out << ",out=" << to_string(problem.out_dtype);
  if (!problem.causal) out << ",causal=0";
  add("cap", problem.logits_soft_cap, defaults.logits_soft_cap);
  add("window", problem.sliding_window, defaults.sliding_window);
  if (problem.uses_sinks) out << ",sinks=1";
  if (problem.uses_alibi_slopes) out << ",alibi=1";
  if (problem.cp_world != 1) {
    out << ",cp=" << problem.cp_world << ':' << problem.cp_rank << ':' << problem.cp_interleave;
  }
  if (problem.lse_base == LseBase::kTwo) out << ",lse=2";
  return out.str();
}

}  // namespace mla
