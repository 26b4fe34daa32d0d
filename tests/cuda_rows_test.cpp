// Promises of every CUDA row that need a GPU to be seen: replays of one captured call with other
// lengths, streams side by side, what a NaN in a query reaches. Where a row cannot run, its tests
// are skipped with the row's own reason.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "support/device_batch.hpp"

namespace mla::testkit {
namespace {

/// A test of one row of the backend table.
class CudaRow : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (const std::string reason = missing_reason(GetParam()); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Rows, CudaRow, testing::Values("sm90", "cuda", "cuda_163k", "cuda_99k"),
                         [](const auto& param) { return std::string(param.param); });

/// 60 replays of one captured call, each with other lengths.
void replay_with_other_lengths(const std::string& row, const std::string& problem) {
  constexpr int kReplays = 60;
  constexpr std::uint64_t kLongest = 1500;
  SCOPED_TRACE(problem);
  DeviceBatch call(row, problem);
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

TEST_P(CudaRow, ACapturedCallIsRightForAnyLengthsWithinItsBounds) {
  for (const char* problem :
       {"b=5,h=16,len=1500", "b=3,sq=2,h=16,len=1500,page=16", "b=2,h=64,len=1500",
        "b=2,h=64,len=1500,maxlen=1000000", "b=2,h=96,len=1500,window=200,maxlen=1000000",
        "b=4,h=8,len=1500,out=f32,sinks=1"}) {
    replay_with_other_lengths(GetParam(), problem);
  }
}

// B52: speculative tokens of requests whose table has one row each.
TEST_P(CudaRow, ACapturedRaggedCallIsRightForAnyLengthsWithinItsBounds) {
  replay_with_other_lengths(GetParam(), "b=3,sq=3:0:5,h=16,len=1500,page=16");
}

class PortableRow : public CudaRow {};
INSTANTIATE_TEST_SUITE_P(Rows, PortableRow, testing::Values("cuda", "cuda_163k", "cuda_99k"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(PortableRow, ACapturedCallOfAnyCacheIsRightForAnyLengthsWithinItsBounds) {
  for (const char* problem :
       {"b=4,h=16,len=1500,kv=e4m3", "b=2,h=64,len=1500,kv=e4m3,q=e4m3,sq=2",
        "b=3,h=32,len=1500,kv=fp8_ds_mla", "b=3,h=128,len=1500,kv=f16,q=f16,l=256"}) {
    replay_with_other_lengths(GetParam(), problem);
  }
}

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
TEST_P(CudaRow, ANotANumberInAQueryIsHandedOnAndStaysInItsRow) {
  constexpr std::uint16_t kNaN = 0x7FC0;  // bf16
  constexpr std::int64_t kHead = 3;
  for (const char* problem :
       {"b=1,h=16,len=40", "b=1,h=16,len=3000", "b=1,h=32,len=3000,maxlen=1000000",
        "b=1,h=64,len=40,maxlen=1000000", "b=2,h=64,len=3000,maxlen=1000000"}) {
    SCOPED_TRACE(problem);
    DeviceBatch call(GetParam(), problem);
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
TEST_P(CudaRow, TenThousandReplaysOfThreeDependentCallsAreRightOnASample) {
  constexpr int kReplays = 10'000;
  constexpr int kSample = 50;
  constexpr std::uint64_t kLongest = 4000;
  for (const char* problem : {"b=6,h=16,len=4000", "b=2,sq=2,h=64,len=4000,maxlen=1000000"}) {
    DeviceBatch call(GetParam(), problem);
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

TEST_P(CudaRow, TwoStreamsWithTwoWorkspacesGiveTheBitsOfOne) {
  constexpr int kLaunches = 200;
  DeviceBatch first(GetParam(), "b=3,h=16,len=100:3000:700,seed=1");
  DeviceBatch second(GetParam(), "b=2,h=64,len=2000:900,maxlen=1000000,seed=2");
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
