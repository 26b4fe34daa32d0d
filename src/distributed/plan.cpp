// [plan] Context-parallel plans: checks, strategy, workspace.
#include <cstring>
#include <new>

#include "core/diagnostics.hpp"
#include "distributed/context_parallel.hpp"

namespace mla {
namespace {

constexpr const char* kOperation = "plan_context_parallel";
constexpr std::size_t kRegionAlignment = 256;  // what CUDA workspaces need

Status check_group(const DecodeProblem& problem, const Communicator& ranks,
                   const ContextParallelOptions& options) {
  if (problem.cp_world != ranks.world()) {
    return bad_argument(kOperation, "cp_world", problem.cp_world,
                        text(ranks.world(), ", the group's"));
  }
  if (problem.cp_rank != ranks.rank()) {
    return bad_argument(kOperation, "cp_rank", problem.cp_rank,
                        text(ranks.rank(), ", the group's"));
  }
  if (options.strategy < CpStrategy::kAuto || options.strategy > CpStrategy::kAllToAll) {
    return bad_argument(kOperation, "strategy", static_cast<int>(options.strategy),
                        "auto, ag_rs or a2a");
  }
  const bool on_device = options.local.device == DeviceKind::kCuda;
  if (on_device != ranks.on_device()) {
    return bad_argument(
        kOperation, "local.device", on_device ? "cuda" : "cpu",
        text(ranks.on_device() ? "cuda" : "cpu", ": the memory of a ", ranks.name(), " group"));
  }
  if (on_device) {
    return {StatusCode::kUnsupported,
            text(kOperation, ": local.device: found cuda, needed cpu: groups ",
                 "over device memory are not built")};
  }
  constexpr std::int64_t kMaxRows = std::int64_t{1} << 31;
  if (problem.num_tokens > 0 && problem.cp_world > kMaxRows / problem.num_tokens) {
    return bad_argument(kOperation, "num_tokens * cp_world",
                        text(problem.num_tokens, " * ", problem.cp_world),
                        text("at most ", kMaxRows));
  }
  return {};
}

/// All heads over this rank's keys. The result stays f32 until it is merged, and the sink counts
/// once.
DecodeProblem local_problem(DecodeProblem problem) {
  problem.out_dtype = DType::kF32;
  if (problem.cp_rank != 0) problem.uses_sinks = false;
  return problem;
}

/// Both move the same bytes. The all-to-all waits once instead of twice and keeps W partial results
/// of a head on the rank that merges them; the reduction needs the memory of one.
CpStrategy choose_strategy(const ContextParallelState& state) {
  if (state.options.strategy != CpStrategy::kAuto) return state.options.strategy;
  constexpr std::int64_t kLargestChunk = std::int64_t{1} << 22;  // f32 values: 16 MiB a rank
  const std::int64_t values =
      state.problem.num_tokens * state.block * (state.problem.kv_lora_rank + 1);
  return values <= kLargestChunk ? CpStrategy::kAllToAll : CpStrategy::kGatherReduce;
}

void lay_out(ContextParallelState& state) {
  const DecodeProblem& problem = state.problem;
  const auto size = [](std::int64_t elements, DType dtype) {
    return static_cast<std::size_t>(elements) * dtype_bytes(dtype);
  };
  const auto place = [&state](Region& region, std::size_t bytes) {
    region = {state.workspace_bytes, bytes};
    state.workspace_bytes += (bytes + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
  };
  const std::int64_t world = problem.cp_world;
  const std::int64_t rows = problem.num_tokens * problem.num_heads;
  const std::int64_t block_rows = problem.num_tokens * state.block;
  if (!state.options.queries_gathered) {
    const std::size_t query_block = size(block_rows * problem.head_dim(), problem.q_dtype);
    place(state.query_send, query_block);
    place(state.query_blocks, static_cast<std::size_t>(world) * query_block);
    place(state.query, size(rows * problem.head_dim(), problem.q_dtype));
  }
  const bool all_to_all = state.strategy == CpStrategy::kAllToAll;
  state.chunk = block_rows * (problem.kv_lora_rank + (all_to_all ? 1 : 0));
  state.chunk = (state.chunk + 3) / 4 * 4;  // 16-byte rows for vector loads
  place(state.out, size(rows * problem.kv_lora_rank, DType::kF32));
  place(state.lse, size(rows, DType::kF32));
  place(state.send, size(world * state.chunk, DType::kF32));
  place(state.receive, size((all_to_all ? world : 1) * state.chunk, DType::kF32));
  if (!all_to_all) place(state.lse_gathered, size(world * rows, DType::kF32));
  place(state.local_workspace, state.local.workspace_bytes());
}

Result<ContextParallelPlan> make_plan(const DecodeProblem& problem, const Communicator& ranks,
                                      const ContextParallelOptions& options) {
  MLA_RETURN_IF_ERROR(check_group(problem, ranks, options));
  Result<DecodePlan> local = plan(local_problem(problem), options.local);
  if (!local.ok()) return local.status();
  const HeadRange heads = rank_heads(problem.num_heads, problem.cp_world, problem.cp_rank);
  const std::int64_t block = rank_heads(problem.num_heads, problem.cp_world, 0).count;
  auto state = std::make_shared<ContextParallelState>(ContextParallelState{problem,
                                                                           options,
                                                                           options.strategy,
                                                                           heads,
                                                                           block,
                                                                           0,
                                                                           *local,
                                                                           {},
                                                                           {},
                                                                           {},
                                                                           {},
                                                                           {},
                                                                           {},
                                                                           {},
                                                                           {},
                                                                           {},
                                                                           0});
  state->strategy = choose_strategy(*state);
  lay_out(*state);
  return ContextParallelPlan(std::move(state));
}

std::int64_t bits_of(float value) {
  std::int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

}  // namespace

std::vector<AgreedField> agreed_fields(const DecodeProblem& problem,
                                       const ContextParallelOptions& options, int world) {
  return {{"world", world},
          {"num_requests", problem.num_requests},
          {"num_tokens", problem.num_tokens},
          {"num_heads", problem.num_heads},
          {"kv_lora_rank", problem.kv_lora_rank},
          {"qk_rope_head_dim", problem.qk_rope_head_dim},
          {"num_indices", problem.num_indices},
          {"q_dtype", static_cast<std::int64_t>(problem.q_dtype)},
          {"kv_format", static_cast<std::int64_t>(problem.kv_format)},
          {"out_dtype", static_cast<std::int64_t>(problem.resolved_out_dtype())},
          {"causal", problem.causal},
          {"logits_soft_cap bits", bits_of(problem.logits_soft_cap)},
          {"sliding_window", problem.sliding_window},
          {"uses_sinks", problem.uses_sinks},
          {"uses_alibi_slopes", problem.uses_alibi_slopes},
          {"cp_interleave", problem.cp_interleave},
          {"lse_base", static_cast<std::int64_t>(problem.lse_base)},
          {"strategy", static_cast<std::int64_t>(options.strategy)},
          {"queries_gathered", options.queries_gathered},
          {"agree_each_call", options.agree_each_call}};
}

const char* to_string(CpStrategy strategy) noexcept {
  switch (strategy) {
    case CpStrategy::kAuto: return "auto";
    case CpStrategy::kGatherReduce: return "ag_rs";
    case CpStrategy::kAllToAll: return "a2a";
  }
  return "unknown";
}

HeadRange rank_heads(std::int64_t num_heads, std::int64_t world, std::int64_t rank) noexcept {
  if (num_heads < 1 || world < 1 || rank < 0 || rank >= world) return {};
  const std::int64_t block = (num_heads - 1) / world + 1;
  if (rank > (num_heads - 1) / block) return {num_heads, 0};
  const std::int64_t begin = rank * block;
  return {begin, num_heads - begin < block ? num_heads - begin : block};
}

const DecodeProblem& ContextParallelPlan::problem() const noexcept {
  return state_->problem;
}
const DecodePlan& ContextParallelPlan::local() const noexcept {
  return state_->local;
}
CpStrategy ContextParallelPlan::strategy() const noexcept {
  return state_->strategy;
}
HeadRange ContextParallelPlan::heads() const noexcept {
  return state_->heads;
}
std::size_t ContextParallelPlan::workspace_bytes() const noexcept {
  return state_->workspace_bytes;
}

std::string ContextParallelPlan::to_string() const {
  return text("strategy=", mla::to_string(strategy()), " heads=", heads().begin, "+", heads().count,
              " workspace_bytes=", workspace_bytes(), " local: ", local().to_string());
}

Result<ContextParallelPlan> plan_context_parallel(const DecodeProblem& problem, Communicator& ranks,
                                                  const ContextParallelOptions& options) {
  try {
    Result<ContextParallelPlan> mine = make_plan(problem, ranks, options);
    const Status agreed = agree(ranks, kOperation, mine.ok() ? Status() : mine.status(),
                                agreed_fields(problem, options, ranks.world()));
    if (!agreed.ok()) return agreed;
    return mine;
  } catch (const std::bad_alloc&) {
    const Status status(StatusCode::kOutOfMemory, text(kOperation, ": out of host memory"));
    ranks.abort(status);
    return status;
  }
}

}  // namespace mla
