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

/// The batch on a group of threads, each with its part of the cache.
Status run_sharded(const Options& options, const io::Batch& batch, const DecodeTensors& tensors,
                   nlohmann::ordered_json& report) {
  ShardedRun run;
  run.interleave = options.interleave;
  for (const CpStrategy strategy : {CpStrategy::kAllToAll, CpStrategy::kGatherReduce}) {
    if (options.strategy == to_string(strategy)) run.decode.strategy = strategy;
  }
  run.decode.local = options.backend.options();
  if (run.decode.local.num_threads == 0) {  // ranks share the machine's threads
    run.decode.local.num_threads =
        std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / options.ranks);
  }
  const Result<ShardedReport> done = run_on_threads(options.ranks, batch.problem, tensors, run);
  if (!done.ok()) return done.status();
  report.update({{"backend", done->backend},
                 {"threads", done->threads},
                 {"workspace_bytes", done->workspace_bytes},
                 {"milliseconds", done->milliseconds},
                 {"ranks", options.ranks},
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

/// Everything that can fail comes before the output file is touched.
Status run_file(const Options& options, nlohmann::ordered_json& report) {
  Result<io::Batch> batch = io::read_batch(options.input);
  if (!batch.ok()) return batch.status();
  for (const std::string& name : batch->ignored) {
    std::cerr << "mla run: note: '" << name << "' is not part of a batch and was ignored\n";
  }
  const testkit::Outputs outputs(batch->problem);
  DecodeTensors tensors = batch->tensors;
  tensors.out = outputs.out_view;
  tensors.lse = outputs.lse_view;
  report = {{"input", options.input}, {"output", options.output}};
  MLA_RETURN_IF_ERROR(options.ranks > 0 ? run_sharded(options, *batch, tensors, report)
                                        : run_whole(options, *batch, tensors, report));
  report["problem"] = to_string(batch->problem);
  report["ignored"] = batch->ignored;
  return io::write_result(options.output, tensors.out, tensors.lse);
}

int run_command(const Options& options) {
  nlohmann::ordered_json report;
  Status status;
  try {
    status = run_file(options, report);
  } catch (const std::bad_alloc&) {
    status = Status(StatusCode::kOutOfMemory, text("run: ", options.input, ": out of memory"));
  }
  if (!status.ok()) return fail(kCommand, status);
  if (options.json) {
    print_json(report);
  } else {
    std::cout << options.output << ": " << report["problem"].get<std::string>() << " on "
              << report["backend"].get<std::string>() << ", " << report["threads"].get<int>()
              << " threads";
    if (options.ranks > 0) {
      std::cout << " on each of " << options.ranks << " ranks ("
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
  CLI::Option* ranks =
      command
          ->add_option("--ranks", options->ranks,
                       "Shard the cache over N threads and decode context-parallel")
          ->check(CLI::Range(1, 1024))
          ->type_name("N");
  command
      ->add_option("--interleave", options->interleave,
                   "With --ranks: consecutive tokens of a rank (default 1)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31))
      ->needs(ranks)
      ->type_name("N");
  command
      ->add_option("--strategy", options->strategy,
                   "With --ranks: auto, a2a or ag_rs (default auto)")
      ->check(CLI::IsMember({"auto", "a2a", "ag_rs"}))
      ->needs(ranks)
      ->type_name("NAME");
  command->add_flag("--json", options->json, "Print JSON");
  command->footer(example("mla run --input batch.safetensors --output result.safetensors"));
  command->callback([options, &exit_code] { exit_code = run_command(*options); });
}

}  // namespace mla::cli
