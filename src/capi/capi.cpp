// The C interface: convert, call, catch everything, return a code.
#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "mla/decode.hpp"
#include "mla/merge.hpp"
#include "mla/mla.h"

struct mla_plan {
  mla::DecodePlan plan;
};

namespace {

thread_local std::string last_error;

/// Keeps a failure's sentence for mla_last_error. Never throws: a lost message is not a lost status.
mla_status report(const mla::Status& status) noexcept {
  try {
    last_error = status.message();
  } catch (...) {
    last_error.clear();
  }
  return static_cast<mla_status>(status.code());
}

template <class Function>
mla_status guarded(const char* operation, Function&& function) noexcept {
  try {
    return report(function());
  } catch (const std::bad_alloc&) {
    return report({mla::StatusCode::kOutOfMemory, "out of host memory"});
  } catch (const std::exception& error) {
    return report({mla::StatusCode::kInternal, std::string(operation) + ": " + error.what()});
  } catch (...) {
    return report({mla::StatusCode::kInternal, "unknown exception"});
  }
}

mla::Status invalid(const char* operation, const char* argument, const std::string& found,
                    const std::string& needed) {
  return {mla::StatusCode::kInvalidArgument, std::string(operation) + ": " + argument + ": found " +
                                                 found + ", needed " + needed};
}

/// Reads a sized struct of this or an older version: fields the caller does not know keep `defaults`.
template <class Struct>
mla::Status read_sized(const char* operation, const char* argument, const Struct* given,
                       Struct& value) {
  if (given == nullptr) return invalid(operation, argument, "a null pointer", "a struct");
  const std::size_t size = given->struct_size;
  if (size < sizeof(size) || size > sizeof(Struct)) {
    return invalid(operation, argument, "struct_size " + std::to_string(size),
                   std::to_string(sizeof(Struct)) + " or an older version's, from its initialiser");
  }
  std::memcpy(static_cast<void*>(&value), given, size);
  return {};
}

mla::Status convert(const mla_problem* given, mla::DecodeProblem& problem) {
  mla_problem c = MLA_PROBLEM_INIT;
  if (mla::Status status = read_sized("plan", "problem", given, c); !status.ok()) return status;
  problem.num_requests = c.num_requests;
  problem.num_tokens = c.num_tokens;
  problem.num_heads = c.num_heads;
  problem.kv_lora_rank = c.kv_lora_rank;
  problem.qk_rope_head_dim = c.qk_rope_head_dim;
  problem.page_size = c.page_size;
  problem.max_seq_len = c.max_seq_len;
  problem.max_query_len = c.max_query_len;
  problem.num_indices = c.num_indices;
  problem.q_dtype = static_cast<mla::DType>(c.q_dtype);
  problem.kv_format = static_cast<mla::KvFormat>(c.kv_format);
  problem.out_dtype = static_cast<mla::DType>(c.out_dtype);
  problem.causal = c.causal != 0;
  problem.logits_soft_cap = c.logits_soft_cap;
  problem.sliding_window = c.sliding_window;
  problem.uses_sinks = c.uses_sinks != 0;
  problem.uses_alibi_slopes = c.uses_alibi_slopes != 0;
  problem.lse_base = static_cast<mla::LseBase>(c.lse_base);
  problem.cp_world = c.cp_world;
  problem.cp_rank = c.cp_rank;
  problem.cp_interleave = c.cp_interleave;
  return {};
}

mla::Status convert(const mla_plan_options* given, mla::PlanOptions& options) {
  if (given == nullptr) return {};
  mla_plan_options c = MLA_PLAN_OPTIONS_INIT;
  if (mla::Status status = read_sized("plan", "options", given, c); !status.ok()) return status;
  options.device = static_cast<mla::DeviceKind>(c.device);
  options.device_index = c.device_index;
  if (c.backend != nullptr) options.backend = c.backend;
  options.num_threads = c.num_threads;
  options.num_splits = c.num_splits;
  options.fixed_split = c.fixed_split;
  return {};
}

/// Ranks outside 0..4 are cut to them: no tensor of a call has rank 4, so validation refuses the view.
mla::TensorView convert(const mla_tensor& c) {
  mla::TensorView view;
  view.data = c.data;
  view.dtype = static_cast<mla::DType>(c.dtype);
  view.rank = std::clamp(c.rank, 0, static_cast<int32_t>(mla::TensorView::kMaxRank));
  std::copy_n(c.shape, mla::TensorView::kMaxRank, view.shape);
  std::copy_n(c.stride, mla::TensorView::kMaxRank, view.stride);
  return view;
}

mla::Scale convert(const mla_scale& c) {
  mla::Scale scale(c.value);
  scale.pointer = c.pointer;
  return scale;
}

mla::DecodeTensors convert(const mla_tensors& c) {
  mla::DecodeTensors tensors;
  tensors.q = convert(c.q);
  tensors.q_nope = convert(c.q_nope);
  tensors.q_pe = convert(c.q_pe);
  tensors.kv_cache = convert(c.kv_cache);
  tensors.block_table = convert(c.block_table);
  tensors.seq_lens = convert(c.seq_lens);
  tensors.query_start_loc = convert(c.query_start_loc);
  tensors.causal_seqlens_kv_global = convert(c.causal_seqlens_kv_global);
  tensors.sinks = convert(c.sinks);
  tensors.alibi_slopes = convert(c.alibi_slopes);
  tensors.indices = convert(c.indices);
  tensors.out = convert(c.out);
  tensors.lse = convert(c.lse);
  tensors.bmm1_scale = convert(c.bmm1_scale);
  tensors.bmm2_scale = convert(c.bmm2_scale);
  return tensors;
}

}  // namespace

