#include "sharded_run.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#ifdef MLA_HAS_MPI
#include "cli.hpp"
#include "core/element.hpp"
#include "distributed/agreement.hpp"
#include "mla/mpi.hpp"
#endif
#include "core/diagnostics.hpp"
#include "core/stages.hpp"
#include "mla/sharding.hpp"
#include "statistics.hpp"
#include "testkit/buffer.hpp"
#include "testkit/problem_gen.hpp"

namespace mla::cli {
namespace {

using testkit::Buffer;

/// The problem and tensors of one rank; owns what it does not share with the batch.
struct Shard {
  DecodeProblem problem;
  DecodeTensors tensors;
  std::vector<std::int32_t> seq_lens, table, indices;
  Buffer pool;
};

std::int32_t* integers(const TensorView& view) {
  return static_cast<std::int32_t*>(view.data);
}

/// Sparse rows are dealt as sequences are: entry k is rank (k / interleave) mod W's, and no key to
/// the others. The cache stays whole.
void deal_indices(const Sharding& sharding, std::int64_t rank, Shard& shard) {
  const TensorView whole = shard.tensors.indices;
  shard.indices.resize(static_cast<std::size_t>(whole.shape[0] * whole.shape[1]), -1);
  for (std::int64_t t = 0; t < whole.shape[0]; ++t) {
    for (std::int64_t k = 0; k < whole.shape[1]; ++k) {
      if (local_token(sharding, k).rank != rank) continue;
      shard.indices[static_cast<std::size_t>(t * whole.shape[1] + k)] =
          integers(whole)[t * whole.stride[0] + k];
    }
  }
  shard.tensors.indices =
      TensorView::contiguous(shard.indices.data(), DType::kI32, {whole.shape[0], whole.shape[1]});
}

/// A pool with this rank's tokens alone, and the table and lengths that go with it.
Status deal_cache(const Sharding& sharding, std::int64_t rank, const DecodeTensors& batch,
                  Shard& shard) {
  const DecodeProblem& problem = shard.problem;
  std::int64_t num_pages = 0;
  std::int64_t columns = 1;
  for (std::int64_t b = 0; b < problem.num_requests; ++b) {
    const std::int64_t length = integers(batch.seq_lens)[b * batch.seq_lens.stride[0]];
    const std::int64_t local = local_seq_len(length, sharding.world, rank, sharding.interleave);
    shard.seq_lens.push_back(static_cast<std::int32_t>(local));
    const std::int64_t pages = (local + problem.page_size - 1) / problem.page_size;
    num_pages += pages;
    columns = std::max(columns, pages);
  }
  shard.table.assign(static_cast<std::size_t>(problem.num_requests * columns), -1);
  std::int32_t next = 0;
  for (std::int64_t b = 0; b < problem.num_requests; ++b) {
    const std::int64_t local = shard.seq_lens[static_cast<std::size_t>(b)];
    for (std::int64_t page = 0; page * problem.page_size < local; ++page) {
      shard.table[static_cast<std::size_t>(b * columns + page)] = next++;
    }
  }
  const TensorView& kv = batch.kv_cache;
  const std::int64_t width = kv.shape[2];
  shard.pool = Buffer(
      static_cast<std::size_t>(num_pages * problem.page_size * width) * dtype_bytes(kv.dtype),
      0xFF);
  DecodeTensors& mine = shard.tensors;
  mine.kv_cache =
      TensorView::contiguous(shard.pool.data(), kv.dtype, {num_pages, problem.page_size, width});
  mine.block_table =
      TensorView::contiguous(shard.table.data(), DType::kI32, {problem.num_requests, columns});
  if (!mine.causal_seqlens_kv_global.given()) mine.causal_seqlens_kv_global = batch.seq_lens;
  mine.seq_lens =
      TensorView::contiguous(shard.seq_lens.data(), DType::kI32, {problem.num_requests});
  return split_cache(sharding, rank, {kv, batch.block_table}, batch.seq_lens,
                     {mine.kv_cache, mine.block_table});
}

Status make_shard(const DecodeProblem& problem, const DecodeTensors& batch,
                  const Sharding& sharding, std::int64_t rank, Shard& shard) {
  shard.problem = problem;
  shard.problem.cp_world = sharding.world;
  shard.problem.cp_rank = rank;
  shard.problem.cp_interleave = sharding.interleave;
  shard.tensors = batch;
  if (problem.sparse()) {
    deal_indices(sharding, rank, shard);
    return {};
  }
  return deal_cache(sharding, rank, batch, shard);
}

TensorView heads_of(TensorView view, const HeadRange& heads) {
  if (!view.given()) return view;
  view.shape[1] = heads.count;
  view.data = static_cast<std::byte*>(view.data) +
              heads.begin * view.stride[1] * static_cast<std::int64_t>(dtype_bytes(view.dtype));
  return view;
}

/// The time of a call that all ranks begin together.
template <class Call>
Result<double> time_together(Communicator& ranks, const Call& call) {
  std::vector<char> all(static_cast<std::size_t>(ranks.world()));
  const char here = 0;
  MLA_RETURN_IF_ERROR(ranks.exchange(&here, all.data(), 1));
  const auto start = std::chrono::steady_clock::now();
  MLA_RETURN_IF_ERROR(call());
  const std::chrono::duration<double, std::micro> elapsed =
      std::chrono::steady_clock::now() - start;
  return elapsed.count();
}

/// Times `sharded` and the decode of this rank's keys in turn, so that a drift of the machine's
/// speed is in both.
template <class Call>
Status time_calls(Communicator& ranks, const DecodePlan& plan, DecodeTensors local, int count,
                  const Call& sharded, ShardedReport& report) {
  const testkit::Outputs outputs(plan.problem());
  const Buffer workspace(plan.workspace_bytes(), 0);
  if (!plan.problem().uses_sinks) local.sinks = TensorView();
  local.out = outputs.out_view;
  local.lse = outputs.lse_view;
  std::vector<double> call_us, local_us, overhead_us;
  for (int i = 0; i < count; ++i) {
    const Result<double> call = time_together(ranks, sharded);
    if (!call.ok()) return call.status();
    const Result<double> alone =
        time_together(ranks, [&] { return run(plan, local, workspace.data(), workspace.size()); });
    if (!alone.ok()) return alone.status();
    call_us.push_back(*call);
    local_us.push_back(*alone);
    overhead_us.push_back(*call - *alone);
  }
  report.call_us = median(call_us);
  report.local_us = median(local_us);
  report.overhead_us = median(overhead_us);
  return {};
}

/// One rank's work, from the whole batch to its heads of the whole result.
Result<ShardedReport> run_rank(Communicator& ranks, const DecodeProblem& problem,
                               const DecodeTensors& batch, const ShardedRun& run) {
  Shard shard;
  const Status sharded =
      make_shard(problem, batch, {ranks.world(), run.interleave}, ranks.rank(), shard);
  if (!sharded.ok()) {
    ranks.abort(sharded);
    return sharded;
  }
  const Result<ContextParallelPlan> plan = plan_context_parallel(shard.problem, ranks, run.decode);
  if (!plan.ok()) return plan.status();
  DecodeTensors& tensors = shard.tensors;
  if (!run.decode.queries_gathered) {
    for (TensorView* view : {&tensors.q, &tensors.q_nope, &tensors.q_pe})
      *view = heads_of(*view, plan->heads());
  }
  tensors.out = heads_of(tensors.out, plan->heads());
  tensors.lse = heads_of(tensors.lse, plan->heads());
  const Buffer workspace(plan->workspace_bytes(), 0);
  const auto start = std::chrono::steady_clock::now();
  MLA_RETURN_IF_ERROR(
      decode_context_parallel(*plan, ranks, tensors, workspace.data(), workspace.size()));
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  ShardedReport report{plan->local().backend_name(),
                       plan->local().num_workers(),
                       ranks.world(),
                       plan->strategy(),
                       plan->workspace_bytes(),
                       elapsed.count()};
  if (run.timed_calls == 0) return report;
  DecodeTensors local = shard.tensors;
  local.q = batch.q;
  local.q_nope = batch.q_nope;
  local.q_pe = batch.q_pe;
  const auto call = [&] {
    return decode_context_parallel(*plan, ranks, tensors, workspace.data(), workspace.size());
  };
  MLA_RETURN_IF_ERROR(time_calls(ranks, plan->local(), local, run.timed_calls, call, report));
  return report;
}

Status check_whole(const DecodeProblem& problem, const DecodeTensors& batch) {
  if (problem.cp_world != 1) {
    return bad_argument("run", "ranks",
                        text("a batch of rank ", problem.cp_rank, " of ", problem.cp_world),
                        "a whole batch (cp_world 1)");
  }
  MLA_RETURN_IF_ERROR(validate_tensors(problem, batch));
  return validate_contents(problem, batch);
}

#ifdef MLA_HAS_MPI
/// Brings every rank's heads of a [T,H,width] tensor to all ranks.
Status gather_heads(Communicator& ranks, const TensorView& whole) {
  if (!whole.given()) return {};
  const std::int64_t tokens = whole.shape[0];
  const std::int64_t heads = whole.shape[1];
  const std::int64_t block = rank_heads(heads, ranks.world(), 0).count;
  const std::size_t row =
      static_cast<std::size_t>(whole.rank == 3 ? whole.shape[2] : 1) * dtype_bytes(whole.dtype);
  const std::size_t bytes = static_cast<std::size_t>(tokens * block) * row;
  const Buffer mine(bytes, 0);
  const Buffer all(bytes * static_cast<std::size_t>(ranks.world()), 0);
  const auto each_row = [&](std::int64_t rank, const Buffer& blocks, std::size_t begin,
                            bool out_of_tensor) {
    const HeadRange own = rank_heads(heads, ranks.world(), rank);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < own.count; ++h) {
        std::byte* in_tensor = row_address(whole, t, own.begin + h);
        std::byte* in_block = blocks.data() + begin + static_cast<std::size_t>(t * block + h) * row;
        std::memcpy(out_of_tensor ? in_block : in_tensor, out_of_tensor ? in_tensor : in_block,
                    row);
      }
    }
  };
  each_row(ranks.rank(), mine, 0, true);
  MLA_RETURN_IF_ERROR(ranks.all_gather(mine.data(), all.data(), bytes, nullptr));
  for (int r = 0; r < ranks.world(); ++r)
    each_row(r, all, static_cast<std::size_t>(r) * bytes, false);
  return {};
}

