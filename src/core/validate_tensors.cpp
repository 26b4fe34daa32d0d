// [validate] Shapes, types, strides, pointers and alignment of a call's tensors. Reads no element.
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "core/diagnostics.hpp"
#include "core/stages.hpp"

namespace mla {
namespace {

constexpr const char* kOperation = "run";
constexpr std::int64_t kAny = -1;  // an extent that is free

std::string shape_text(std::initializer_list<std::int64_t> shape) {
  std::string joined = "[";
  for (std::int64_t extent : shape) {
    if (joined.size() > 1) joined += ',';
    joined += extent == kAny ? std::string("any") : std::to_string(extent);
  }
  return joined + "]";
}

std::string shape_text(const TensorView& view) {
  std::string joined = "[";
  for (int axis = 0; axis < view.rank && axis < TensorView::kMaxRank; ++axis) {
    if (axis > 0) joined += ',';
    joined += std::to_string(view.shape[axis]);
  }
  return joined + "]";
}

bool has_elements(const TensorView& view) {
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.shape[axis] == 0) return false;
  }
  return true;
}

std::string stride_text(const TensorView& view) {
  std::string joined;
  for (int axis = 0; axis < view.rank; ++axis) {
    if (axis > 0) joined += ',';
    joined += std::to_string(view.stride[axis]);
  }
  return joined;
}

/// Whether every byte offset inside the tensor, and its number of bytes, is an int64: address
/// arithmetic relies on it.
bool fits_address_space(const TensorView& view) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(view.dtype));
  std::int64_t size = bytes;
  std::int64_t span = bytes;
  for (int axis = 0; axis < view.rank; ++axis) {
    const std::int64_t stride = view.stride[axis];
    std::int64_t step = 0;
    if (__builtin_mul_overflow(size, view.shape[axis], &size)) return false;
    if (__builtin_sub_overflow(0, stride < 0 ? stride : -stride, &step)) return false;
    if (view.shape[axis] == 1) continue;  // this stride is never taken
    if (__builtin_mul_overflow(step, view.shape[axis] - 1, &step)) return false;
    if (__builtin_mul_overflow(step, bytes, &step)) return false;
    if (__builtin_add_overflow(span, step, &span)) return false;
  }
  return true;
}

Status check_tensor(const char* name, const TensorView& view, DType dtype,
                    std::initializer_list<std::int64_t> shape) {
  if (!view.given()) {
    return bad_argument(kOperation, name, "none", text("a ", to_string(dtype), " tensor ", shape_text(shape)));
  }
  if (view.dtype != dtype) {
    return bad_argument(kOperation, text(name, " dtype"), to_string(view.dtype), to_string(dtype));
  }
  bool same = view.rank == static_cast<int>(shape.size());
  int axis = 0;
  for (std::int64_t extent : shape) {
    if (!same) break;
    same = extent == kAny ? view.shape[axis] >= 0 : view.shape[axis] == extent;
    ++axis;
  }
  if (!same) return bad_argument(kOperation, text(name, " shape"), shape_text(view), shape_text(shape));
  if (!has_elements(view)) return {};
  if (view.data == nullptr) return bad_argument(kOperation, name, "a null pointer", "memory");
  if (!fits_address_space(view)) {
    return bad_argument(kOperation, text(name, " strides"), stride_text(view),
                        text("a tensor ", shape_text(view), " inside the address space"));
  }
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  if (address % dtype_bytes(dtype) != 0) {
    return bad_argument(kOperation, text(name, " address"), text("0x", std::hex, address),
                        text("a multiple of ", dtype_bytes(dtype)));
  }
  const int last = view.rank - 1;
  if (view.shape[last] > 1 && view.stride[last] != 1) {
    return bad_argument(kOperation, text(name, " last stride"), view.stride[last], 1);
  }
  return {};
}

/// Rows of an output may lie anywhere but on each other.
Status check_disjoint(const char* name, const TensorView& view, std::int64_t row_elements) {
  const auto magnitude = [](std::int64_t stride) { return stride < 0 ? -stride : stride; };
  std::int64_t outer = magnitude(view.stride[0]);
  std::int64_t inner = magnitude(view.stride[1]);
  std::int64_t num_outer = view.shape[0];
  std::int64_t num_inner = view.shape[1];
  if (outer < inner) {
    std::swap(outer, inner);
    std::swap(num_outer, num_inner);
  }
  const bool inner_ok = num_inner <= 1 || inner >= row_elements;
  const std::int64_t span = num_inner <= 1 ? row_elements : (num_inner - 1) * inner + row_elements;
  if (inner_ok && (num_outer <= 1 || outer >= span)) return {};
  return bad_argument(kOperation, text(name, " strides"), text(view.stride[0], ",", view.stride[1]),
                      "rows that do not overlap");
}

