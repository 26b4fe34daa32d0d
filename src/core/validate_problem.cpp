// [validate] The problem and its options against themselves: everything known before any tensor is.
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/diagnostics.hpp"
#include "core/kv_layout.hpp"
#include "core/stages.hpp"

namespace mla {
namespace {

constexpr const char* kOperation = "plan";
constexpr std::int64_t kWidthMultiple = 16;       // vector kernels step by 16 values
constexpr std::int64_t kMaxWidth = 1 << 16;       // far above any model; keeps products small
constexpr std::int64_t kMaxThreads = 4096;
constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

Status check_range(const char* argument, std::int64_t found, std::int64_t lowest,
                   std::int64_t highest) {
  if (found >= lowest && found <= highest) return {};
  return bad_argument(kOperation, argument, found, text(lowest, " to ", highest));
}

Status check_width(const char* argument, std::int64_t found, std::int64_t lowest) {
  MLA_RETURN_IF_ERROR(check_range(argument, found, lowest, kMaxWidth));
  if (found % kWidthMultiple == 0) return {};
  return bad_argument(kOperation, argument, found, text("a multiple of ", kWidthMultiple));
}

Status check_shape(const DecodeProblem& problem) {
  MLA_RETURN_IF_ERROR(check_range("num_requests", problem.num_requests, 0, kMaxCount));
  MLA_RETURN_IF_ERROR(check_range("num_tokens", problem.num_tokens, 0, kMaxCount));
  MLA_RETURN_IF_ERROR(check_range("num_heads", problem.num_heads, 1, kMaxCount));
  MLA_RETURN_IF_ERROR(check_width("kv_lora_rank", problem.kv_lora_rank, kWidthMultiple));
  MLA_RETURN_IF_ERROR(check_width("qk_rope_head_dim", problem.qk_rope_head_dim, 0));
  MLA_RETURN_IF_ERROR(check_range("page_size", problem.page_size, 1, kMaxCount));
  // Bounds may over-estimate without limit: they are clamped where they size anything.
  constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();
  MLA_RETURN_IF_ERROR(check_range("max_seq_len", problem.max_seq_len, 0, kNoLimit));
  MLA_RETURN_IF_ERROR(check_range("max_query_len", problem.max_query_len, 0, kNoLimit));
  MLA_RETURN_IF_ERROR(check_range("num_indices", problem.num_indices, 0, kMaxCount));
  if (problem.num_tokens > 0 && problem.num_heads > kMaxCount / problem.num_tokens) {
    return bad_argument(kOperation, "num_tokens * num_heads",
                        text(problem.num_tokens, " * ", problem.num_heads),
                        text("at most ", kMaxCount, " rows"));
  }
  return {};
}

Status check_types(const DecodeProblem& problem) {
  switch (problem.q_dtype) {
    case DType::kBF16:
    case DType::kF16:
    case DType::kE4M3: break;
    default: return bad_argument(kOperation, "q_dtype", to_string(problem.q_dtype), "bf16, f16 or e4m3");
  }
  switch (problem.out_dtype) {
    case DType::kNone:
    case DType::kBF16:
    case DType::kF16:
    case DType::kF32: break;
    default: return bad_argument(kOperation, "out_dtype", to_string(problem.out_dtype), "bf16, f16 or f32");
  }
  switch (problem.kv_format) {
    case KvFormat::kBF16:
    case KvFormat::kF16:
    case KvFormat::kE4M3: break;
    case KvFormat::kFp8DsMla:
      if (problem.kv_lora_rank != fp8_ds_mla::kRank || problem.qk_rope_head_dim != fp8_ds_mla::kRope) {
        return bad_argument(kOperation, "kv_lora_rank, qk_rope_head_dim",
                            text(problem.kv_lora_rank, ", ", problem.qk_rope_head_dim),
                            text(fp8_ds_mla::kRank, ", ", fp8_ds_mla::kRope, " for an fp8_ds_mla cache"));
      }
      break;
    default:
      return bad_argument(kOperation, "kv_format", static_cast<int>(problem.kv_format),
                          "bf16, f16, e4m3 or fp8_ds_mla");
  }
  if (problem.lse_base != LseBase::kE && problem.lse_base != LseBase::kTwo) {
    return bad_argument(kOperation, "lse_base", static_cast<int>(problem.lse_base), "e or 2");
  }
  return {};
}

Status check_modes(const DecodeProblem& problem) {
  if (!std::isfinite(problem.logits_soft_cap) || problem.logits_soft_cap < 0) {
    return bad_argument(kOperation, "logits_soft_cap", problem.logits_soft_cap,
                        "a finite number >= 0 (0 is off)");
  }
  MLA_RETURN_IF_ERROR(check_range("sliding_window", problem.sliding_window, 0, kMaxCount));
  MLA_RETURN_IF_ERROR(check_range("cp_world", problem.cp_world, 1, kMaxCount));
  MLA_RETURN_IF_ERROR(check_range("cp_rank", problem.cp_rank, 0, problem.cp_world - 1));
  MLA_RETURN_IF_ERROR(check_range("cp_interleave", problem.cp_interleave, 1, kMaxCount));
  if (problem.sparse()) {
    // An index row names physical slots: the positions that these two modes need are not known.
    if (problem.sliding_window > 0) {
      return bad_argument(kOperation, "sliding_window", problem.sliding_window,
                          "0 in sparse mode, where indices alone choose the keys");
    }
    if (problem.uses_alibi_slopes) {
      return bad_argument(kOperation, "uses_alibi_slopes", "true",
                          "false in sparse mode, where key positions are not known");
    }
  }
  return {};
}

Status check_options(const PlanOptions& options) {
  if (options.device != DeviceKind::kCpu && options.device != DeviceKind::kCuda) {
    return bad_argument(kOperation, "device", static_cast<int>(options.device), "cpu or cuda");
  }
  MLA_RETURN_IF_ERROR(check_range("device_index", options.device_index, 0, kMaxCount));
  MLA_RETURN_IF_ERROR(check_range("num_threads", options.num_threads, 0, kMaxThreads));
  MLA_RETURN_IF_ERROR(check_range("num_splits", options.num_splits, 0, kMaxCount));
  MLA_RETURN_IF_ERROR(check_range("fixed_split", options.fixed_split, 0, kMaxCount));
  if (options.num_splits > 0 && options.fixed_split > 0) {
    return bad_argument(kOperation, "num_splits, fixed_split",
                        text(options.num_splits, ", ", options.fixed_split), "at most one of them");
  }
  return {};
}

}  // namespace

Status validate_problem(const DecodeProblem& problem, const PlanOptions& options) {
  MLA_RETURN_IF_ERROR(check_shape(problem));
  MLA_RETURN_IF_ERROR(check_types(problem));
  MLA_RETURN_IF_ERROR(check_modes(problem));
  return check_options(options);
}

}  // namespace mla
