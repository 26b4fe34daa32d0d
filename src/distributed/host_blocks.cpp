// Packing, merging and unpacking of what ranks exchange, in host memory. Plain loops: each touches
// a byte once, next to a decode that reads the whole cache.
#include <cstring>
#include <vector>

#include "core/element.hpp"
#include "core/lse.hpp"
#include "distributed/context_parallel.hpp"
#include "mla/merge.hpp"

namespace mla {
namespace {

constexpr float kLn2 = 0.69314718055994530942F;

/// Where head `head` of token `token` lies in a [T,block,width] block.
std::int64_t block_row(const ContextParallelState& state, std::int64_t token, std::int64_t head) {
  return token * state.block + head;
}

void copy_row(std::byte* to, const TensorView& from, std::int64_t token, std::int64_t head) {
  if (from.given() && from.shape[2] > 0) {
    std::memcpy(to, row_address(from, token, head),
                static_cast<std::size_t>(from.shape[2]) * dtype_bytes(from.dtype));
  }
}

/// The merge of one row's states, by the lse that every rank gathered.
struct GatheredRow {
  MergedLse<float> merged;
  float lse = 0;     ///< in the problem's base
  float weight = 0;  ///< this rank's, unnormalised
};

class GatheredLse {
 public:
  explicit GatheredLse(const ContextParallelCall& call)
      : problem_(call.state.problem),
        gathered_(call.floats(call.state.lse_gathered)),
        to_natural_(problem_.lse_base == LseBase::kTwo ? kLn2 : 1.0F),
        lses_(static_cast<std::size_t>(problem_.cp_world)),
        weights_(lses_.size()) {}

  GatheredRow row(std::int64_t token, std::int64_t head) {
    for (std::int64_t r = 0; r < problem_.cp_world; ++r) {
      lses_[static_cast<std::size_t>(r)] = given(r, token, head) * to_natural_;
    }
    GatheredRow row;
    row.merged = merge_weights(lses_.data(), problem_.cp_world, weights_.data());
    // A single real state keeps its lse bit for bit.
    row.lse = row.merged.only_real >= 0 ? given(row.merged.only_real, token, head)
                                        : row.merged.lse / to_natural_;
    row.weight = weights_[static_cast<std::size_t>(problem_.cp_rank)];
    return row;
  }

 private:
  float given(std::int64_t rank, std::int64_t token, std::int64_t head) const {
    return gathered_[(rank * problem_.num_tokens + token) * problem_.num_heads + head];
  }

