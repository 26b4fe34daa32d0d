#include "gpu_bench.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/diagnostics.hpp"
#include "statistics.hpp"

namespace mla::cli {
namespace {

constexpr double kOracleBudget = 2e5;    // (row, key) pairs
constexpr std::int64_t kColdCaches = 4;  // times the L2 between two uses of a page
constexpr std::int64_t kColdBytes = 240'000'000;
constexpr int kMinCalls = 20;
constexpr int kMaxCalls = 1024;
constexpr double kReplayBytes = 6e9;   // about 1.5 ms of reading ...
constexpr double kReplayFlops = 1e12;  // ... or of arithmetic, are enough for a replay
constexpr int kEnoughCalls = 300;      // for calls that cost mostly their launch
constexpr double kShareOfFree = 0.8;
constexpr double kWarmMs = 80.0;  // of replays before the timed ones
constexpr int kMaxWarm = 400;
constexpr int kReplays = 10;

Result<GpuInfo> read_info(int device_index) {
  GpuInfo info;
  cudaDeviceProp properties{};
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess || device_index >= count) {
    cudaGetLastError();
    return Status(
        StatusCode::kUnsupported,
        text("bench: CUDA device ", device_index, ": found ",
             counted == cudaSuccess ? text(count, " devices") : cudaGetErrorString(counted)));
  }
  MLA_RETURN_IF_ERROR(cuda_status("cudaSetDevice", cudaSetDevice(device_index)));
  MLA_RETURN_IF_ERROR(
      cuda_status("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, device_index)));
  MLA_RETURN_IF_ERROR(cuda_status("cudaDriverGetVersion", cudaDriverGetVersion(&info.driver)));
  MLA_RETURN_IF_ERROR(cuda_status("cudaRuntimeGetVersion", cudaRuntimeGetVersion(&info.runtime)));
  info.name = properties.name;
  info.multiprocessors = properties.multiProcessorCount;
  info.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  info.l2_bytes = properties.l2CacheSize;
  return info;
}

/// Pages between the last use of a page in one replay and its first in the next. The uses of a page
/// are a whole round of the pool apart.
std::int64_t reuse_distance(std::int64_t pages_per_replay, std::int64_t pool_pages) {
  return pages_per_replay <= pool_pages ? pages_per_replay : pages_per_replay % pool_pages;
}

}  // namespace

Result<std::unique_ptr<GpuBench>> GpuBench::make(int device_index) {
  const Result<GpuInfo> info = read_info(device_index);
  if (!info.ok()) return info.status();
  std::unique_ptr<GpuBench> bench(new GpuBench(device_index));
  bench->info_ = *info;
  MLA_RETURN_IF_ERROR(
      cuda_status("cudaStreamCreateWithFlags",
                  cudaStreamCreateWithFlags(bench->stream_.receive(), cudaStreamNonBlocking)));
  return bench;
}

/// Decides how many calls the graph has and fills their slots.
Status GpuBench::place(GpuCalls& calls, GpuMeasurement& found) {
  const std::int64_t pages = calls.pages_per_call();
  if (pages > pool_.num_pages()) {
    return {StatusCode::kUnsupported,
            text("bench: pages of a call: found ", pages, ", needed at most ", pool_.num_pages(),
                 " (the pool in device memory)")};
  }
  const std::int64_t cold_bytes = std::max(kColdBytes, kColdCaches * info_.l2_bytes);
  const auto page_bytes = static_cast<std::int64_t>(pool_.page_bytes());
  const std::int64_t cold_pages = (cold_bytes + page_bytes - 1) / page_bytes;
  const double for_time =
      std::min({kReplayBytes / found.work.bytes, kReplayFlops / std::max(found.work.flops, 1.0),
                static_cast<double>(kEnoughCalls)});
  const auto for_cold =
      static_cast<double>(cold_pages) / static_cast<double>(std::max<std::int64_t>(pages, 1));
  auto count = static_cast<int>(
      std::clamp(std::ceil(std::max(for_time, for_cold)), double{kMinCalls}, double{kMaxCalls}));
  // Past the end of the pool the order begins again: not where the next replay begins.
  const auto is_cold = [&](int n) {
    return reuse_distance(n * pages, pool_.num_pages()) >= cold_pages;
  };
  for (int n = count; n < count + kMinCalls && n <= kMaxCalls; ++n) {
    if (!is_cold(n)) continue;
    count = n;
    break;
  }
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  MLA_RETURN_IF_ERROR(cuda_status("cudaMemGetInfo", cudaMemGetInfo(&free_bytes, &total_bytes)));
  const double room =
      static_cast<double>(memory_.bytes()) + kShareOfFree * static_cast<double>(free_bytes);
  const double fit = room / static_cast<double>(calls.slot_bytes());
  if (fit < 2.0) {
    return {StatusCode::kUnsupported, text("bench: q and outputs: found ", calls.slot_bytes(),
                                           " bytes a call, needed at most ", room / 2)};
  }
  count = static_cast<int>(std::min<double>(count, fit));
  found.calls = count;
  found.cold = is_cold(count);
  MLA_RETURN_IF_ERROR(memory_.reserve(static_cast<std::size_t>(count) * calls.slot_bytes()));
  calls.place(memory_.data(), count);
  return calls.upload(stream_.get());
}

Status GpuBench::check_first(const DecodePlan& plan, GpuCalls& calls, GpuMeasurement& found) {
  MLA_RETURN_IF_ERROR(
      run(plan, calls.device_tensors(0), workspace_.data(), plan.workspace_bytes(), stream_.get()));
  MLA_RETURN_IF_ERROR(synchronise(stream_.get()));
  MLA_RETURN_IF_ERROR(calls.download_first(stream_.get()));
  calls.name_host_pages();
  Result<BenchCheck> check = check_outputs(calls.batch(), kOracleBudget);
  if (!check.ok()) return check.status();
  found.check = std::move(*check);
  return {};
}

Status GpuBench::capture(const DecodePlan& plan, const GpuCalls& calls,
                         CudaGraphExec& graph) const {
  CudaGraph captured;
  MLA_RETURN_IF_ERROR(
      cuda_status("cudaStreamBeginCapture",
                  cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeRelaxed)));
  Status status;
  for (int call = 0; call < calls.count() && status.ok(); ++call) {
    status = run(plan, calls.device_tensors(call), workspace_.data(), plan.workspace_bytes(),
                 stream_.get());
  }
  // Ended in any case: a stream that captures is of no other use.
  const Status ended =
      cuda_status("cudaStreamEndCapture", cudaStreamEndCapture(stream_.get(), captured.receive()));
  MLA_RETURN_IF_ERROR(status);
  MLA_RETURN_IF_ERROR(ended);
  MLA_RETURN_IF_ERROR(cuda_status("cudaGraphInstantiate",
                                  cudaGraphInstantiate(graph.receive(), captured.get(), 0)));
  return cuda_status("cudaGraphUpload", cudaGraphUpload(graph.get(), stream_.get()));
}

/// Whether call 0 gives the checked bits inside the graph too.
Status GpuBench::check_graph(GpuCalls& calls, const CudaGraphExec& graph,
                             GpuMeasurement& found) const {
  const auto copy_of = [](const testkit::Buffer& buffer) {
    return std::vector<std::byte>(buffer.data(), buffer.data() + buffer.size());
  };
  const testkit::Batch& batch = calls.batch();
  const std::vector<std::byte> out = copy_of(batch.out);
  const std::vector<std::byte> lse = copy_of(batch.lse);
  MLA_RETURN_IF_ERROR(calls.poison_first(stream_.get()));
  MLA_RETURN_IF_ERROR(cuda_status("cudaGraphLaunch", cudaGraphLaunch(graph.get(), stream_.get())));
  MLA_RETURN_IF_ERROR(synchronise(stream_.get()));
  MLA_RETURN_IF_ERROR(calls.download_first(stream_.get()));
  if (std::memcmp(out.data(), batch.out.data(), out.size()) != 0)
    found.check.problem = "out: the graph gave other bits";
  if (std::memcmp(lse.data(), batch.lse.data(), lse.size()) != 0)
    found.check.problem = "lse: the graph gave other bits";
  return {};
}

Status GpuBench::time_graph(const CudaGraphExec& graph, GpuMeasurement& found) const {
  const auto launch = [&] {
    return cuda_status("cudaGraphLaunch", cudaGraphLaunch(graph.get(), stream_.get()));
  };
  CudaEvent events[kReplays + 1];
  for (CudaEvent& event : events) {
    MLA_RETURN_IF_ERROR(cuda_status("cudaEventCreate", cudaEventCreate(event.receive())));
  }
  const auto record = [&](int i) {
    return cuda_status("cudaEventRecord", cudaEventRecord(events[i].get(), stream_.get()));
  };
  const auto elapsed_ms = [&](int i, float& ms) {
    return cuda_status("cudaEventElapsedTime",
                       cudaEventElapsedTime(&ms, events[i].get(), events[i + 1].get()));
  };
  float once = 0.0F;
  MLA_RETURN_IF_ERROR(record(0));
  MLA_RETURN_IF_ERROR(launch());
  MLA_RETURN_IF_ERROR(record(1));
  MLA_RETURN_IF_ERROR(synchronise(stream_.get()));
  MLA_RETURN_IF_ERROR(elapsed_ms(0, once));

  // Everything is enqueued at once, so that the card neither waits for the host nor cools down.
  const int warm = static_cast<int>(
      std::clamp(std::ceil(kWarmMs / std::max(1e-3, double{once})), 1.0, double{kMaxWarm}));
  for (int i = 0; i < warm; ++i) MLA_RETURN_IF_ERROR(launch());
  MLA_RETURN_IF_ERROR(record(0));
  for (int i = 0; i < kReplays; ++i) {
    MLA_RETURN_IF_ERROR(launch());
    MLA_RETURN_IF_ERROR(record(i + 1));
  }
  found.clock_before = clock_.megahertz();
  MLA_RETURN_IF_ERROR(synchronise(stream_.get()));
  found.clock_after = clock_.megahertz();
  std::vector<double> samples;
  for (int i = 0; i < kReplays; ++i) {
    float ms = 0.0F;
    MLA_RETURN_IF_ERROR(elapsed_ms(i, ms));
    samples.push_back(1e3 * static_cast<double>(ms) / found.calls);
  }
  found.replays = kReplays;
  found.median_us = median(samples);
  found.best_us = *std::min_element(samples.begin(), samples.end());
  found.worst_us = *std::max_element(samples.begin(), samples.end());
  return {};
}

Result<GpuMeasurement> GpuBench::measure(const testkit::Case& problem, const PlanOptions& options) {
  const testkit::CaseLengths lengths = testkit::case_lengths(problem);
  const Result<DecodePlan> made =
      plan(testkit::decode_problem(problem, lengths), testkit::plan_options(problem, options));
  if (!made.ok()) return made.status();
  if (lengths.num_tokens == 0) return bad_argument("bench", "query tokens", 0, "at least 1");
  Result<std::unique_ptr<testkit::Batch>> batch = testkit::make_batch_without_cache(problem);
  if (!batch.ok()) return batch.status();
  MLA_RETURN_IF_ERROR(pool_.prepare(problem, stream_.get()));

  GpuMeasurement found;
  found.backend = made->backend_name();
  found.work = bench_work(**batch);
  GpuCalls calls(std::move(*batch), pool_);
  MLA_RETURN_IF_ERROR(place(calls, found));
  MLA_RETURN_IF_ERROR(workspace_.reserve(std::max<std::size_t>(made->workspace_bytes(), 1)));
  MLA_RETURN_IF_ERROR(cuda_status(
      "cudaMemsetAsync", cudaMemsetAsync(workspace_.data(), 0, workspace_.bytes(), stream_.get())));
  MLA_RETURN_IF_ERROR(check_first(*made, calls, found));
  if (!found.check.problem.empty()) return found;
  CudaGraphExec graph;
  MLA_RETURN_IF_ERROR(capture(*made, calls, graph));
  MLA_RETURN_IF_ERROR(check_graph(calls, graph, found));
  if (!found.check.problem.empty()) return found;
  MLA_RETURN_IF_ERROR(time_graph(graph, found));
  return found;
}

}  // namespace mla::cli
