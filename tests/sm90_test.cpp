// Promises of the sm90 row: its geometry, and what needs a Hopper GPU - replays of one captured
// call with other lengths, and two streams at once. Elsewhere those are skipped with the row's own
// reason.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/sm90/launch.hpp"
#include "testkit/compare.hpp"
#include "testkit/device_mirror.hpp"
#include "testkit/problem_gen.hpp"
#include "testkit/rng.hpp"

namespace mla::testkit {
namespace {

std::string missing_reason() {
  for (const BackendInfo& row : backends()) {
    if (row.name == "sm90") return row.reject_reason;
  }
  return "this build has no sm90 row";
}

sm90::Geometry geometry(std::int64_t heads, std::int64_t max_query_len, std::int64_t tokens,
                        std::int64_t fixed_split, std::int64_t max_seq_len = 131072) {
  constexpr int kMultiprocessors = 132;
  PlanState state;
  state.problem.num_requests = std::min<std::int64_t>(tokens, 64);
  state.problem.max_seq_len = max_seq_len;
  state.problem.num_heads = heads;
  state.problem.max_query_len = max_query_len;
  state.problem.num_tokens = tokens;
  state.options.fixed_split = fixed_split;
  return sm90::make_geometry(state, kMultiprocessors);
}

TEST(Sm90Geometry, BlocksAreAsSmallAsTheRowsOfARequest) {
  EXPECT_EQ(geometry(16, 1, 64, 0).block_rows, 16);
  EXPECT_EQ(geometry(17, 1, 64, 0).block_rows, 32);
  EXPECT_EQ(geometry(33, 1, 64, 0).block_rows, 64);
  EXPECT_EQ(geometry(16, 1'000'000, 1, 0).block_rows, 16);  // one token: the bound over-estimates
  EXPECT_EQ(geometry(16, 1'000'000, 3, 0).block_rows, 64);
}

TEST(Sm90Geometry, LittleToReadIsSharedByManySmallBlocks) {
  EXPECT_EQ(geometry(128, 1, 1, 0, 1024).block_rows, 16);
  EXPECT_EQ(geometry(128, 1, 1, 0, 1024).group, 8);
  EXPECT_EQ(geometry(64, 1, 4, 0, 4096).block_rows, 32);
  EXPECT_EQ(geometry(128, 1, 4, 0, 16384).block_rows, 64);
  // A bound without limit promises nothing.
  EXPECT_EQ(geometry(128, 1, 4, 0, INT64_MAX).block_rows, 64);
  EXPECT_EQ(geometry(16, 1, 4, 0, INT64_MAX).block_rows, 16);
}

TEST(Sm90Geometry, RowsBeyondABlockShareAWorkerAndTheGridFits) {
  for (std::int64_t heads : {64, 65, 128, 129, 512, 4000}) {
    const sm90::Geometry g = geometry(heads, 1, 8, 0);
    EXPECT_EQ(g.group, std::min<std::int64_t>((heads + 63) / 64, 8)) << heads;
    EXPECT_EQ(g.num_ctas, g.num_workers * g.group) << heads;
    EXPECT_LE(g.num_ctas, 132) << heads;
  }
}

TEST(Sm90Geometry, InFixedSplitModeTheKernelDoesNotDependOnTheBatch) {
  for (std::int64_t heads : {1, 8, 16, 128}) {
    for (std::int64_t max_query_len : {1, 2, 4, 8, 1'000'000}) {
      const int alone = geometry(heads, max_query_len, 1, 512).block_rows;
      for (std::int64_t tokens : {2, 3, 64, 4096}) {
        for (std::int64_t keys : {1, 1000, 1'000'000}) {
          EXPECT_EQ(geometry(heads, max_query_len, tokens, 512, keys).block_rows, alone)
              << heads << " heads, at most " << max_query_len << " of " << tokens << " tokens, "
              << keys << " keys";
        }
      }
    }
  }
}

/// A batch on the device with its plan.
struct DeviceBatch {
  std::unique_ptr<Batch> batch;
  std::unique_ptr<DeviceMirror> mirror;
  std::unique_ptr<DecodePlan> plan;

