// `mla run`: a batch file in, out and lse in a file out.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <new>
#include <thread>

#include "cli.hpp"
#include "core/diagnostics.hpp"
#include "io/batch_file.hpp"
#include "mla/decode.hpp"
#include "sharded_run.hpp"
#include "testkit/problem_gen.hpp"
#include "testkit/runner.hpp"

namespace mla::cli {
namespace {

constexpr const char* kCommand = "run";

struct Options {
  std::string input;
  std::string output;
  BackendFlags backend;
  int ranks = 0;  ///< 0: not sharded
  std::int64_t interleave = 1;
  std::string strategy = "auto";
  bool json = false;
};

ShardedRun sharded_run(const Options& options) {
  ShardedRun run;
  run.interleave = options.interleave;
  for (const CpStrategy strategy : {CpStrategy::kAllToAll, CpStrategy::kGatherReduce}) {
    if (options.strategy == to_string(strategy)) run.decode.strategy = strategy;
  }
  run.decode.local = options.backend.options();
  return run;
}

/// The batch on a group of threads, or of processes, each with its part of the cache.
Status run_sharded(const Options& options, const Status& read, const DecodeProblem& problem,
                   const DecodeTensors& tensors, nlohmann::ordered_json& report, int& rank) {
  ShardedRun run = sharded_run(options);
  if (options.ranks > 0 &&
      run.decode.local.num_threads == 0) {  // ranks share the machine's threads
    run.decode.local.num_threads =
        std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / options.ranks);
  }
  if (options.ranks > 0 && !read.ok()) return read;
  const Result<ShardedReport> done = options.ranks > 0
                                         ? run_on_threads(options.ranks, problem, tensors, run)
                                         : run_on_mpi(read, problem, tensors, run, rank);
  if (!done.ok()) return done.status();
  report.update({{"backend", done->backend},
                 {"threads", done->threads},
                 {"workspace_bytes", done->workspace_bytes},
                 {"milliseconds", done->milliseconds},
                 {"ranks", done->ranks},
                 {"interleave", run.interleave},
                 {"strategy", to_string(done->strategy)}});
  return {};
}

Status run_whole(const Options& options, const io::Batch& batch, const DecodeTensors& tensors,
                 nlohmann::ordered_json& report) {
  const Result<DecodePlan> made = plan(batch.problem, options.backend.options());
  if (!made.ok()) return made.status();
  Result<std::unique_ptr<testkit::Runner>> runner =
      testkit::Runner::make(*made, tensors, testkit::Buffer::kGuardBytes);
  if (!runner.ok()) return runner.status();
  const auto start = std::chrono::steady_clock::now();
  MLA_RETURN_IF_ERROR((*runner)->run());
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  report.update({{"backend", made->backend_name()},
                 {"threads", made->num_workers()},
                 {"workspace_bytes", made->workspace_bytes()},
                 {"milliseconds", elapsed.count()}});
  return {};
}

/// Everything that can fail comes before the output file is touched. `rank` is this process's in an
/// MPI job, of which rank 0 alone writes.
Status run_file(const Options& options, nlohmann::ordered_json& report, int& rank) {
  const bool job = under_mpi();
  if (job && options.ranks > 0) {
    return bad_argument(kCommand, "--ranks", text(options.ranks, " in an MPI job"),
                        "none: the job's processes are the ranks");
  }
  Result<io::Batch> batch = io::read_batch(options.input);
  if (!batch.ok() && !job) return batch.status();
  const DecodeProblem problem = batch.ok() ? batch->problem : DecodeProblem();
  const testkit::Outputs outputs(problem);
  DecodeTensors tensors = batch.ok() ? batch->tensors : DecodeTensors();
  tensors.out = outputs.out_view;
  tensors.lse = outputs.lse_view;
  report = {{"input", options.input}, {"output", options.output}};
  const Status read = batch.ok() ? Status() : batch.status();
  MLA_RETURN_IF_ERROR(job || options.ranks > 0
                          ? run_sharded(options, read, problem, tensors, report, rank)
                          : run_whole(options, *batch, tensors, report));
  if (rank != 0) return {};
  for (const std::string& name : batch->ignored) {
    std::cerr << "mla run: note: '" << name << "' is not part of a batch and was ignored\n";
  }
  report["problem"] = to_string(problem);
  report["ignored"] = batch->ignored;
  return io::write_result(options.output, tensors.out, tensors.lse);
}

int run_command(const Options& options) {
  nlohmann::ordered_json report;
  Status status;
  int rank = 0;
  try {
    status = run_file(options, report, rank);
  } catch (const std::bad_alloc&) {
    status = Status(StatusCode::kOutOfMemory, text("run: ", options.input, ": out of memory"));
  }
  // The ranks of a job end alike, and rank 0 says how: mpirun would end it early when another rank
  // fails before it.
  if (rank != 0) return kExitDone;
  if (!status.ok()) return fail(kCommand, status);
  if (options.json) {
    print_json(report);
  } else {
    std::cout << options.output << ": " << report["problem"].get<std::string>() << " on "
              << report["backend"].get<std::string>() << ", " << report["threads"].get<int>()
              << " threads";
    if (report.contains("ranks")) {
      std::cout << " on each of " << report["ranks"].get<int>() << " ranks ("
                << report["strategy"].get<std::string>() << ")";
    }
    std::cout << "\n";
  }
  return kExitDone;
}

}  // namespace

void add_run_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("run", "Decode a batch file");
  command->add_option("--input", options->input, "Batch file (safetensors)")
      ->required()
      ->type_name("FILE");
  command->add_option("--output", options->output, "Result file with out and lse")
      ->required()
      ->type_name("FILE");
  add_backend_flags(*command, options->backend, "Row of `mla info` (default: the first that runs)");
  command
      ->add_option("--ranks", options->ranks,
                   "Shard the cache over N threads; under mpirun its processes are the ranks")
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
  command
      ->add_option("--interleave", options->interleave,
                   "Of a sharded run: consecutive tokens of a rank (default 1)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31))
      ->type_name("N");
  command
      ->add_option("--strategy", options->strategy,
                   "Of a sharded run: auto, a2a or ag_rs (default auto)")
      ->check(CLI::IsMember({"auto", "a2a", "ag_rs"}))
      ->type_name("NAME");
  command->add_flag("--json", options->json, "Print JSON");
  command->footer(example("mla run --input batch.safetensors --output result.safetensors"));
  command->callback([options, &exit_code] { exit_code = run_command(*options); });
}

}  // namespace mla::cli
