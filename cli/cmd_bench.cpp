// `mla bench`: times of checked results, between probes of the machine, beside what it could give.
#include <iomanip>
#include <iostream>
#include <memory>

#include "bench.hpp"
#include "bench_options.hpp"
#include "cli.hpp"
#include "core/diagnostics.hpp"
#include "machine.hpp"
#include "testkit/check.hpp"

namespace mla::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kCommand = "bench";

/// Everything that is printed about one line.
struct Row {
  std::string group;
  std::string problem;
  Measurement measured;
  BenchWork work;

  double gflops() const { return work.flops / (measured.median_ms * 1e6); }
  double gbs() const { return work.bytes / (measured.median_ms * 1e6); }
  double fma_percent() const { return percent(gflops(), measured.peak_gflops); }
  double dram_percent() const { return percent(gbs(), measured.peak_gbs); }
  static double percent(double part, double whole) { return whole > 0 ? 100 * part / whole : 0.0; }
};

/// Three or four digits that mean something.
std::string milliseconds(double value) { return fixed(value, value < 1 ? 4 : value < 10 ? 3 : value < 100 ? 2 : 1); }

class Output {
 public:
  explicit Output(std::string format) : format_(std::move(format)) {}

  void header(const MachineInfo& machine) {
    if (format_ == "json") {
      document_ = {{"version", version()},         {"commit", build_commit()},
                   {"date", utc_now()},            {"cpu", machine.cpu_name},
                   {"usable_cpus", machine.usable_cpus}, {"clock_mhz", machine.clock_mhz},
                   {"rows", Json::array()}};
      return;
    }
    std::cout << "# mla bench " << version() << ", commit " << build_commit() << ", " << utc_now() << '\n'
              << "# " << machine.cpu_name << ", " << machine.usable_cpus << " CPUs usable, "
              << fixed(machine.clock_mhz, 0) << " MHz now, ";
    for (const CacheInfo& cache : machine.caches) {
      if (cache.type != "Instruction") std::cout << 'L' << cache.level << ' ' << size_text(cache.bytes) << ' ';
    }
    std::cout << '\n'
              << "# median over samples whose FMA and DRAM probes, before and after, were near the best seen\n"
                 "# FLOP = keys * heads * query tokens * 2 * (L + R + L); %FMA is of the f32 FMA probe; bytes =\n"
                 "# cached tokens once + q + out; %DRAM is of the DRAM read probe, and more than 100 is cache\n";
    if (format_ == "csv") {
      std::cout << "group,problem,backend,threads,best_ms,median_ms,gflops,gbs,fma_percent,dram_percent,"
                   "fma_peak_gflops,dram_peak_gbs,fma_isa,samples,kept,checked_rows,all_rows_checked,error\n";
    }
  }

  void row(const Row& row) {
    if (format_ == "json") json_row(row);
    else if (format_ == "csv") csv_row(row);
    else table_row(row);
    std::cout << std::flush;
  }

  void finish(int wrong) {
    const std::string verdict = text("wrong values: ", wrong, wrong == 0 ? " OK" : " FAILED");
    if (format_ == "json") {
      document_["wrong_values"] = wrong;
      print_json(document_);
    } else {
      std::cout << (format_ == "csv" ? "# " : "") << verdict << '\n';
    }
  }

 private:
  void json_row(const Row& row) {
    const Measurement& m = row.measured;
    document_["rows"].push_back({{"group", row.group},
                                 {"problem", row.problem},
                                 {"backend", m.backend},
                                 {"threads", m.threads},
                                 {"best_ms", m.best_ms},
                                 {"median_ms", m.median_ms},
                                 {"gflops", row.gflops()},
                                 {"gbs", row.gbs()},
                                 {"fma_percent", row.fma_percent()},
                                 {"dram_percent", row.dram_percent()},
                                 {"fma_peak_gflops", m.peak_gflops},
                                 {"dram_peak_gbs", m.peak_gbs},
                                 {"fma_isa", to_string(m.isa)},
                                 {"samples", m.samples},
                                 {"kept", m.kept},
                                 {"checked_rows", m.checked_rows},
                                 {"all_rows_checked", m.all_rows_checked},
                                 {"error", m.error}});
  }

