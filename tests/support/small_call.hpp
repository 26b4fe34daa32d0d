// One small valid call, to be spoilt in one place by a test: B=2 (4 and 6 keys), T=4 (two tokens
// each), H=2, L=16, R=16, pages of 4 tokens, 5 pages.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "mla/decode.hpp"
#include "support/rows.hpp"

namespace mla::test {

struct SmallCall {
  DecodeProblem problem;
  PlanOptions options;
  DecodeTensors tensors;

  std::vector<std::uint16_t> q = std::vector<std::uint16_t>(4 * 2 * 32 + 1, 0x3F80);  // ones
  std::vector<std::uint16_t> kv = std::vector<std::uint16_t>(5 * 4 * 32 + 1, 0x3F80);
  std::vector<std::uint16_t> out = std::vector<std::uint16_t>(4 * 2 * 16, 0xFFFF);
  std::vector<float> lse = std::vector<float>(4 * 2, -1.0F);
  std::vector<std::int32_t> table{1, 2147480000, -1, 4, 0, -7};
  std::vector<std::int32_t> seq_lens{4, 6};
  std::vector<std::int32_t> starts{0, 2, 4};
  std::vector<std::int32_t> globals{4, 6};
  std::vector<std::int32_t> indices{4, 5, -1, 16, 17, 2147480000, 7, 6, 5, 4, 0, 20};
  std::vector<float> per_head{1.0F, 2.0F};
  float nan = std::numeric_limits<float>::quiet_NaN();

  SmallCall() {
    problem.num_requests = 2;
    problem.num_tokens = 4;
    problem.num_heads = 2;
    problem.kv_lora_rank = 16;
    problem.qk_rope_head_dim = 16;
    problem.page_size = 4;
    problem.max_seq_len = 8;
    problem.max_query_len = 2;
    tensors.q = TensorView::contiguous(q.data(), DType::kBF16, {4, 2, 32});
    tensors.kv_cache = TensorView::contiguous(kv.data(), DType::kBF16, {5, 4, 32});
    tensors.block_table = TensorView::contiguous(table.data(), DType::kI32, {2, 3});
    tensors.seq_lens = TensorView::contiguous(seq_lens.data(), DType::kI32, {2});
    tensors.query_start_loc = TensorView::contiguous(starts.data(), DType::kI32, {3});
    tensors.out = TensorView::contiguous(out.data(), DType::kBF16, {4, 2, 16});
    tensors.lse = TensorView::contiguous(lse.data(), DType::kF32, {4, 2});
    tensors.bmm1_scale = 0.25F;
  }
  SmallCall(const SmallCall&) = delete;
  SmallCall& operator=(const SmallCall&) = delete;

  void make_sparse() {
    problem.num_indices = 3;
    tensors.indices = TensorView::contiguous(indices.data(), DType::kI32, {4, 3});
  }
  TensorView head_view() { return TensorView::contiguous(per_head.data(), DType::kF32, {2}); }

  /// Plans and runs; the outputs keep their fill when the call is refused.
  Status run_on(const std::string& row) {
    const Result<DecodePlan> made = plan(problem, forced(row, options));
    if (!made.ok()) return made.status();
    std::vector<double> workspace(made->workspace_bytes() / sizeof(double) + 1);
    return run(*made, tensors, workspace.data(), workspace.size() * sizeof(double));
  }
};

/// How to spoil a call, and the sentence that refuses it.
struct Refusal {
  std::function<void(SmallCall&)> spoil;
  std::string sentence;
};

/// Each spoilt call is refused with its sentence by every row, and nothing is written.
inline void expect_refusals(const std::vector<Refusal>& refusals) {
  for (const std::string& row : runnable_rows()) {
    SCOPED_TRACE(row);
    for (const Refusal& refusal : refusals) {
      SmallCall call;
      refusal.spoil(call);
      EXPECT_TRUE(refused(call.run_on(row), StatusCode::kInvalidArgument, refusal.sentence));
      EXPECT_EQ(std::count(call.out.begin(), call.out.end(), 0xFFFF), 4 * 2 * 16);
      EXPECT_EQ(std::count(call.lse.begin(), call.lse.end(), -1.0F), 4 * 2);
    }
  }
}

}  // namespace mla::test
