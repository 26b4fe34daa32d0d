// `mla run`: a batch file in, out and lse in a file out.
#include <chrono>
#include <iostream>
#include <memory>
#include <new>

#include "cli.hpp"
#include "core/diagnostics.hpp"
#include "io/batch_file.hpp"
#include "mla/decode.hpp"
#include "testkit/problem_gen.hpp"
#include "testkit/runner.hpp"

namespace mla::cli {
namespace {

constexpr const char* kCommand = "run";

struct Options {
  std::string input;
  std::string output;
  BackendFlags backend;
  bool json = false;
};

/// Everything that can fail comes before the output file is touched.
Status run_file(const Options& options, nlohmann::ordered_json& report) {
  Result<io::Batch> batch = io::read_batch(options.input);
  if (!batch.ok()) return batch.status();
  for (const std::string& name : batch->ignored) {
    std::cerr << "mla run: note: '" << name << "' is not part of a batch and was ignored\n";
  }
  const DecodeProblem& problem = batch->problem;
  const Result<DecodePlan> made = plan(problem, options.backend.options());
  if (!made.ok()) return made.status();

  const testkit::Outputs outputs(problem);
  DecodeTensors tensors = batch->tensors;
  tensors.out = outputs.out_view;
  tensors.lse = outputs.lse_view;
  Result<std::unique_ptr<testkit::Runner>> runner =
      testkit::Runner::make(*made, tensors, testkit::Buffer::kGuardBytes);
  if (!runner.ok()) return runner.status();

  const auto start = std::chrono::steady_clock::now();
  MLA_RETURN_IF_ERROR((*runner)->run());
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
  MLA_RETURN_IF_ERROR(io::write_result(options.output, tensors.out, tensors.lse));
  report = {{"input", options.input},
            {"output", options.output},
            {"backend", made->backend_name()},
            {"threads", made->num_workers()},
            {"workspace_bytes", made->workspace_bytes()},
            {"milliseconds", elapsed.count()},
            {"problem", to_string(problem)},
            {"ignored", batch->ignored}};
  return {};
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
              << " threads\n";
  }
  return kExitDone;
}

}  // namespace

void add_run_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("run", "Decode a batch file");
  command->add_option("--input", options->input, "Batch file (safetensors)")->required()->type_name("FILE");
  command->add_option("--output", options->output, "Result file with out and lse")
      ->required()
      ->type_name("FILE");
  add_backend_flags(*command, options->backend, "Row of `mla info` (default: the first that runs)");
  command->add_flag("--json", options->json, "Print JSON");
  command->footer(example("mla run --input batch.safetensors --output result.safetensors"));
  command->callback([options, &exit_code] { exit_code = run_command(*options); });
}

}  // namespace mla::cli