/// MPI from the first use to the end of the process.
class MpiJob {
 public:
  MpiJob() { MPI_Init(nullptr, nullptr); }
  ~MpiJob() {
    // A lost group still has messages in flight, which MPI_Finalize would wait for.
    lost ? MPI_Abort(MPI_COMM_WORLD, kExitBadInput) : MPI_Finalize();
  }
  bool lost = false;
};

Result<ShardedReport> run_job(Communicator& ranks, const Status& read, const DecodeProblem& problem,
                              const DecodeTensors& batch, const ShardedRun& run) {
  const Status mine = read.ok() ? check_whole(problem, batch) : read;
  // A rank that could not read the file would leave the others waiting.
  MLA_RETURN_IF_ERROR(agree(ranks, "run", mine, {}));
  Result<ShardedReport> report = run_rank(ranks, problem, batch, run);
  if (!report.ok()) return report;
  const double mine_us[3] = {report->call_us, report->local_us, report->overhead_us};
  std::vector<double> all_us(3 * static_cast<std::size_t>(ranks.world()));
  MLA_RETURN_IF_ERROR(ranks.exchange(mine_us, all_us.data(), sizeof(mine_us)));
  for (std::size_t i = 0; i < all_us.size(); i += 3) {
    report->call_us = std::max(report->call_us, all_us[i]);
    report->local_us = std::max(report->local_us, all_us[i + 1]);
    report->overhead_us = std::max(report->overhead_us, all_us[i + 2]);
  }
  MLA_RETURN_IF_ERROR(gather_heads(ranks, batch.out));
  MLA_RETURN_IF_ERROR(gather_heads(ranks, batch.lse));
  return report;
}
#endif

}  // namespace

