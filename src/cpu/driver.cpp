// Threads, schedule, merge and output of the CPU backends. One parallel region per call:
//
//   schedule (one thread) | each worker runs its splits, then helps others | barrier | merges | padding
//
// A split that holds all keys of its rows writes the output itself; the others leave normalised f32
// partials, merged in key order. Which thread runs a split never changes a bit.
#include "cpu/driver.hpp"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "core/diagnostics.hpp"
#include "core/lse.hpp"
#include "cpu/workspace.hpp"

namespace mla::cpu {
namespace {

constexpr std::int64_t kRowAlignment = 16;

float scale_value(const Scale& scale) noexcept {
  return scale.pointer != nullptr ? *scale.pointer : scale.value;
}

/// One operand's rows, addressed in bytes.
struct RowView {
  std::byte* base = nullptr;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  std::byte* row(std::int64_t token, std::int64_t head) const noexcept {
    return base + token * token_stride + head * head_stride;
  }
};

RowView row_view(const TensorView& view, std::int64_t first_element = 0) noexcept {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(view.dtype));
  return {static_cast<std::byte*>(view.data) + first_element * bytes, view.stride[0] * bytes,
          view.stride[1] * bytes};
}

/// Everything of one call, resolved once.
struct Call {
  Call(const PlanState& plan_state, const KernelTable& kernel_table) noexcept
      : state(plan_state), problem(plan_state.problem), kernels(kernel_table) {}

