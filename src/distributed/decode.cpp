// The whole context-parallel call:
//   validate -> agree -> gather queries -> local decode -> exchange -> merge -> output.
#include <cstddef>
#include <exception>
#include <new>

#include "core/backend.hpp"
#include "core/diagnostics.hpp"
#include "core/stages.hpp"
#include "distributed/context_parallel.hpp"

namespace mla {
namespace {

constexpr const char* kOperation = "decode_context_parallel";

/// A failure of this rank alone, once the others wait for its blocks: it must reach them.
Status tell(Communicator& ranks, const Status& mine) {
  if (mine.ok()) return mine;
  const Status reason(mine.code(), text("rank ", ranks.rank(), ": ", mine.message()));
  ranks.abort(reason);
  return reason;
}

Status check_group(const ContextParallelState& state, const Communicator& ranks) {
  const DecodeProblem& problem = state.problem;
  if (ranks.world() == problem.cp_world && ranks.rank() == problem.cp_rank) return {};
  return bad_argument(kOperation, "ranks", text("rank ", ranks.rank(), " of ", ranks.world()),
                      text("rank ", problem.cp_rank, " of ", problem.cp_world, " as planned"));
}

Status check_workspace(const ContextParallelState& state, const void* workspace,
                       std::size_t bytes) {
  if (bytes < state.workspace_bytes) {
    return bad_argument(kOperation, "workspace_bytes", bytes,
                        text("at least ", state.workspace_bytes));
  }
  if (state.workspace_bytes > 0 && workspace == nullptr) {
    return bad_argument(kOperation, "workspace", "a null pointer",
                        text(state.workspace_bytes, " bytes"));
  }
  if (reinterpret_cast<std::uintptr_t>(workspace) % alignof(std::max_align_t) != 0) {
    return bad_argument(kOperation, "workspace", workspace,
                        text("an address aligned to ", alignof(std::max_align_t)));
  }
  return {};
}

/// The caller's q, out and lse have this rank's heads alone.
Status check_own_heads(const ContextParallelCall& call) {
  const ContextParallelState& state = call.state;
  if (state.heads.count == 0) return {};
  DecodeProblem own = state.problem;
  own.num_heads = state.heads.count;
  own.uses_sinks = own.uses_alibi_slopes = false;
  DecodeTensors tensors = call.tensors;
  tensors.sinks = tensors.alibi_slopes = TensorView();
  if (state.options.queries_gathered) {  // q is checked with the local decode
    tensors.q_nope = tensors.q_pe = TensorView();
    tensors.q = TensorView::contiguous(call.workspace, own.q_dtype,
                                       {own.num_tokens, own.num_heads, own.head_dim()});
  }
  return validate_tensors(own, tensors);
}

/// Everything that can be wrong with one rank's arguments.
Status check_call(const ContextParallelCall& call, const Communicator& ranks, std::size_t bytes) {
  const ContextParallelState& state = call.state;
  MLA_RETURN_IF_ERROR(check_group(state, ranks));
  MLA_RETURN_IF_ERROR(check_workspace(state, call.workspace, bytes));
  MLA_RETURN_IF_ERROR(check_own_heads(call));
  DecodeProblem whole = state.problem;
  whole.out_dtype = DType::kF32;
  const DecodeTensors local = call.local_tensors();
  MLA_RETURN_IF_ERROR(validate_tensors(whole, local));
  if (state.local.state().entry->host_readable)
    MLA_RETURN_IF_ERROR(validate_contents(whole, local));
  return {};
}

/// FNV-1a of [0, count) integers; `value(i)` gives one.
template <class Value>
std::int64_t checksum(std::int64_t count, const Value& value) {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (std::int64_t i = 0; i < count; ++i) {
    hash = (hash ^ static_cast<std::uint32_t>(value(i))) * 0x100000001B3U;
  }
  return static_cast<std::int64_t>(hash >> 32U);  // short enough to be read
}

std::int32_t element(const TensorView& view, std::int64_t index) {
  return static_cast<const std::int32_t*>(view.data)[index * view.stride[0]];
}

/// What the call's own arrays must have in common: which tokens are whose, and how long the whole
/// sequences are. A rank that is a step ahead of the others shows here.
std::vector<AgreedField> agreed_contents(const ContextParallelCall& call, const Status& mine) {
  const DecodeProblem& problem = call.state.problem;
  const DecodeTensors& tensors = call.tensors;
  std::vector<AgreedField> fields =
      agreed_fields(problem, call.state.options, static_cast<int>(problem.cp_world));
  if (!mine.ok()) return fields;
  const auto start = [&](std::int64_t b) {
    return tensors.query_start_loc.given()
               ? element(tensors.query_start_loc, b)
               : static_cast<std::int32_t>(b * (problem.num_tokens / problem.num_requests));
  };
  const auto global = [&](std::int64_t b) { return element(tensors.causal_seqlens_kv_global, b); };
  const std::int64_t requests = problem.num_requests;
  const bool has_global = problem.cp_world > 1 && problem.uses_positions() && !problem.sparse();
  fields.push_back(
      {"query_start_loc (checksum)", requests > 0 ? checksum(requests + 1, start) : 0});
  fields.push_back(
      {"causal_seqlens_kv_global (checksum)", has_global ? checksum(requests, global) : 0});
  return fields;
}

Status gather_queries(const ContextParallelCall& call, Communicator& ranks, void* stream) {
  if (call.state.options.queries_gathered) return {};
  pack_queries(call);
  MLA_RETURN_IF_ERROR(ranks.all_gather(call.at(call.state.query_send),
                                       call.at(call.state.query_blocks),
                                       call.state.query_send.bytes, stream));
  order_queries(call);
  return {};
}

Status decode_locally(const ContextParallelCall& call, void* stream) {
  const ContextParallelState& state = call.state;
  DecodeTensors local = call.local_tensors();
  if (!state.local.problem().uses_sinks) local.sinks = TensorView();
  return run(state.local, local, call.at(state.local_workspace), state.local_workspace.bytes,
             stream);
}

Status exchange_all_to_all(const ContextParallelCall& call, Communicator& ranks, void* stream) {
  const ContextParallelState& state = call.state;
  pack_states(call);
  MLA_RETURN_IF_ERROR(ranks.all_to_all(call.at(state.send), call.at(state.receive),
                                       static_cast<std::size_t>(state.chunk) * sizeof(float),
                                       stream));
  return tell(ranks, merge_states(call));
}

Status exchange_gather_reduce(const ContextParallelCall& call, Communicator& ranks, void* stream) {
  const ContextParallelState& state = call.state;
  MLA_RETURN_IF_ERROR(
      ranks.all_gather(call.at(state.lse), call.at(state.lse_gathered), state.lse.bytes, stream));
  weigh_states(call);
  MLA_RETURN_IF_ERROR(ranks.reduce_scatter(call.floats(state.send), call.floats(state.receive),
                                           static_cast<std::size_t>(state.chunk), stream));
  write_reduced(call);
  return {};
}

Status decode_agreed(const ContextParallelCall& call, Communicator& ranks, void* stream) {
  MLA_RETURN_IF_ERROR(gather_queries(call, ranks, stream));
  MLA_RETURN_IF_ERROR(tell(ranks, decode_locally(call, stream)));
  return call.state.strategy == CpStrategy::kAllToAll ? exchange_all_to_all(call, ranks, stream)
                                                      : exchange_gather_reduce(call, ranks, stream);
}

Status decode(const ContextParallelCall& call, Communicator& ranks, std::size_t bytes,
              void* stream) {
  const ContextParallelOptions& options = call.state.options;
  const Status mine = check_call(call, ranks, bytes);
  MLA_RETURN_IF_ERROR(options.agree_each_call
                          ? agree(ranks, kOperation, mine, agreed_contents(call, mine))
                          : tell(ranks, mine));
  return decode_agreed(call, ranks, stream);
}

}  // namespace

Status decode_context_parallel(const ContextParallelPlan& plan, Communicator& ranks,
                               const DecodeTensors& tensors, void* workspace,
                               std::size_t workspace_bytes, void* stream) {
  Status failed;
  try {
    const ContextParallelCall call{plan.state(), tensors, static_cast<std::byte*>(workspace)};
    return decode(call, ranks, workspace_bytes, stream);
  } catch (const std::bad_alloc&) {
    failed = Status(StatusCode::kOutOfMemory, text(kOperation, ": out of host memory"));
  } catch (const std::exception& error) {
    failed = Status(StatusCode::kInternal, text(kOperation, ": ", error.what()));
  }
  return tell(ranks, failed);
}

}  // namespace mla
