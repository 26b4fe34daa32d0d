// `mla bench` on a CUDA row: the h200 suite, or any problem.
#include <algorithm>
#include <iostream>

#include "bench_options.hpp"
#include "gpu_output.hpp"
#if MLA_HAS_CUDA
#include "gpu_bench.hpp"
#endif

namespace mla::cli {
namespace {

constexpr const char* kCommand = "bench";

/// The row to time: the named one, or the first CUDA row that runs here.
Result<std::string> choose_row(const std::string& asked) {
  if (!asked.empty()) {
    const Result<BackendInfo> row = find_backend(kCommand, asked, DeviceKind::kCuda);
    return row.ok() ? Result<std::string>(row->name) : row.status();
  }
  std::string reasons;
  for (const BackendInfo& row : backends()) {
    if (row.device != DeviceKind::kCuda) continue;
    if (row.reject_reason.empty()) return row.name;
    reasons += text(reasons.empty() ? "" : "; ", row.name, ": ", row.reject_reason);
  }
  if (reasons.empty()) reasons = "this build has none";
  return Status(StatusCode::kUnsupported,
                text("bench: found no CUDA row that runs here (", reasons, ")"));
}

Result<std::vector<PeerShape>> gpu_lines(const BenchOptions& options, const PeerTable& table) {
  if (!options.suite.empty() && options.suite != kGpuSuite) {
    return bad_argument(kCommand, "--suite", options.suite, "h200 on a CUDA row");
  }
  if (!options.suite.empty()) return choose_lines(options, table.shapes, &PeerShape::name);
  std::vector<PeerShape> lines;
  for (const std::string& problem : options.problems) {
    // A shape of the suite keeps its peers.
    const auto known =
        std::find_if(table.shapes.begin(), table.shapes.end(),
                     [&](const PeerShape& shape) { return shape.problem == problem; });
    PeerShape line;
    line.problem = problem;
    lines.push_back(known == table.shapes.end() ? line : *known);
  }
  return choose_lines(options, lines, &PeerShape::name);
}

#if MLA_HAS_CUDA

GpuRow make_row(const PeerTable& table, const PeerShape& shape, const testkit::Case& problem,
                const GpuMeasurement& measured) {
  GpuRow row;
  row.name = shape.name;
  row.problem = testkit::to_string(problem);
  row.rows = problem.h * *std::max_element(problem.sq.begin(), problem.sq.end());
  row.measured = measured;
  const bool eight_bit = problem.q == DType::kE4M3 && problem.kv == KvFormat::kE4M3;
  row.limit_us = table.limit_us(measured.work.bytes, measured.work.flops, eight_bit);
  row.peer = shape.best_peer(problem.kv,
                             measured.backend == "sm90" ? PeerCards::kHopper : PeerCards::kAny);
  return row;
}

int bench_lines(const BenchOptions& options, const PeerTable& table,
                const std::vector<PeerShape>& lines, const std::string& backend) {
  BackendFlags flags = options.backend;
  flags.backend = backend;
  const Result<std::unique_ptr<GpuBench>> bench = GpuBench::make(flags.options().device_index);
  if (!bench.ok()) return fail(kCommand, bench.status());
  GpuOutput output(options.format);
  output.header((*bench)->info(), backend, table.device);
  Progress progress("bench: line");
  BenchTally tally;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    progress.update(static_cast<std::int64_t>(i) + 1, static_cast<std::int64_t>(lines.size()));
    const testkit::Case problem = bench_case(options, lines[i].problem).value();
    const Result<GpuMeasurement> measured = (*bench)->measure(problem, flags.options());
    progress.clear();
    if (measured.status().code() == StatusCode::kUnsupported) {
      tally.unserved(measured.status());
      output.unserved(lines[i].name.empty() ? lines[i].problem : lines[i].name,
                      measured.status().message());
    } else if (!measured.ok()) {
      return fail(kCommand, measured.status());
    } else if (!measured->check.problem.empty()) {
      tally.wrong(measured->check, problem, measured->backend, 0);
    } else {
      tally.timed();
      output.row(make_row(table, lines[i], problem, *measured));
    }
  }
  output.finish(tally);
  return tally.exit_code();
}

#endif

}  // namespace

int run_gpu_bench(const BenchOptions& options) {
  const Result<PeerTable> table = h200_peers();
  if (!table.ok()) return fail(kCommand, table.status());
  const Result<std::vector<PeerShape>> lines = gpu_lines(options, *table);
  if (!lines.ok()) return fail(kCommand, lines.status());
  const Result<std::string> backend = choose_row(options.backend.backend);
  if (!backend.ok()) return fail(kCommand, backend.status());
#if MLA_HAS_CUDA
  return bench_lines(options, *table, *lines, *backend);
#else
  return fail(kCommand, kExitUnsupported, "this build has no CUDA");
#endif
}

}  // namespace mla::cli