  const DecodeProblem& problem_;
  const float* gathered_;
  float to_natural_;
  std::vector<float> lses_, weights_;
};

}  // namespace

DecodeTensors ContextParallelCall::local_tensors() const noexcept {
  const DecodeProblem& problem = state.problem;
  DecodeTensors local = tensors;
  if (!state.options.queries_gathered) {
    local.q_nope = local.q_pe = TensorView();
    local.q = TensorView::contiguous(at(state.query), problem.q_dtype,
                                     {problem.num_tokens, problem.num_heads, problem.head_dim()});
  }
  local.out = TensorView::contiguous(at(state.out), DType::kF32,
                                     {problem.num_tokens, problem.num_heads, problem.kv_lora_rank});
  local.lse =
      TensorView::contiguous(at(state.lse), DType::kF32, {problem.num_tokens, problem.num_heads});
  return local;
}

void pack_queries(const ContextParallelCall& call) {
  const ContextParallelState& state = call.state;
  const DecodeProblem& problem = state.problem;
  const std::size_t element = dtype_bytes(problem.q_dtype);
  const std::size_t row_bytes = static_cast<std::size_t>(problem.head_dim()) * element;
  for (std::int64_t token = 0; token < problem.num_tokens; ++token) {
    for (std::int64_t head = 0; head < state.heads.count; ++head) {
      std::byte* to = call.at(state.query_send) +
                      static_cast<std::size_t>(block_row(state, token, head)) * row_bytes;
      copy_row(to, call.tensors.q, token, head);
      copy_row(to, call.tensors.q_nope, token, head);
      copy_row(to + static_cast<std::size_t>(problem.kv_lora_rank) * element, call.tensors.q_pe,
               token, head);
    }
  }
}

void order_queries(const ContextParallelCall& call) {
  const ContextParallelState& state = call.state;
  const DecodeProblem& problem = state.problem;
  const std::size_t row_bytes =
      static_cast<std::size_t>(problem.head_dim()) * dtype_bytes(problem.q_dtype);
  for (std::int64_t r = 0; r < problem.cp_world; ++r) {
    const HeadRange heads = rank_heads(problem.num_heads, problem.cp_world, r);
    for (std::int64_t token = 0; token < problem.num_tokens && heads.count > 0; ++token) {
      const std::int64_t from = r * problem.num_tokens * state.block + block_row(state, token, 0);
      const std::int64_t to = token * problem.num_heads + heads.begin;
      std::memcpy(call.at(state.query) + static_cast<std::size_t>(to) * row_bytes,
                  call.at(state.query_blocks) + static_cast<std::size_t>(from) * row_bytes,
                  static_cast<std::size_t>(heads.count) * row_bytes);
    }
  }
}

void pack_states(const ContextParallelCall& call) {
  const ContextParallelState& state = call.state;
  const DecodeProblem& problem = state.problem;
  const std::int64_t width = problem.kv_lora_rank;
  for (std::int64_t r = 0; r < problem.cp_world; ++r) {
    const HeadRange heads = rank_heads(problem.num_heads, problem.cp_world, r);
    float* out = call.floats(state.send) + r * state.chunk;
    float* lse = out + problem.num_tokens * state.block * width;
    for (std::int64_t token = 0; token < problem.num_tokens && heads.count > 0; ++token) {
      const std::int64_t from = token * problem.num_heads + heads.begin;
      const std::int64_t to = block_row(state, token, 0);
      std::memcpy(out + to * width, call.floats(state.out) + from * width,
                  static_cast<std::size_t>(heads.count * width) * sizeof(float));
      std::memcpy(lse + to, call.floats(state.lse) + from,
                  static_cast<std::size_t>(heads.count) * sizeof(float));
    }
  }
}

Status merge_states(const ContextParallelCall& call) {
  const ContextParallelState& state = call.state;
  const DecodeProblem& problem = state.problem;
  const std::int64_t width = problem.kv_lora_rank;
  if (state.heads.count == 0) return {};
  std::vector<AttentionState> states(static_cast<std::size_t>(problem.cp_world));
  for (std::int64_t r = 0; r < problem.cp_world; ++r) {
    const float* out = call.floats(state.receive) + r * state.chunk;
    AttentionState& from = states[static_cast<std::size_t>(r)];
    from.out = TensorView::contiguous(out, DType::kF32, {problem.num_tokens, state.block, width});
    from.lse = TensorView::contiguous(out + problem.num_tokens * state.block * width, DType::kF32,
                                      {problem.num_tokens, state.block});
    from.out.shape[1] = from.lse.shape[1] = state.heads.count;
  }
  AttentionState merged{call.tensors.out, call.tensors.lse};
  if (!merged.lse.given()) {  // the local lse has been sent: its place is free
    merged.lse = TensorView::contiguous(call.at(state.lse), DType::kF32,
                                        {problem.num_tokens, state.heads.count});
  }
  return merge(states.data(), problem.cp_world, merged, problem.lse_base);
}

void weigh_states(const ContextParallelCall& call) {
  const ContextParallelState& state = call.state;
  const DecodeProblem& problem = state.problem;
  const std::int64_t width = problem.kv_lora_rank;
  GatheredLse gathered(call);
  for (std::int64_t r = 0; r < problem.cp_world; ++r) {
    const HeadRange heads = rank_heads(problem.num_heads, problem.cp_world, r);
    float* chunk = call.floats(state.send) + r * state.chunk;
    for (std::int64_t token = 0; token < problem.num_tokens; ++token) {
      for (std::int64_t head = 0; head < heads.count; ++head) {
        const GatheredRow row = gathered.row(token, heads.begin + head);
        const float share = row.weight == 0.0F ? 0.0F : row.weight / row.merged.sum;
        const float* out =
            call.floats(state.out) + (token * problem.num_heads + heads.begin + head) * width;
        float* to = chunk + block_row(state, token, head) * width;
        // An empty state may hold NaN.
        for (std::int64_t d = 0; d < width; ++d) to[d] = share == 0.0F ? 0.0F : share * out[d];
      }
    }
  }
}

void write_reduced(const ContextParallelCall& call) {
  const ContextParallelState& state = call.state;
  const DecodeProblem& problem = state.problem;
  const TensorView& out = call.tensors.out;
  GatheredLse gathered(call);
  for (std::int64_t token = 0; token < problem.num_tokens; ++token) {
    for (std::int64_t head = 0; head < state.heads.count; ++head) {
      const float* from =
          call.floats(state.receive) + block_row(state, token, head) * problem.kv_lora_rank;
      store_row(row_address(out, token, head), out.dtype, problem.kv_lora_rank, from);
      if (!call.tensors.lse.given()) continue;
      store_element(row_address(call.tensors.lse, token, head), DType::kF32, 0,
                    gathered.row(token, state.heads.begin + head).lse);
    }
  }
}

}  // namespace mla
