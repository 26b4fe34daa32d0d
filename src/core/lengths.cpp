// Resolves a batch's length arrays: which tokens a request has and which keys each of them sees.
#include "core/split.hpp"

namespace mla {
namespace {

const std::int32_t* int32_data(const TensorView& view) noexcept {
  return view.given() ? static_cast<const std::int32_t*>(view.data) : nullptr;
}

}  // namespace

BatchLengths batch_lengths(const DecodeTensors& tensors) noexcept {
  return {int32_data(tensors.seq_lens), int32_data(tensors.query_start_loc),
          int32_data(tensors.causal_seqlens_kv_global)};
}

std::int64_t num_planned_requests(const DecodeProblem& problem) noexcept {
  return problem.sparse() ? problem.num_tokens : problem.num_requests;
}

RequestShape request_shape(const DecodeProblem& problem, const BatchLengths& lengths,
                           std::int64_t request) noexcept {
  RequestShape shape;
  if (problem.sparse()) {
    // Every token is a request of its own; the padding rows behind the last request have no keys.
    const std::int64_t num_real = lengths.query_start_loc != nullptr
                                      ? lengths.query_start_loc[problem.num_requests]
                                      : problem.num_tokens;
    shape.first_token = request;
    shape.num_tokens = 1;
    shape.seq_len = request < num_real ? problem.num_indices : 0;
    shape.global_len = shape.seq_len;
    return shape;
  }
  if (lengths.query_start_loc != nullptr) {
    shape.first_token = lengths.query_start_loc[request];
    shape.num_tokens = lengths.query_start_loc[request + 1] - shape.first_token;
  } else {
    shape.num_tokens = problem.num_tokens / problem.num_requests;
    shape.first_token = request * shape.num_tokens;
  }
  shape.seq_len = lengths.seq_lens[request];
  shape.global_len = problem.cp_world > 1 && lengths.causal_seqlens_kv_global != nullptr
                         ? lengths.causal_seqlens_kv_global[request]
                         : shape.seq_len;
  return shape;
}

KeyRange token_keys(const DecodeProblem& problem, const RequestShape& shape,
                    std::int64_t i) noexcept {
  if (problem.sparse()) return {0, shape.seq_len};
  return visible_keys(cp_layout(problem), shape.seq_len, shape.position(i), problem.causal,
                      problem.sliding_window);
}

}  // namespace mla
