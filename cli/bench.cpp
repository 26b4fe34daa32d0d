#include "bench.hpp"

#include <algorithm>
#include <chrono>

#include "core/diagnostics.hpp"
#include "statistics.hpp"
#include "testkit/check.hpp"

namespace mla::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kOracleBudget = 4e5;     // (row, key) pairs, a second or so; more is sampled
constexpr double kSampleSeconds = 0.012;  // runs between two probes
constexpr int kMinKept = 5;
constexpr double kPatience = 8.0;         // times min_seconds, then a line ends with what it has
constexpr double kHealthyFma = 0.93;      // of the best probe; its own scatter is about 2 %
constexpr double kHealthyBandwidth = 0.80;  // scatters more

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

Result<std::vector<BenchLine>> bench_suite(const std::string& name) {
  if (name != "cpu") return bad_argument("bench", "--suite", name, "cpu or h200");
  std::vector<BenchLine> lines;
  for (int threads : {1, 2}) {
    for (int heads : {128, 64, 16, 20, 8, 1}) {
      lines.push_back({"heads, 4096 keys, bf16", text("b=1,h=", heads, ",len=4096"), threads});
    }
  }
  for (int threads : {1, 2}) {
    for (int heads : {16, 128}) {
      lines.push_back({"64 requests, 100 to 4000 keys", text("b=64,h=", heads, ",len=100..4000"), threads});
    }
  }
  for (int heads : {128, 16}) {
    for (const char* type : {"", ",q=f16,kv=f16", ",kv=e4m3", ",kv=fp8_ds_mla"}) {
      lines.push_back({"cache types", text("b=1,h=", heads, ",len=4096", type), 1});
    }
  }
  for (int keys : {1024, 4096, 16384, 65536, 131072}) {
    lines.push_back({"context length, 16 heads", text("b=1,h=16,len=", keys), 1});
  }
  for (int threads : {1, 2}) {
    lines.push_back({"one head, cache in DRAM", "b=1,h=1,len=262144", threads});
  }
  return lines;
}

Bench::Probe Bench::probe(FmaIsa isa, int threads) {
  const Probe found{fma_gflops(isa, threads), bandwidth_.gigabytes_per_second(threads)};
  Probe& best = best_[{isa, threads}];
  best.gflops = std::max(best.gflops, found.gflops);
  best.gbs = std::max(best.gbs, found.gbs);
  return found;
}

bool Bench::healthy(const Probe& found, const Probe& best) const noexcept {
  return found.gflops >= kHealthyFma * best.gflops && found.gbs >= kHealthyBandwidth * best.gbs;
}

Status Bench::time_plan(const DecodePlan& plan, testkit::Batch& batch, Measurement& measurement) {
  const testkit::Buffer workspace = testkit::make_workspace(plan);
  const auto call = [&] { return run(plan, batch.tensors, workspace.data(), workspace.size()); };
  MLA_RETURN_IF_ERROR(call());
  const Clock::time_point calibration = Clock::now();
  MLA_RETURN_IF_ERROR(call());
  const double once = std::max(1e-7, seconds_since(calibration));
  const int repeats = static_cast<int>(std::clamp(kSampleSeconds / once, 1.0, 100'000.0));

  struct Sample {
    double seconds;
    Probe before, after;
  };
  std::vector<Sample> samples;
  std::vector<double> kept;
  const FmaIsa isa = measurement.isa;
  const int threads = measurement.threads;
  const auto keep = [&] {
    // Judged anew each time: a better probe later on shows that an earlier sample was disturbed.
    kept.clear();
    double total = 0.0;
    const Probe& best = best_[{isa, threads}];
    for (const Sample& sample : samples) {
      if (!healthy(sample.before, best) || !healthy(sample.after, best)) continue;
      kept.push_back(sample.seconds);
      total += sample.seconds * repeats;
    }
    return static_cast<int>(kept.size()) >= kMinKept && total >= min_seconds_;
  };
  const Clock::time_point start = Clock::now();
  Probe before = probe(isa, threads);
  do {
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < repeats; ++i) MLA_RETURN_IF_ERROR(call());
    const double seconds = seconds_since(begin) / repeats;
    const Probe after = probe(isa, threads);
    samples.push_back({seconds, before, after});
    before = after;
  } while (!keep() && seconds_since(start) < kPatience * min_seconds_ + kMinKept * once * repeats);

  measurement.samples = static_cast<int>(samples.size());
  measurement.kept = static_cast<int>(kept.size());
  if (kept.empty()) {
    for (const Sample& sample : samples) kept.push_back(sample.seconds);
  }
  measurement.best_ms = 1e3 * *std::min_element(kept.begin(), kept.end());
  measurement.median_ms = 1e3 * median(kept);
  measurement.peak_gflops = best_[{isa, threads}].gflops;
  measurement.peak_gbs = best_[{isa, threads}].gbs;
  return {};
}

Result<Measurement> Bench::measure(testkit::Batch& batch, const PlanOptions& options) {
  const Result<DecodePlan> made = plan(batch.problem, testkit::plan_options(batch.source, options));
  if (!made.ok()) return made.status();
  Measurement measurement;
  measurement.backend = made->backend_name();
  measurement.threads = made->num_workers();
  measurement.isa = fma_isa(measurement.backend);

  const testkit::Buffer workspace = testkit::make_workspace(*made);
  batch.poison_outputs();
  MLA_RETURN_IF_ERROR(run(*made, batch.tensors, workspace.data(), workspace.size()));
  Result<BenchCheck> check = check_outputs(batch, kOracleBudget);
  if (!check.ok()) return check.status();
  measurement.check = std::move(*check);
  if (!measurement.check.problem.empty()) return measurement;
  MLA_RETURN_IF_ERROR(time_plan(*made, batch, measurement));
  return measurement;
}

}  // namespace mla::cli