  static void csv_row(const Row& row) {
    const Measurement& m = row.measured;
    std::cout << '"' << row.group << "\",\"" << row.problem << "\"," << m.backend << ',' << m.threads << ','
              << m.best_ms << ',' << m.median_ms << ',' << row.gflops() << ',' << row.gbs() << ','
              << row.fma_percent() << ',' << row.dram_percent() << ',' << m.peak_gflops << ','
              << m.peak_gbs << ',' << to_string(m.isa) << ',' << m.samples << ',' << m.kept << ','
              << m.checked_rows << ',' << m.all_rows_checked << ',' << m.error << '\n';
  }

  void table_row(const Row& row) {
    const Measurement& m = row.measured;
    if (first_ || row.group != group_) {
      std::cout << '\n' << (row.group.empty() ? "problems" : row.group) << '\n'
                << "problem                             backend         thr   best ms    median  GFLOP/s  %FMA"
                   "    GB/s %DRAM   kept  checked\n";
    }
    first_ = false;
    group_ = row.group;
    std::cout << std::left << std::setw(35) << row.problem << ' ' << std::setw(15) << m.backend << std::right
              << std::setw(4) << m.threads << std::setw(10) << milliseconds(m.best_ms) << std::setw(10)
              << milliseconds(m.median_ms) << std::setw(9) << fixed(row.gflops(), 1) << std::setw(6)
              << fixed(row.fma_percent(), 0) << std::setw(8) << fixed(row.gbs(), 1) << std::setw(6)
              << fixed(row.dram_percent(), 0) << std::setw(7) << text(m.kept, '/', m.samples) << "  "
              << (m.all_rows_checked ? "all" : "sample") << ' ' << m.checked_rows << " rows"
              << (m.kept == 0 ? "  disturbed: no probe stayed healthy" : "") << '\n';
  }

  std::string format_;
  bool first_ = true;
  std::string group_;
  Json document_;
};

/// The rows to time; "" is the library's choice.
Result<std::vector<std::string>> backend_names(const std::string& asked) {
  if (asked != "all") return std::vector<std::string>{asked};
  std::vector<std::string> names;
  for (const BackendInfo& row : backends()) {
    // The oracle is not meant to be fast, and a GPU is timed in another way.
    if (row.device != DeviceKind::kCpu || row.name == "cpu_reference") continue;
    if (row.reject_reason.empty()) names.push_back(row.name);
  }
  return names;
}

Result<std::vector<BenchLine>> bench_lines(const BenchOptions& options) {
  if (!options.suite.empty()) {
    Result<std::vector<BenchLine>> lines = bench_suite(options.suite);
    if (!lines.ok()) return lines;
    return filter_lines(options, *lines, &BenchLine::problem);
  }
  std::vector<BenchLine> lines;
  for (const std::string& problem : options.problems) lines.push_back({"", problem, 0});
  return lines;
}

/// Times one line on every named row. Returns an error for bad input only.
Status bench_line(const BenchOptions& options, const BenchLine& line, const std::vector<std::string>& names,
                  Bench& bench, Output& output, int& wrong, int& timed, Status& unserved) {
  const Result<testkit::Case> parsed = bench_case(options, line.problem);
  if (!parsed.ok()) return parsed.status();
  Result<std::unique_ptr<testkit::Batch>> batch = testkit::make_batch(*parsed);
  if (!batch.ok()) return batch.status();
  for (const std::string& name : names) {
    BackendFlags flags = options.backend;
    flags.backend = name;
    if (flags.threads == 0) flags.threads = line.threads;
    Result<Measurement> measured = bench.measure(**batch, flags.options());
    if (!measured.ok()) {
      if (measured.status().code() != StatusCode::kUnsupported) return measured.status();
      unserved = measured.status();
      continue;
    }
    if (!measured->problem.empty()) {
      ++wrong;
      std::cout.flush();
      std::cerr << "mla bench: not timed, the result is wrong: " << measured->problem << '\n'
                << testkit::repro_line(*parsed, measured->backend, flags.threads) << std::endl;
      continue;
    }
    ++timed;
    output.row({line.group, testkit::to_string(*parsed), *measured, bench_work(**batch)});
  }
  return {};
}