  const PlanState& state;
  const DecodeProblem& problem;
  const KernelTable& kernels;
  BatchLengths lengths;
  CallView view;
  RowView q_nope, q_pe, out, lse;
  const float* sinks = nullptr;
  const float* alibi_slopes = nullptr;
  float bmm2_scale = 1.0F;
  DType out_dtype = DType::kBF16;
  Schedule schedule;
  NextSplit* next_split = nullptr;
  float* partial_out = nullptr;
  float* partial_lse = nullptr;
};

CallView call_view(const DecodeProblem& problem, const DecodeTensors& tensors) noexcept {
  const TensorView& cache = tensors.kv_cache;
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  CallView view;
  view.num_heads = problem.num_heads;
  view.kv_lora_rank = problem.kv_lora_rank;
  view.qk_rope_head_dim = problem.qk_rope_head_dim;
  view.q_dtype = problem.q_dtype;
  view.kv_format = problem.kv_format;
  view.kv = {static_cast<const std::byte*>(cache.data), cache.shape[0], problem.page_size,
             cache.stride[0] * bytes, cache.stride[1] * bytes};
  if (problem.sparse()) {
    view.indices = static_cast<const std::int32_t*>(tensors.indices.data);
    view.indices_stride = tensors.indices.stride[0];
  } else {
    view.block_table = static_cast<const std::int32_t*>(tensors.block_table.data);
    view.block_table_stride = tensors.block_table.stride[0];
  }
  view.bmm1_scale = scale_value(tensors.bmm1_scale);
  view.logits_soft_cap = problem.logits_soft_cap;
  view.cp = cp_layout(problem);
  view.uses_alibi_slopes = problem.uses_alibi_slopes;
  return view;
}

Call make_call(const PlanState& state, const KernelTable& kernels, const DecodeTensors& tensors,
               const WorkspaceMap& map, std::byte* workspace) noexcept {
  const DecodeProblem& problem = state.problem;
  Call call(state, kernels);
  call.lengths = batch_lengths(tensors);
  call.view = call_view(problem, tensors);
  if (tensors.q.given()) {
    call.q_nope = row_view(tensors.q);
    call.q_pe = row_view(tensors.q, problem.kv_lora_rank);
  } else {
    call.q_nope = row_view(tensors.q_nope);
    if (tensors.q_pe.given()) call.q_pe = row_view(tensors.q_pe);
  }
  call.out = row_view(tensors.out);
  if (tensors.lse.given()) call.lse = row_view(tensors.lse);
  if (problem.uses_sinks) call.sinks = static_cast<const float*>(tensors.sinks.data);
  if (problem.uses_alibi_slopes) {
    call.alibi_slopes = static_cast<const float*>(tensors.alibi_slopes.data);
  }
  call.bmm2_scale = scale_value(tensors.bmm2_scale);
  call.out_dtype = problem.resolved_out_dtype();
  call.schedule.splits = reinterpret_cast<Split*>(workspace + map.splits);
  call.schedule.worker_begin = reinterpret_cast<std::int32_t*>(workspace + map.worker_begin);
  call.schedule.merges = reinterpret_cast<MergeTask*>(workspace + map.merges);
  call.next_split = reinterpret_cast<NextSplit*>(workspace + map.next_split);
  call.partial_out = reinterpret_cast<float*>(workspace + map.partial_out);
  call.partial_lse = reinterpret_cast<float*>(workspace + map.partial_lse);
  return call;
}

/// Output of one finished row: the sink joins the denominator, the value scale joins the result.
void store_output(const Call& call, std::int64_t token, std::int64_t head, const float* value,
                  float lse) noexcept {
  float weight = 1.0F;
  if (call.sinks != nullptr) {
    const MergeWeights<float> weights = merge_weights(lse, call.sinks[head]);
    weight = weights.weight_a;
    lse = weights.lse;
  }
  std::byte* out = call.out.row(token, head);
  const std::int64_t rank = call.problem.kv_lora_rank;
  if (weight == 0.0F || lse == empty_lse<float>()) {
    std::fill_n(out, rank * static_cast<std::int64_t>(dtype_bytes(call.out_dtype)), std::byte{0});
  } else {
    call.kernels.store_row(value, weight * call.bmm2_scale, rank, call.out_dtype, out);
  }
  if (call.lse.base == nullptr) return;
  constexpr float kLog2E = 1.44269504088896340736F;
  if (call.problem.lse_base == LseBase::kTwo) lse *= kLog2E;
  *reinterpret_cast<float*>(call.lse.row(token, head)) = lse;
}

/// The memory of the thread that runs a split.
struct WorkerArea {
  float* rows_out;
  float* rows_lse;
  float* fold_out;
  float* fold_lse;
  std::byte* scratch;
};

WorkerArea worker_area(const WorkspaceMap& map, std::byte* workspace, int thread) noexcept {
  std::byte* area = workspace + map.workers + static_cast<std::size_t>(thread) * map.worker_bytes;
  return {reinterpret_cast<float*>(area + map.rows_out), reinterpret_cast<float*>(area + map.rows_lse),
          reinterpret_cast<float*>(area + map.fold_out), reinterpret_cast<float*>(area + map.fold_lse),
          area + map.scratch};
}

/// One split's rows, cut to its keys. Rows of a token share their keys.
SplitJob make_job(const Call& call, const Split& split, const RequestShape& shape, KeyRange keys,
                  SplitRow* rows) noexcept {
  const std::int64_t num_heads = call.problem.num_heads;
  SplitJob job;
  job.rows = rows;
  job.num_rows = split.row_end - split.row_begin;
  job.request = split.request;
  job.key_begin = keys.end;
  job.key_end = keys.begin;
  // In fixed_split mode a row's arithmetic may depend on the number of heads, not on how many tokens
  // happen to share its block.
  job.few_rows = (call.state.options.fixed_split > 0 ? num_heads : job.num_rows) <= kFewRows;
  std::int64_t last_token = -1;
  KeyRange seen;
  for (std::int64_t r = 0; r < job.num_rows; ++r) {
    const std::int64_t token = (split.row_begin + r) / num_heads;
    const std::int64_t head = (split.row_begin + r) % num_heads;
    if (token != last_token) {
      last_token = token;
      seen = token_keys(call.problem, shape, token);
      seen.begin = std::max(seen.begin, keys.begin);
      seen.end = std::min(seen.end, keys.end);
      if (seen.empty()) seen = {};
      if (!seen.empty()) {
        job.key_begin = std::min(job.key_begin, seen.begin);
        job.key_end = std::max(job.key_end, seen.end);
      }
    }
    SplitRow& row = rows[r];
    row.q_nope = call.q_nope.row(shape.first_token + token, head);
    row.q_pe = call.q_pe.base != nullptr ? call.q_pe.row(shape.first_token + token, head) : nullptr;
    row.key_begin = seen.begin;
    row.key_end = seen.end;
    row.position = shape.position(token);
    row.alibi_slope = call.alibi_slopes != nullptr ? call.alibi_slopes[head] : 0.0F;
  }
  return job;
}

/// Runs the rows of a split against `keys`, leaving normalised rows in out and lse.
void run_keys(const Call& call, const Split& split, const RequestShape& shape, KeyRange keys,
              float* out, float* lse, std::byte* scratch) noexcept {
  SplitRow rows[kMaxRows];
  SplitJob job = make_job(call, split, shape, keys, rows);
  job.out = out;
  job.lse = lse;
  if (job.key_begin < job.key_end) {
    call.kernels.run_split(call.view, job, scratch);
    return;
  }
  std::fill_n(out, job.num_rows * call.problem.kv_lora_rank, 0.0F);
  std::fill_n(lse, job.num_rows, empty_lse<float>());
}

/// acc = merge(acc, value): the one fold that partials and fixed_split parts share.
void fold_row(const Call& call, float* acc, float& acc_lse, const float* value,
              float value_lse) noexcept {
  const MergeWeights<float> weights = merge_weights(acc_lse, value_lse);
  acc_lse = weights.lse;
  if (weights.weight_b == 0.0F && weights.weight_a == 1.0F) return;
  call.kernels.merge_row(acc, weights.weight_a, value, weights.weight_b, call.problem.kv_lora_rank);
}

void run_split(const Call& call, const Split& split, const WorkerArea& area) noexcept {
  const RequestShape shape = request_shape(call.problem, call.lengths, split.request);
  const std::int64_t rank = call.problem.kv_lora_rank;
  const std::int64_t num_rows = split.row_end - split.row_begin;
  const KeyRange keys{split.key_begin, split.key_end};
  if (split.partial >= 0) {
    run_keys(call, split, shape, keys, call.partial_out + split.partial * rank,
             call.partial_lse + split.partial, area.scratch);
    return;
  }
  const std::int64_t part = call.state.options.fixed_split;
  const bool folds = part > 0 && !keys.empty() && (keys.end - 1) / part != keys.begin / part;
  float* out = folds ? area.fold_out : area.rows_out;
  float* lse = folds ? area.fold_lse : area.rows_lse;
  if (!folds) {
    run_keys(call, split, shape, keys, out, lse, area.scratch);
  } else {
    for (std::int64_t p = keys.begin / part; p * part < keys.end; ++p) {
      const KeyRange cut{std::max(keys.begin, p * part), std::min(keys.end, (p + 1) * part)};
      const bool first = p == keys.begin / part;
      run_keys(call, split, shape, cut, first ? out : area.rows_out, first ? lse : area.rows_lse,
               area.scratch);
      if (first) continue;
      for (std::int64_t r = 0; r < num_rows; ++r) {
        fold_row(call, out + r * rank, lse[r], area.rows_out + r * rank, area.rows_lse[r]);
      }
    }
  }
  for (std::int64_t r = 0; r < num_rows; ++r) {
    const std::int64_t row = split.row_begin + r;
    store_output(call, shape.first_token + row / call.problem.num_heads,
                 row % call.problem.num_heads, out + r * rank, lse[r]);
  }
}

/// Row `row` of a merge task: its partials in key order, folded into the first.
void merge_row(const Call& call, const MergeTask& task, std::int64_t row) noexcept {
  const RequestShape shape = request_shape(call.problem, call.lengths, task.request);
  const std::int64_t rank = call.problem.kv_lora_rank;
  const std::int64_t num_rows = task.row_end - task.row_begin;
  const std::int64_t first = task.partial + (row - task.row_begin);
  float* acc = call.partial_out + first * rank;
  float lse = call.partial_lse[first];
  for (std::int64_t s = 1; s < task.num_splits; ++s) {
    const std::int64_t slot = first + s * num_rows;
    fold_row(call, acc, lse, call.partial_out + slot * rank, call.partial_lse[slot]);
  }
  store_output(call, shape.first_token + row / call.problem.num_heads, row % call.problem.num_heads,
               acc, lse);
}

/// The worker's own splits, then whatever other workers have not begun.
void run_worker(const Call& call, const WorkerArea& area, int thread) noexcept {
  const int num_workers = call.state.num_workers;
  for (int step = 0; step < num_workers; ++step) {
    const int owner = (thread + step) % num_workers;
    const std::int32_t end = call.schedule.worker_begin[owner + 1];
    while (true) {
      const std::int32_t s = call.next_split[owner].index.fetch_add(1, std::memory_order_relaxed);
      if (s >= end) break;
      run_split(call, call.schedule.splits[s], area);
    }
  }
}

std::int64_t first_padding_token(const Call& call) noexcept {
  const std::int32_t* starts = call.lengths.query_start_loc;
  // In sparse mode the padding rows are splits without keys.
  if (starts == nullptr || call.problem.sparse()) return call.problem.num_tokens;
  return starts[call.problem.num_requests];
}

void store_padding(const Call& call, std::int64_t token) noexcept {
  for (std::int64_t head = 0; head < call.problem.num_heads; ++head) {
    store_output(call, token, head, nullptr, empty_lse<float>());
  }
}

}  // namespace