bool under_mpi() noexcept {
  // Open MPI's and MPICH's launchers.
  return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr || std::getenv("PMI_SIZE") != nullptr;
}

Result<ShardedReport> run_on_mpi(const Status& read, const DecodeProblem& problem,
                                 const DecodeTensors& batch, const ShardedRun& run, int& rank) {
#ifdef MLA_HAS_MPI
  static MpiJob job;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  Result<std::unique_ptr<Communicator>> ranks = make_mpi_communicator(MPI_COMM_WORLD);
  if (!ranks.ok()) return ranks.status();
  Result<ShardedReport> report = run_job(**ranks, read, problem, batch, run);
  job.lost = job.lost || (!report.ok() && report.status().code() == StatusCode::kPeer);
  return report;
#else
  (void)read, (void)problem, (void)batch, (void)run, (void)rank;
  return Status(StatusCode::kUnsupported,
                "run: MPI: found a build without it, needed one with MLA_MPI=ON");
#endif
}

Result<ShardedReport> run_on_threads(int world, const DecodeProblem& problem,
                                     const DecodeTensors& batch, const ShardedRun& run) {
  MLA_RETURN_IF_ERROR(check_whole(problem, batch));
  Result<std::vector<std::unique_ptr<Communicator>>> ends = make_thread_communicators(world);
  if (!ends.ok()) return ends.status();
  std::vector<Result<ShardedReport>> reports(static_cast<std::size_t>(world), ShardedReport{});
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < reports.size(); ++r) {
    threads.emplace_back([&, r] {
      Communicator& ranks = *(*ends)[r];
      try {
        reports[r] = run_rank(ranks, problem, batch, run);
      } catch (const std::bad_alloc&) {
        const Status failed(StatusCode::kOutOfMemory, text("run: rank ", r, ": out of memory"));
        ranks.abort(failed);
        reports[r] = failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ShardedReport report = reports[0].ok() ? *reports[0] : ShardedReport{};
  for (const Result<ShardedReport>& each : reports) {
    if (!each.ok()) return each.status();
    report.milliseconds = std::max(report.milliseconds, each->milliseconds);
    report.call_us = std::max(report.call_us, each->call_us);
    report.local_us = std::max(report.local_us, each->local_us);
    report.overhead_us = std::max(report.overhead_us, each->overhead_us);
  }
  return report;
}

}  // namespace mla::cli
