// `mla bench --ranks`: what context parallelism costs beside the local decode.
#include <iostream>
#include <memory>

#include "bench_options.hpp"
#include "bench_result.hpp"
#include "cli.hpp"
#include "core/diagnostics.hpp"
#include "machine.hpp"
#include "sharded_run.hpp"

namespace mla::cli {
namespace {

constexpr const char* kCommand = "bench";
constexpr double kOracleBudget = 4e5;  // (row, key) pairs
constexpr int kTimedCalls = 200;

/// One line: the batch on the ranks by one strategy, timed and checked. `row` stays empty when it
/// is wrong, and on all ranks of an MPI job but the first.
Status bench_ranks_line(const BenchOptions& options, const std::string& problem,
                        CpStrategy strategy, BenchTally& tally, int& rank, std::string& row) {
  const Result<testkit::Case> source = bench_case(options, problem);
  if (!source.ok()) return source.status();
  Result<std::unique_ptr<testkit::Batch>> batch = testkit::make_batch(*source);
  if (!batch.ok()) return batch.status();
  (*batch)->poison_outputs();
  ShardedRun run;
  run.interleave = options.interleave;
  run.timed_calls = kTimedCalls;
  run.decode.strategy = strategy;
  run.decode.local = options.backend.options();
  if (run.decode.local.num_threads == 0) run.decode.local.num_threads = 1;
  const Result<ShardedReport> timed =
      options.ranks > 0 ? run_on_threads(options.ranks, (*batch)->problem, (*batch)->tensors, run)
                        : run_on_mpi({}, (*batch)->problem, (*batch)->tensors, run, rank);
  if (!timed.ok()) return timed.status();
  if (rank != 0) return {};
  const Result<BenchCheck> check = check_outputs(**batch, kOracleBudget);
  if (!check.ok()) return check.status();
  if (!check->problem.empty()) {
    tally.wrong(*check, *source, timed->backend, timed->threads);
    return {};
  }
  tally.timed();
  row = text(testkit::to_string(*source), ',', (options.ranks > 0 ? "threads" : "mpi"), ',',
             timed->ranks, ',', to_string(strategy), ',', timed->backend, ',', timed->threads, ',',
             fixed(timed->call_us, 1), ',', fixed(timed->local_us, 1), ',',
             fixed(timed->overhead_us, 1), ',', check->rows_text(), "\n");
  return {};
}

void print_header() {
  const MachineInfo machine = read_machine();
  std::cout
      << "# mla bench " << version() << ", commit " << build_commit() << ", " << utc_now() << "\n# "
      << machine.cpu_name << ", " << machine.usable_cpus << " CPUs usable\n"
      << "# medians of " << kTimedCalls
      << " calls begun together, of the slowest rank; overhead: of call - local, in turn\n"
      << "problem,group,ranks,strategy,backend,threads,call_us,local_us,overhead_us,checked\n";
}

}  // namespace

int run_ranks_bench(const BenchOptions& options) {
  if (!options.suite.empty()) {
    return fail(kCommand, kExitBadInput, "--ranks: found with --suite, needed with --problem");
  }
  if (options.ranks > 0 && under_mpi()) {
    return fail(kCommand, kExitBadInput,
                "--ranks: found in an MPI job, needed without: its processes are the ranks");
  }
  BenchTally tally;
  int rank = 0;  // in an MPI job, of which rank 0 alone prints
  bool headed = false;
  for (const std::string& problem : options.problems) {
    for (const CpStrategy strategy : {CpStrategy::kAllToAll, CpStrategy::kGatherReduce}) {
      std::string row;
      const Status status = bench_ranks_line(options, problem, strategy, tally, rank, row);
      if (rank != 0) continue;
      if (!status.ok()) return fail(kCommand, status);
      if (!headed) print_header();
      headed = true;
      std::cout << row << std::flush;
    }
  }
  if (rank != 0) return kExitDone;
  std::cout << "# " << tally.verdict() << '\n';
  return tally.exit_code();
}

}  // namespace mla::cli