/// Whether the lines go to a GPU: a row of one is named, or the suite is for one.
bool wants_gpu(const BenchOptions& options) {
  if (options.suite == kGpuSuite) return true;
  for (const BackendInfo& row : backends()) {
    if (row.name == options.backend.backend) return row.device == DeviceKind::kCuda;
  }
  return false;
}

int run_bench(const BenchOptions& options) {
  if (wants_gpu(options)) return run_gpu_bench(options);
  const Result<std::vector<BenchLine>> lines = bench_lines(options);
  if (!lines.ok()) return fail(kCommand, lines.status());
  const Result<std::vector<std::string>> names = backend_names(options.backend.backend);
  if (!names.ok()) return fail(kCommand, names.status());
  Output output(options.format);
  output.header(read_machine());
  Bench bench(options.min_time);
  Progress progress("bench: line");
  int wrong = 0;
  int timed = 0;
  Status unserved;
  std::vector<std::string> seen;
  for (std::size_t i = 0; i < lines->size(); ++i) {
    const BenchLine& line = (*lines)[i];
    // --threads makes the 1-thread and 2-thread lines of a suite the same.
    if (options.backend.threads > 0 && std::find(seen.begin(), seen.end(), line.group + line.problem) != seen.end()) {
      continue;
    }
    seen.push_back(line.group + line.problem);
    progress.update(static_cast<std::int64_t>(i) + 1, static_cast<std::int64_t>(lines->size()));
    const Status status = bench_line(options, line, *names, bench, output, wrong, timed, unserved);
    progress.clear();
    if (!status.ok()) return fail(kCommand, status);
  }
  output.finish(wrong);
  if (wrong > 0) return kExitCheckFailed;
  return timed == 0 && !unserved.ok() ? fail(kCommand, unserved) : kExitDone;
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand("bench", "Time backends; a wrong result is never timed");
  CLI::Option_group* source = command->add_option_group("cases");
  source->add_option("--problem", options->problems, "Problem string, may be repeated (keys: mla info --help)")
      ->type_name("STR")
      ->allow_extra_args(false);
  source->add_option("--suite", options->suite, "Built-in table: cpu, or h200 (122 shapes beside other kernels' times)")->type_name("NAME");
  source->require_option(1);
  add_backend_flags(*command, options->backend,
                    "Row of `mla info`, or all CPU rows that run here (default: the first CPU row that serves\n"
                    "a problem; with --suite h200 the first CUDA row)");
  command->add_option("--filter", options->filter, "Only lines of the suite whose name holds this")->type_name("STR");
  command->add_option("--page-size", options->page_size, "Tokens of a page, whatever the problem says")
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("P");
  command->add_option("--cache", options->cache, "Cache type, whatever the problem says: bf16, f16 (q too), e4m3, fp8_ds_mla")
      ->check(CLI::IsMember({"bf16", "f16", "e4m3", "fp8_ds_mla"}))
      ->type_name("TYPE");
  command->add_option("--min-time", options->min_time, "CPU: seconds of healthy samples per line (0.5)")
      ->check(CLI::Range(0.001, 3600.0))
      ->type_name("S");
  command->add_option("--format", options->format, "table, csv or json (table)")
      ->check(CLI::IsMember({"table", "csv", "json"}))
      ->type_name("FORMAT");
  command->add_flag("--json", options->json, "Same as --format json");
  command->footer(
      "Before a line is timed its result is compared with the oracle; large problems are compared on a\n"
      "sample of rows, and the last column says so. On a CPU samples between low probes are discarded; on a\n"
      "GPU a graph chains calls on cold pages, and the median of ten replays counts (docs/cli.md).\n" +
      example("mla bench --problem b=1,h=128,len=4096 --threads 1"));
  command->callback([options, &exit_code] {
    if (options->json) options->format = "json";
    exit_code = run_bench(*options);
  });
}

}  // namespace mla::cli
