// The flags of `mla bench`, and what they make of its lines.
#pragma once

#include <string>
#include <vector>

#include "cli.hpp"
#include "core/diagnostics.hpp"
#include "testkit/case.hpp"

namespace mla::cli {

/// The suite that is for a GPU.
inline constexpr const char* kGpuSuite = "h200";

struct BenchOptions {
  std::vector<std::string> problems;
  std::string suite;           ///< empty: `problems`
  std::string filter;          ///< of a suite's lines; empty: all
  std::int64_t page_size = 0;  ///< 0: as the problem says
  std::string cache;           ///< empty: as the problem says
  BackendFlags backend;
  std::string format = "table";
  double min_time = 0.5;
  int ranks = 0;  ///< 0: one rank, not sharded
  std::int64_t interleave = 1;
};

/// The problem of a line with --page-size and --cache. kInvalidArgument: no such problem string.
Result<testkit::Case> bench_case(const BenchOptions& options, const std::string& problem);

/// The lines whose `name` holds --filter. kInvalidArgument: there is none, or a problem string is
/// wrong; so bad input is refused before anything is printed or timed.
template <class Line>
Result<std::vector<Line>> choose_lines(const BenchOptions& options, const std::vector<Line>& lines,
                                       std::string Line::*name) {
  std::vector<Line> chosen;
  for (const Line& line : lines) {
    if ((line.*name).find(options.filter) == std::string::npos) continue;
    const Result<testkit::Case> problem = bench_case(options, line.problem);
    if (!problem.ok()) return problem.status();
    chosen.push_back(line);
  }
  if (!chosen.empty()) return chosen;
  return bad_argument("bench", "--filter", options.filter, "a part of a line's name");
}

/// `mla bench` on a CUDA row. Returns the exit code.
int run_gpu_bench(const BenchOptions& options);

/// `mla bench --ranks`. Returns the exit code.
int run_ranks_bench(const BenchOptions& options);

}  // namespace mla::cli
