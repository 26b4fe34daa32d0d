// Timing of one problem on one backend row, between probes of the machine.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bench_result.hpp"
#include "mla/decode.hpp"
#include "mla/status.hpp"
#include "probes.hpp"
#include "testkit/problem_gen.hpp"

namespace mla::cli {

/// What `mla bench --suite cpu` runs, with the thread count of each line (0: all).
struct BenchLine {
  std::string group;    ///< heading of the table
  std::string problem;
  int threads = 0;
};
/// kInvalidArgument: no such suite.
Result<std::vector<BenchLine>> bench_suite(const std::string& name);

/// One timed line.
struct Measurement {
  std::string backend;
  int threads = 0;
  double best_ms = 0.0;
  double median_ms = 0.0;
  int samples = 0;          ///< all that were taken
  int kept = 0;             ///< those with healthy probes on both sides; 0: best and median are of all
  FmaIsa isa = FmaIsa::kBaseline;
  double peak_gflops = 0.0; ///< best probes of this instruction set and thread count
  double peak_gbs = 0.0;
  BenchCheck check;  ///< before the timing; a wrong result is not timed
};

/// Times plans. Remembers the best probes it has seen: a sample counts only while the machine gives
/// nearly that.
class Bench {
 public:
  /// `min_seconds`: timed seconds that a line should collect.
  explicit Bench(double min_seconds) : min_seconds_(min_seconds) {}

  /// Checks the batch's result first; a wrong one is reported in `Measurement::check`.
  Result<Measurement> measure(testkit::Batch& batch, const PlanOptions& options);

 private:
  struct Probe {
    double gflops = 0.0;
    double gbs = 0.0;
  };
  Probe probe(FmaIsa isa, int threads);
  bool healthy(const Probe& found, const Probe& best) const noexcept;
  Status time_plan(const DecodePlan& plan, testkit::Batch& batch, Measurement& measurement);

  double min_seconds_;
  BandwidthProbe bandwidth_;
  std::map<std::pair<FmaIsa, int>, Probe> best_;
};

}  // namespace mla::cli
