// A batch on a CUDA device with its plan, and calls on it that were captured once: for tests of
// what a graph promises.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "mla/decode.hpp"
#include "testkit/compare.hpp"
#include "testkit/device_mirror.hpp"
#include "testkit/problem_gen.hpp"
#include "testkit/rng.hpp"

namespace mla::testkit {

/// Why a row cannot run here; empty: it can.
inline std::string missing_reason(const std::string& name) {
  for (const BackendInfo& row : backends()) {
    if (row.name == name) return row.reject_reason;
  }
  return "this build has no row " + name;
}

/// A batch on the device with its plan.
struct DeviceBatch {
  std::unique_ptr<Batch> batch;
  std::unique_ptr<DeviceMirror> mirror;
  std::unique_ptr<DecodePlan> plan;

  DeviceBatch(const std::string& row, const std::string& problem) {
    const Case source = value_or_throw(parse_case(problem));
    batch = value_or_throw(make_batch(source));
    PlanOptions options;
    options.device = DeviceKind::kCuda;
    options.backend = row;
    plan = std::make_unique<DecodePlan>(value_or_throw(mla::plan(batch->problem, options)));
    mirror = value_or_throw(
        DeviceMirror::make(batch->tensors, plan->workspace_bytes(), Buffer::kGuardBytes));
  }

  void enqueue(cudaStream_t stream) {
    throw_if_error(
        run(*plan, mirror->tensors(), mirror->workspace(), plan->workspace_bytes(), stream));
  }
  /// Other lengths, on the host for the oracle and on the device for the kernel.
  void set_lengths(const std::vector<std::int32_t>& lengths) {
    const std::size_t bytes = lengths.size() * sizeof(std::int32_t);
    std::memcpy(batch->tensors.seq_lens.data, lengths.data(), bytes);
    ASSERT_EQ(
        cudaMemcpy(mirror->tensors().seq_lens.data, lengths.data(), bytes, cudaMemcpyHostToDevice),
        cudaSuccess);
  }
  void poison() {
    batch->poison_outputs();
    throw_if_error(mirror->upload_outputs());
  }
  std::string verdict() {
    throw_if_error(mirror->download_outputs());
    const Oracle oracle = value_or_throw(full_oracle(batch->problem, batch->tensors));
    const std::string problem = compare(batch->problem, batch->tensors, oracle).problem;
    return problem.empty() ? guard_damage(batch->out, batch->lse) : problem;
  }
};

/// `calls` calls on the same tensors and workspace, one after the other, captured once.
class CapturedCalls {
 public:
  CapturedCalls(DeviceBatch& call, int calls) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) call.enqueue(stream_);
    check(cudaStreamEndCapture(stream_, &graph_));
    check(cudaGraphInstantiate(&replay_, graph_, 0));
  }
  CapturedCalls(const CapturedCalls&) = delete;
  CapturedCalls& operator=(const CapturedCalls&) = delete;
  ~CapturedCalls() {
    cudaGraphExecDestroy(replay_);
    cudaGraphDestroy(graph_);
    cudaStreamDestroy(stream_);
  }
  void replay() const {
    check(cudaGraphLaunch(replay_, stream_));
    check(cudaStreamSynchronize(stream_));
  }

 private:
  static void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess); }

  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t replay_ = nullptr;
};

/// Lengths of a batch from nothing to `longest`, many of them tiny.
inline std::vector<std::int32_t> random_lengths(Rng& rng, std::int64_t num_requests,
                                                std::uint64_t longest) {
  std::vector<std::int32_t> lengths;
  for (std::int64_t b = 0; b < num_requests; ++b) {
    const std::uint64_t limit = rng.next() % 4 == 0 ? 70 : longest;
    lengths.push_back(static_cast<std::int32_t>(rng.next() % (limit + 1)));
  }
  return lengths;
}

}  // namespace mla::testkit