Status check_query(const DecodeProblem& problem, const DecodeTensors& tensors) {
  const std::int64_t num_tokens = problem.num_tokens;
  const std::int64_t num_heads = problem.num_heads;
  if (tensors.q.given()) {
    if (tensors.q_nope.given() || tensors.q_pe.given()) {
      return bad_argument(kOperation, "q", "q together with q_nope or q_pe", "either q or the two parts");
    }
    return check_tensor("q", tensors.q, problem.q_dtype, {num_tokens, num_heads, problem.head_dim()});
  }
  if (!tensors.q_nope.given() && !tensors.q_pe.given()) {
    return bad_argument(kOperation, "q", "none",
                        text("a ", to_string(problem.q_dtype), " tensor ",
                             shape_text({num_tokens, num_heads, problem.head_dim()}), ", or q_nope and q_pe"));
  }
  MLA_RETURN_IF_ERROR(check_tensor("q_nope", tensors.q_nope, problem.q_dtype,
                                   {num_tokens, num_heads, problem.kv_lora_rank}));
  if (problem.qk_rope_head_dim == 0 && !tensors.q_pe.given()) return {};
  return check_tensor("q_pe", tensors.q_pe, problem.q_dtype,
                      {num_tokens, num_heads, problem.qk_rope_head_dim});
}

Status check_keys(const DecodeProblem& problem, const DecodeTensors& tensors) {
  MLA_RETURN_IF_ERROR(check_tensor("kv_cache", tensors.kv_cache, kv_dtype(problem.kv_format),
                                   {kAny, problem.page_size, kv_row_elements(problem)}));
  if (problem.sparse()) {
    return check_tensor("indices", tensors.indices, DType::kI32, {problem.num_tokens, problem.num_indices});
  }
  if (tensors.indices.given()) {
    return bad_argument(kOperation, "indices", shape_text(tensors.indices),
                        "none: the plan is dense (num_indices is 0)");
  }
  MLA_RETURN_IF_ERROR(
      check_tensor("block_table", tensors.block_table, DType::kI32, {problem.num_requests, kAny}));
  return check_tensor("seq_lens", tensors.seq_lens, DType::kI32, {problem.num_requests});
}

Status check_lengths(const DecodeProblem& problem, const DecodeTensors& tensors) {
  if (tensors.query_start_loc.given()) {
    MLA_RETURN_IF_ERROR(check_tensor("query_start_loc", tensors.query_start_loc, DType::kI32,
                                     {problem.num_requests + 1}));
  } else if (problem.num_requests == 0 ? problem.num_tokens != 0
                                       : problem.num_tokens % problem.num_requests != 0) {
    return bad_argument(kOperation, "query_start_loc", "none",
                        text("it, because ", problem.num_tokens, " tokens do not divide among ",
                             problem.num_requests, " requests"));
  }
  const bool needs_global = problem.cp_world > 1 && problem.uses_positions() && !problem.sparse();
  if (!needs_global && !tensors.causal_seqlens_kv_global.given()) return {};
  return check_tensor("causal_seqlens_kv_global", tensors.causal_seqlens_kv_global, DType::kI32,
                      {problem.num_requests});
}

Status check_per_head(const char* name, const TensorView& view, bool planned, std::int64_t num_heads) {
  if (planned) return check_tensor(name, view, DType::kF32, {num_heads});
  if (!view.given()) return {};
  return bad_argument(kOperation, name, shape_text(view), text("none: the plan was made without ", name));
}

Status check_scale(const char* name, const Scale& scale) {
  if (scale.pointer != nullptr || std::isfinite(scale.value)) return {};
  return bad_argument(kOperation, name, scale.value, "a finite factor, or a pointer to one");
}

Status check_outputs(const DecodeProblem& problem, const DecodeTensors& tensors) {
  MLA_RETURN_IF_ERROR(check_tensor("out", tensors.out, problem.resolved_out_dtype(),
                                   {problem.num_tokens, problem.num_heads, problem.kv_lora_rank}));
  MLA_RETURN_IF_ERROR(check_disjoint("out", tensors.out, problem.kv_lora_rank));
  if (!tensors.lse.given()) return {};
  // The head stride is free too, so lse is checked as [T,H,1].
  TensorView rows = tensors.lse;
  if (rows.rank == 2) {
    rows.rank = 3;
    rows.shape[2] = 1;
    rows.stride[2] = 1;
  }
  if (tensors.lse.rank != 2) {
    return bad_argument(kOperation, "lse shape", shape_text(tensors.lse),
                        shape_text({problem.num_tokens, problem.num_heads}));
  }
  MLA_RETURN_IF_ERROR(check_tensor("lse", rows, DType::kF32, {problem.num_tokens, problem.num_heads, 1}));
  return check_disjoint("lse", tensors.lse, 1);
}

}  // namespace

Status validate_inputs(const DecodeProblem& problem, const DecodeTensors& tensors) {
  MLA_RETURN_IF_ERROR(check_query(problem, tensors));
  MLA_RETURN_IF_ERROR(check_keys(problem, tensors));
  MLA_RETURN_IF_ERROR(check_lengths(problem, tensors));
  MLA_RETURN_IF_ERROR(check_per_head("sinks", tensors.sinks, problem.uses_sinks, problem.num_heads));
  MLA_RETURN_IF_ERROR(check_per_head("alibi_slopes", tensors.alibi_slopes, problem.uses_alibi_slopes,
                                     problem.num_heads));
  MLA_RETURN_IF_ERROR(check_scale("bmm1_scale", tensors.bmm1_scale));
  return check_scale("bmm2_scale", tensors.bmm2_scale);
}

Status validate_tensors(const DecodeProblem& problem, const DecodeTensors& tensors) {
  MLA_RETURN_IF_ERROR(validate_inputs(problem, tensors));
  return check_outputs(problem, tensors);
}

}  // namespace mla