void mla_tensors_init(mla_tensors* tensors) {
  if (tensors == nullptr) return;
  *tensors = mla_tensors{};
  tensors->struct_size = sizeof(mla_tensors);
  tensors->bmm1_scale.value = mla::Scale().value;
  tensors->bmm2_scale.value = 1.0F;
}

mla_tensor mla_contiguous(const void* data, int32_t dtype, int32_t rank, const int64_t* shape) {
  mla_tensor tensor{};
  tensor.data = const_cast<void*>(data);
  tensor.dtype = dtype;
  tensor.rank = rank;
  if (shape == nullptr || rank < 0 || rank > mla::TensorView::kMaxRank) {
    tensor.rank = 0;  // refused by every call that uses it
    return tensor;
  }
  int64_t stride = 1;
  for (int32_t axis = rank - 1; axis >= 0; --axis) {
    tensor.shape[axis] = shape[axis];
    tensor.stride[axis] = stride;
    stride *= shape[axis];
  }
  return tensor;
}

mla_status mla_plan_create(const mla_problem* problem, const mla_plan_options* options,
                           mla_plan** plan) {
  return guarded("plan", [&]() -> mla::Status {
    if (plan == nullptr) return invalid("plan", "plan", "a null pointer", "where to put the plan");
    mla::DecodeProblem cxx_problem;
    mla::PlanOptions cxx_options;
    if (mla::Status status = convert(problem, cxx_problem); !status.ok()) return status;
    if (mla::Status status = convert(options, cxx_options); !status.ok()) return status;
    mla::Result<mla::DecodePlan> made = mla::plan(cxx_problem, cxx_options);
    if (!made.ok()) return made.status();
    *plan = new mla_plan{*made};
    return {};
  });
}

void mla_plan_destroy(mla_plan* plan) { delete plan; }

size_t mla_plan_workspace_bytes(const mla_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.workspace_bytes();
}

const char* mla_plan_backend(const mla_plan* plan) {
  return plan == nullptr ? "" : plan->plan.backend_name();
}

mla_status mla_workspace_size(const mla_problem* problem, const mla_plan_options* options,
                              size_t* bytes) {
  return guarded("plan", [&]() -> mla::Status {
    if (bytes == nullptr) return invalid("plan", "bytes", "a null pointer", "where to put the size");
    mla::DecodeProblem cxx_problem;
    mla::PlanOptions cxx_options;
    if (mla::Status status = convert(problem, cxx_problem); !status.ok()) return status;
    if (mla::Status status = convert(options, cxx_options); !status.ok()) return status;
    const mla::Result<std::size_t> size = mla::workspace_size(cxx_problem, cxx_options);
    if (!size.ok()) return size.status();
    *bytes = *size;
    return {};
  });
}

mla_status mla_run(const mla_plan* plan, const mla_tensors* tensors, void* workspace,
                   size_t workspace_bytes, void* stream) {
  return guarded("run", [&]() -> mla::Status {
    if (plan == nullptr) return invalid("run", "plan", "a null pointer", "a plan");
    mla_tensors c;
    mla_tensors_init(&c);
    if (mla::Status status = read_sized("run", "tensors", tensors, c); !status.ok()) return status;
    return mla::run(plan->plan, convert(c), workspace, workspace_bytes, stream);
  });
}

mla_status mla_merge(const mla_tensor* outs, const mla_tensor* lses, int64_t count,
                     const mla_tensor* merged_out, const mla_tensor* merged_lse,
                     int32_t lse_base) {
  return guarded("merge", [&]() -> mla::Status {
    if (outs == nullptr || lses == nullptr || merged_out == nullptr || merged_lse == nullptr) {
      return invalid("merge", "tensors", "a null pointer", "outs, lses, merged_out and merged_lse");
    }
    std::vector<mla::AttentionState> states;
    for (int64_t s = 0; s < count; ++s) states.push_back({convert(outs[s]), convert(lses[s])});
    return mla::merge(states.data(), count, {convert(*merged_out), convert(*merged_lse)},
                      static_cast<mla::LseBase>(lse_base));
  });
}

int32_t mla_num_backends(void) {
  int32_t count = 0;
  guarded("backends", [&]() -> mla::Status {
    count = static_cast<int32_t>(mla::backends().size());
    return {};
  });
  return count;
}

mla_status mla_backend(int32_t index, const char** name, const char** description,
                       const char** reject_reason) {
  static thread_local mla::BackendInfo row;
  return guarded("backends", [&]() -> mla::Status {
    std::vector<mla::BackendInfo> rows = mla::backends();
    if (index < 0 || static_cast<std::size_t>(index) >= rows.size()) {
      return invalid("backends", "index", std::to_string(index),
                     "0 to " + std::to_string(rows.size() - 1));
    }
    row = std::move(rows[static_cast<std::size_t>(index)]);
    if (name != nullptr) *name = row.name.c_str();
    if (description != nullptr) *description = row.description.c_str();
    if (reject_reason != nullptr) *reject_reason = row.reject_reason.c_str();
    return {};
  });
}

const char* mla_status_string(int32_t status) {
  return mla::to_string(static_cast<mla::StatusCode>(status));
}
const char* mla_last_error(void) { return last_error.c_str(); }
const char* mla_version(void) { return mla::version(); }