Status configure(PlanState& state, const KernelTable& kernels) {
  const DecodeProblem& problem = state.problem;
  state.num_workers = state.options.num_threads > 0 ? state.options.num_threads : omp_get_max_threads();
  state.key_tile = kernels.key_tile;
  const std::int64_t most_tokens =
      problem.sparse() ? 1 : std::clamp<std::int64_t>(problem.max_query_len, 1, std::max<std::int64_t>(problem.num_tokens, 1));
  const std::int64_t most_rows = most_tokens * problem.num_heads;
  state.max_rows =
      std::min(kMaxRows, (most_rows + kRowAlignment - 1) / kRowAlignment * kRowAlignment);
  const std::size_t scratch = kernels.scratch_bytes(problem.kv_lora_rank, problem.qk_rope_head_dim);
  const WorkspaceMap map = map_workspace(state, scratch);
  // Split::partial counts slots in 32 bits.
  const bool too_many = schedule_bounds(state).num_partials > std::numeric_limits<std::int32_t>::max() ||
                        schedule_bounds(state).num_splits > std::numeric_limits<std::int32_t>::max();
  if (map.overflow || too_many) {
    return {StatusCode::kOutOfMemory,
            text("plan: workspace: found more than the address space for ", to_string(problem),
                 ", needed smaller bounds or fewer splits")};
  }
  state.workspace_bytes = map.total;
  return {};
}