  explicit DeviceBatch(const std::string& problem) {
    const Case source = value_or_throw(parse_case(problem));
    batch = value_or_throw(make_batch(source));
    PlanOptions options;
    options.device = DeviceKind::kCuda;
    options.backend = "sm90";
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
std::vector<std::int32_t> random_lengths(Rng& rng, std::int64_t num_requests,
                                         std::uint64_t longest) {
  std::vector<std::int32_t> lengths;
  for (std::int64_t b = 0; b < num_requests; ++b) {
    const std::uint64_t limit = rng.next() % 4 == 0 ? 70 : longest;
    lengths.push_back(static_cast<std::int32_t>(rng.next() % (limit + 1)));
  }
  return lengths;
}

class Sm90 : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = missing_reason(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

class Sm90Replay : public Sm90, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override { Sm90::SetUp(); }
};

TEST_P(Sm90Replay, ACapturedCallIsRightForAnyLengthsWithinItsBounds) {
  constexpr int kReplays = 60;
  constexpr std::uint64_t kLongest = 1500;
  DeviceBatch call(GetParam());
  const CapturedCalls captured(call, 1);
  Rng rng(17);
  for (int i = 0; i < kReplays; ++i) {
    const auto lengths = random_lengths(rng, call.batch->problem.num_requests, kLongest);
    call.set_lengths(lengths);
    call.poison();
    captured.replay();
    ASSERT_EQ(call.verdict(), "") << "replay " << i << ", lengths "
                                  << testing::PrintToString(lengths);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Sm90Replay,
                         testing::Values("b=5,h=16,len=1500", "b=3,sq=2,h=16,len=1500,page=16",
                                         "b=2,h=64,len=1500", "b=2,h=64,len=1500,maxlen=1000000",
                                         "b=2,h=96,len=1500,window=200,maxlen=1000000",
                                         "b=4,h=8,len=1500,out=f32,sinks=1"));

/// The bits of one row of a 16-bit output, and its lse.
std::vector<std::uint16_t> row_bits(const DeviceBatch& call, std::int64_t token,
                                    std::int64_t head) {
  const TensorView& out = call.batch->tensors.out;
  const auto* row =
      static_cast<const std::uint16_t*>(out.data) + token * out.stride[0] + head * out.stride[1];
  return {row, row + call.batch->problem.kv_lora_rank};
}
float row_lse(const DeviceBatch& call, std::int64_t token, std::int64_t head) {
  const TensorView& lse = call.batch->tensors.lse;
  return static_cast<const float*>(lse.data)[token * lse.stride[0] + head * lse.stride[1]];
}

// Whole results, cut ones, and each kernel.
TEST_F(Sm90, ANotANumberInAQueryIsHandedOnAndStaysInItsRow) {
  constexpr std::uint16_t kNaN = 0x7FC0;  // bf16
  constexpr std::int64_t kHead = 3;
  for (const char* problem :
       {"b=1,h=16,len=40", "b=1,h=16,len=3000", "b=1,h=32,len=3000,maxlen=1000000",
        "b=1,h=64,len=40,maxlen=1000000", "b=2,h=64,len=3000,maxlen=1000000"}) {
    SCOPED_TRACE(problem);
    DeviceBatch call(problem);
    const std::int64_t num_heads = call.batch->problem.num_heads;
    call.enqueue(nullptr);
    ASSERT_EQ(call.verdict(), "");
    std::vector<std::vector<std::uint16_t>> clean;
    for (std::int64_t head = 0; head < num_heads; ++head) clean.push_back(row_bits(call, 0, head));
    const TensorView& q = call.mirror->tensors().q;
    ASSERT_EQ(cudaMemcpy(static_cast<std::uint16_t*>(q.data) + kHead * q.stride[1] + 5, &kNaN,
                         sizeof(kNaN), cudaMemcpyHostToDevice),
              cudaSuccess);
    call.poison();
    call.enqueue(nullptr);
    throw_if_error(call.mirror->download_outputs());
    for (std::int64_t head = 0; head < num_heads; ++head) {
      if (head != kHead) {
        EXPECT_EQ(row_bits(call, 0, head), clean[static_cast<std::size_t>(head)]) << head;
        continue;
      }
      EXPECT_TRUE(std::isnan(row_lse(call, 0, head)));
      for (const std::uint16_t bits : row_bits(call, 0, head)) EXPECT_GT(bits & 0x7FFF, 0x7F80);
    }
  }
}

// Each replay runs three dependent calls on one workspace: a call may start before the one before
// it has ended, and finds the counters as that one leaves them.
TEST_F(Sm90, TenThousandReplaysOfThreeDependentCallsAreRightOnASample) {
  constexpr int kReplays = 10'000;
  constexpr int kSample = 50;
  constexpr std::uint64_t kLongest = 4000;
  for (const char* problem : {"b=6,h=16,len=4000", "b=2,sq=2,h=64,len=4000,maxlen=1000000"}) {
    DeviceBatch call(problem);
    const CapturedCalls captured(call, 3);
    Rng rng(23);
    for (int i = 0; i < kReplays / 2; ++i) {
      const auto lengths = random_lengths(rng, call.batch->problem.num_requests, kLongest);
      call.set_lengths(lengths);
      const bool sampled = i % kSample == 0;
      if (sampled) call.poison();
      captured.replay();
      if (sampled) {
        ASSERT_EQ(call.verdict(), "")
            << problem << ", replay " << i << ", lengths " << testing::PrintToString(lengths);
      }
    }
  }
}

TEST_F(Sm90, TwoStreamsWithTwoWorkspacesGiveTheBitsOfOne) {
  constexpr int kLaunches = 200;
  DeviceBatch first("b=3,h=16,len=100:3000:700,seed=1");
  DeviceBatch second("b=2,h=64,len=2000:900,maxlen=1000000,seed=2");
  std::vector<std::vector<std::byte>> alone;
  for (DeviceBatch* call : {&first, &second}) {
    call->enqueue(nullptr);
    ASSERT_EQ(call->verdict(), "");
    alone.emplace_back(call->batch->out.data(), call->batch->out.data() + call->batch->out.size());
    call->poison();
  }
  cudaStream_t streams[2] = {};
  for (cudaStream_t& stream : streams) {
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  }
  for (int i = 0; i < kLaunches; ++i) {
    first.enqueue(streams[0]);
    second.enqueue(streams[1]);
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  int idx = 0;
  for (DeviceBatch* call : {&first, &second}) {
    ASSERT_EQ(call->verdict(), "");
    ASSERT_EQ(std::memcmp(alone[static_cast<std::size_t>(idx++)].data(), call->batch->out.data(),
                          call->batch->out.size()),
              0);
  }
  for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace mla::testkit
