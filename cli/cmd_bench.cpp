// `mla bench`: times of checked results, beside what the machine could give. Flags and CPU rows.
#include <memory>
#include <set>

#include "bench.hpp"
#include "bench_options.hpp"
#include "cli.hpp"
#include "cpu_output.hpp"
#include "machine.hpp"
#include "sharded_run.hpp"

namespace mla::cli {
namespace {

constexpr const char* kCommand = "bench";

/// The CPU rows to time; "" is the library's choice.
Result<std::vector<std::string>> backend_names(const std::string& asked) {
  if (asked.empty()) return std::vector<std::string>{""};
  if (asked != "all") {
    const Result<BackendInfo> row = find_backend(kCommand, asked, DeviceKind::kCpu);
    if (!row.ok()) return row.status();
    return std::vector<std::string>{asked};
  }
  std::vector<std::string> names;
  for (const BackendInfo& row : backends()) {
    // The oracle is not meant to be fast.
    if (row.device != DeviceKind::kCpu || row.name == "cpu_reference") continue;
    if (row.reject_reason.empty()) names.push_back(row.name);
  }
  return names;
}

Result<std::vector<BenchLine>> cpu_lines(const BenchOptions& options) {
  if (!options.suite.empty()) {
    const Result<std::vector<BenchLine>> lines = bench_suite(options.suite);
    if (!lines.ok()) return lines;
    return choose_lines(options, *lines, &BenchLine::problem);
  }
  std::vector<BenchLine> lines;
  for (const std::string& problem : options.problems) lines.push_back({"", problem, 0});
  return choose_lines(options, lines, &BenchLine::problem);
}

/// Times one line on every named row. Returns an error for bad input only.
Status bench_line(const BenchOptions& options, const BenchLine& line,
                  const std::vector<std::string>& names, Bench& bench, CpuOutput& output,
                  BenchTally& tally) {
  const testkit::Case problem = bench_case(options, line.problem).value();
  Result<std::unique_ptr<testkit::Batch>> batch = testkit::make_batch(problem);
  if (!batch.ok()) return batch.status();
  for (const std::string& name : names) {
    BackendFlags flags = options.backend;
    flags.backend = name;
    if (flags.threads == 0) flags.threads = line.threads;
    const Result<Measurement> measured = bench.measure(**batch, flags.options());
    if (measured.status().code() == StatusCode::kUnsupported) {
      tally.unserved(measured.status());
    } else if (!measured.ok()) {
      return measured.status();
    } else if (!measured->check.problem.empty()) {
      tally.wrong(measured->check, problem, measured->backend, flags.threads);
    } else {
      tally.timed();
      output.row({line.group, testkit::to_string(problem), *measured, bench_work(**batch)});
    }
  }
  return {};
}

int run_cpu_bench(const BenchOptions& options) {
  const Result<std::vector<BenchLine>> lines = cpu_lines(options);
  if (!lines.ok()) return fail(kCommand, lines.status());
  const Result<std::vector<std::string>> names = backend_names(options.backend.backend);
  if (!names.ok()) return fail(kCommand, names.status());
  CpuOutput output(options.format);
  output.header(read_machine());
  Bench bench(options.min_time);
  Progress progress("bench: line");
  BenchTally tally;
  std::set<std::string> seen;
  for (std::size_t i = 0; i < lines->size(); ++i) {
    const BenchLine& line = (*lines)[i];
    // --threads makes the 1-thread and 2-thread lines of a suite the same.
    if (!seen.insert(line.group + line.problem).second && options.backend.threads > 0) continue;
    progress.update(static_cast<std::int64_t>(i) + 1, static_cast<std::int64_t>(lines->size()));
    const Status status = bench_line(options, line, *names, bench, output, tally);
    progress.clear();
    if (!status.ok()) return fail(kCommand, status);
  }
  output.finish(tally);
  return tally.exit_code();
}

/// The suite that is for a GPU, or a named row of one; all else is for the CPU.
bool wants_gpu(const BenchOptions& options) {
  return options.suite == kGpuSuite || options.backend.options().device == DeviceKind::kCuda;
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand("bench", "Time backends; a wrong result is never timed");
  CLI::Option_group* source = command->add_option_group("cases");
  source
      ->add_option("--problem", options->problems,
                   "Problem string, may be repeated (keys: mla info --help)")
      ->type_name("STR")
      ->allow_extra_args(false);
  CLI::Option* suite =
      source
          ->add_option("--suite", options->suite,
                       "Built-in table: cpu, or h200 (122 shapes beside other kernels' times)")
          ->type_name("NAME");
  source->require_option(1);
  add_backend_flags(*command, options->backend,
                    "Row of `mla info`, or all CPU rows that run here (default: the first CPU row\n"
                    "that serves a problem; with --suite h200 the first CUDA row)");
  command
      ->add_option("--filter", options->filter,
                   "Only lines of the suite whose name (cpu: problem) holds this")
      ->needs(suite)
      ->type_name("STR");
  command
      ->add_option("--page-size", options->page_size, "Tokens of a page, whatever the problem says")
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("P");
  command
      ->add_option("--cache", options->cache,
                   "Cache type, whatever the problem says (f16: also of q)")
      ->check(CLI::IsMember({"bf16", "f16", "e4m3", "fp8_ds_mla"}))
      ->type_name("TYPE");
  command
      ->add_option("--min-time", options->min_time,
                   "CPU: seconds of healthy samples per line (0.5)")
      ->check(CLI::Range(0.001, 3600.0))
      ->type_name("S");
  command
      ->add_option("--ranks", options->ranks,
                   "CPU: decode context-parallel on N threads, and time what that adds")
      ->check(CLI::Range(1, 256))
      ->type_name("N");
  command
      ->add_option("--interleave", options->interleave,
                   "With --ranks: consecutive tokens of a rank (1)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31))
      ->type_name("I");
  command->add_option("--format", options->format, "table, csv or json (table)")
      ->check(CLI::IsMember({"table", "csv", "json"}))
      ->type_name("FORMAT");
  command->add_flag_callback(
      "--json", [options] { options->format = "json"; }, "Same as --format json");
  command->footer(
      "Before a line is timed its result is compared with the oracle; large problems are compared\n"
      "on a sample of rows, and the last column says so. On a CPU samples between low probes are\n"
      "discarded; on a GPU a graph chains calls on cold pages, and the median of ten replays is\n"
      "the time (docs/cli.md).\n" +
      example("mla bench --problem b=1,h=128,len=4096 --threads 1"));
  command->callback([options, &exit_code] {
    exit_code = options->ranks > 0 || (under_mpi() && options->suite.empty())
                    ? run_ranks_bench(*options)
                : wants_gpu(*options) ? run_gpu_bench(*options)
                                      : run_cpu_bench(*options);
  });
}

}  // namespace mla::cli