Status launch(const PlanState& state, const KernelTable& kernels, const DecodeTensors& tensors,
              std::byte* workspace) {
  const WorkspaceMap map = map_workspace(
      state, kernels.scratch_bytes(state.problem.kv_lora_rank, state.problem.qk_rope_head_dim));
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(workspace) % Offset::kAlignment;
  if (misaligned != 0) workspace += Offset::kAlignment - misaligned;

  Call call = make_call(state, kernels, tensors, map, workspace);
  make_schedule(state, call.lengths, call.schedule);
  int num_busy = 1;
  for (int worker = 0; worker < state.num_workers; ++worker) {
    const std::int32_t begin = call.schedule.worker_begin[worker];
    new (&call.next_split[worker]) NextSplit{{begin}};
    if (begin < call.schedule.worker_begin[worker + 1]) num_busy = worker + 1;
  }
  const std::int64_t padding = first_padding_token(call);

#pragma omp parallel num_threads(num_busy)
  {
    const int thread = omp_get_thread_num();
    run_worker(call, worker_area(map, workspace, thread), thread);
#pragma omp barrier
    for (std::int64_t m = 0; m < call.schedule.num_merges; ++m) {
      const MergeTask& task = call.schedule.merges[m];
#pragma omp for schedule(static) nowait
      for (std::int64_t row = task.row_begin; row < task.row_end; ++row) merge_row(call, task, row);
    }
#pragma omp for schedule(static)
    for (std::int64_t token = padding; token < state.problem.num_tokens; ++token) {
      store_padding(call, token);
    }
  }
  return {};
}

}  // namespace mla::cpu
