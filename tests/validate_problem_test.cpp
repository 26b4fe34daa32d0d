// Every refusal of plan(): operation, argument, found, needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "mla/decode.hpp"
#include "support/rows.hpp"

namespace mla {
namespace {

using test::refused;

constexpr std::int64_t kTooMany = std::int64_t{1} << 31;

DecodeProblem valid_problem() {
  DecodeProblem problem;
  problem.num_requests = 2;
  problem.num_tokens = 4;
  problem.num_heads = 3;
  problem.max_seq_len = 100;
  problem.max_query_len = 2;
  return problem;
}

struct Refusal {
  std::function<void(DecodeProblem&, PlanOptions&)> spoil;
  std::string sentence;
};

void expect_refusals(const std::vector<Refusal>& refusals) {
  for (const Refusal& refusal : refusals) {
    DecodeProblem problem = valid_problem();
    PlanOptions options;
    refusal.spoil(problem, options);
    const Result<DecodePlan> made = plan(problem, options);
    ASSERT_FALSE(made.ok()) << "accepted; needed: " << refusal.sentence;
    EXPECT_TRUE(refused(made.status(), StatusCode::kInvalidArgument, refusal.sentence));
    // The other two entrances give the same sentence.
    const Result<std::size_t> size = workspace_size(problem, options);
    ASSERT_FALSE(size.ok());
    EXPECT_EQ(size.status().message(), refusal.sentence);
    for (const BackendInfo& row : backends(problem, options)) {
      EXPECT_EQ(row.reject_reason, refusal.sentence);
    }
  }
}

TEST(ValidateProblem, CountsOutOfRangeAreRefused) {
  expect_refusals({
      {[](auto& p, auto&) { p.num_requests = -1; },
       "plan: num_requests: found -1, needed 0 to 2147483647"},
      {[](auto& p, auto&) { p.num_requests = kTooMany; },
       "plan: num_requests: found 2147483648, needed 0 to 2147483647"},
      {[](auto& p, auto&) { p.num_tokens = -4; },
       "plan: num_tokens: found -4, needed 0 to 2147483647"},
      {[](auto& p, auto&) { p.num_tokens = kTooMany; },
       "plan: num_tokens: found 2147483648, needed 0 to 2147483647"},
      {[](auto& p, auto&) { p.num_heads = 0; }, "plan: num_heads: found 0, needed 1 to 2147483647"},
      {[](auto& p, auto&) { p.num_heads = -16; },
       "plan: num_heads: found -16, needed 1 to 2147483647"},
      {[](auto& p, auto&) { p.num_heads = kTooMany; },
       "plan: num_heads: found 2147483648, needed 1 to 2147483647"},
      {[](auto& p, auto&) { p.page_size = 0; }, "plan: page_size: found 0, needed 1 to 2147483647"},
      {[](auto& p, auto&) { p.page_size = -64; },
       "plan: page_size: found -64, needed 1 to 2147483647"},
      {[](auto& p, auto&) { p.max_seq_len = -1; },
       "plan: max_seq_len: found -1, needed 0 to 9223372036854775807"},
      {[](auto& p, auto&) { p.max_query_len = -1; },
       "plan: max_query_len: found -1, needed 0 to 9223372036854775807"},
      {[](auto& p, auto&) { p.num_indices = -1; },
       "plan: num_indices: found -1, needed 0 to 2147483647"},
      {[](auto& p, auto&) { p.num_indices = kTooMany; },
       "plan: num_indices: found 2147483648, needed 0 to 2147483647"},
      {[](auto& p, auto&) { p.num_tokens = 65536, p.num_heads = 32768; },
       "plan: num_tokens * num_heads: found 65536 * 32768, needed at most 2147483647 rows"},
  });
}

TEST(ValidateProblem, WidthsThatNoKernelHasAreRefused) {
  expect_refusals({
      {[](auto& p, auto&) { p.kv_lora_rank = 0; },
       "plan: kv_lora_rank: found 0, needed 16 to 65536"},
      {[](auto& p, auto&) { p.kv_lora_rank = -512; },
       "plan: kv_lora_rank: found -512, needed 16 to 65536"},
      {[](auto& p, auto&) { p.kv_lora_rank = 65552; },
       "plan: kv_lora_rank: found 65552, needed 16 to 65536"},
      {[](auto& p, auto&) { p.kv_lora_rank = 500; },
       "plan: kv_lora_rank: found 500, needed a multiple of 16"},
      {[](auto& p, auto&) { p.qk_rope_head_dim = -16; },
       "plan: qk_rope_head_dim: found -16, needed 0 to 65536"},
      {[](auto& p, auto&) { p.qk_rope_head_dim = 65552; },
       "plan: qk_rope_head_dim: found 65552, needed 0 to 65536"},
      {[](auto& p, auto&) { p.qk_rope_head_dim = 8; },
       "plan: qk_rope_head_dim: found 8, needed a multiple of 16"},
      {[](auto& p, auto&) { p.kv_format = KvFormat::kFp8DsMla, p.kv_lora_rank = 256; },
       "plan: kv_lora_rank, qk_rope_head_dim: found 256, 64, needed 512, 64 for an fp8_ds_mla "
       "cache"},
      {[](auto& p, auto&) { p.kv_format = KvFormat::kFp8DsMla, p.qk_rope_head_dim = 0; },
       "plan: kv_lora_rank, qk_rope_head_dim: found 512, 0, needed 512, 64 for an fp8_ds_mla "
       "cache"},
  });
}

TEST(ValidateProblem, TypesThatNoCallHasAreRefused) {
  expect_refusals({
      {[](auto& p, auto&) { p.q_dtype = DType::kF32; },
       "plan: q_dtype: found f32, needed bf16, f16 or e4m3"},
      {[](auto& p, auto&) { p.q_dtype = DType::kNone; },
       "plan: q_dtype: found none, needed bf16, f16 or e4m3"},
      {[](auto& p, auto&) { p.q_dtype = static_cast<DType>(99); },
       "plan: q_dtype: found unknown, needed bf16, f16 or e4m3"},
      {[](auto& p, auto&) { p.out_dtype = DType::kE4M3; },
       "plan: out_dtype: found e4m3, needed bf16, f16 or f32"},
      {[](auto& p, auto&) { p.out_dtype = static_cast<DType>(-1); },
       "plan: out_dtype: found unknown, needed bf16, f16 or f32"},
      {[](auto& p, auto&) { p.kv_format = static_cast<KvFormat>(0); },
       "plan: kv_format: found 0, needed bf16, f16, e4m3 or fp8_ds_mla"},
      {[](auto& p, auto&) { p.lse_base = static_cast<LseBase>(10); },
       "plan: lse_base: found 10, needed e or 2"},
  });
}

TEST(ValidateProblem, ModesThatContradictAreRefused) {
  const float infinity = std::numeric_limits<float>::infinity();
  expect_refusals({
      {[](auto& p, auto&) { p.logits_soft_cap = -1; },
       "plan: logits_soft_cap: found -1, needed a finite number >= 0 (0 is off)"},
      {[=](auto& p, auto&) { p.logits_soft_cap = infinity; },
       "plan: logits_soft_cap: found inf, needed a finite number >= 0 (0 is off)"},
      {[](auto& p, auto&) { p.logits_soft_cap = std::numeric_limits<float>::quiet_NaN(); },
       "plan: logits_soft_cap: found nan, needed a finite number >= 0 (0 is off)"},
      {[](auto& p, auto&) { p.sliding_window = -1; },
       "plan: sliding_window: found -1, needed 0 to 2147483647"},
      {[](auto& p, auto&) { p.cp_world = 0; }, "plan: cp_world: found 0, needed 1 to 2147483647"},
      {[](auto& p, auto&) { p.cp_rank = -1; }, "plan: cp_rank: found -1, needed 0 to 0"},
      {[](auto& p, auto&) { p.cp_world = 4, p.cp_rank = 4; },
       "plan: cp_rank: found 4, needed 0 to 3"},
      {[](auto& p, auto&) { p.cp_interleave = 0; },
       "plan: cp_interleave: found 0, needed 1 to 2147483647"},
      {[](auto& p, auto&) { p.num_indices = 8, p.sliding_window = 128; },
       "plan: sliding_window: found 128, needed 0 in sparse mode, where indices alone choose the "
       "keys"},
      {[](auto& p, auto&) { p.num_indices = 8, p.uses_alibi_slopes = true; },
       "plan: uses_alibi_slopes: found true, needed false in sparse mode, where key positions are "
       "not known"},
  });
}

TEST(ValidateProblem, OptionsOutOfRangeAreRefused) {
  expect_refusals({
      {[](auto&, auto& o) { o.device = static_cast<DeviceKind>(3); },
       "plan: device: found 3, needed cpu or cuda"},
      {[](auto&, auto& o) { o.device_index = -1; },
       "plan: device_index: found -1, needed 0 to 2147483647"},
      {[](auto&, auto& o) { o.num_threads = -1; }, "plan: num_threads: found -1, needed 0 to 4096"},
      {[](auto&, auto& o) { o.num_threads = 4097; },
       "plan: num_threads: found 4097, needed 0 to 4096"},
      {[](auto&, auto& o) { o.num_splits = -1; },
       "plan: num_splits: found -1, needed 0 to 2147483647"},
      {[](auto&, auto& o) { o.num_splits = kTooMany; },
       "plan: num_splits: found 2147483648, needed 0 to 2147483647"},
      {[](auto&, auto& o) { o.fixed_split = -1; },
       "plan: fixed_split: found -1, needed 0 to 2147483647"},
      {[](auto&, auto& o) { o.num_splits = 4, o.fixed_split = 512; },
       "plan: num_splits, fixed_split: found 4, 512, needed at most one of them"},
  });
}

TEST(ValidateProblem, EdgesOfTheRangesAreAccepted) {
  const std::vector<std::function<void(DecodeProblem&, PlanOptions&)>> edges = {
      [](auto&, auto&) {},
      [](auto& p, auto&) { p.num_requests = p.num_tokens = 0; },
      [](auto& p, auto&) { p.num_tokens = 0; },
      [](auto& p, auto&) { p.num_heads = 1; },
      [](auto& p, auto&) { p.kv_lora_rank = 16, p.qk_rope_head_dim = 0; },
      [](auto& p, auto&) { p.page_size = 1; },
      [](auto& p, auto&) { p.page_size = std::numeric_limits<std::int32_t>::max(); },
      [](auto& p, auto&) { p.max_seq_len = std::numeric_limits<std::int64_t>::max(); },
      [](auto& p, auto&) { p.max_query_len = std::numeric_limits<std::int64_t>::max(); },
      [](auto& p, auto&) { p.max_seq_len = 0; },
      [](auto& p, auto&) { p.cp_world = 8, p.cp_rank = 7, p.cp_interleave = 64; },
      [](auto& p, auto&) { p.num_indices = 2048, p.causal = false; },
      [](auto& p, auto&) { p.num_indices = 1, p.uses_sinks = true, p.logits_soft_cap = 30; },
      [](auto& p, auto&) { p.q_dtype = DType::kE4M3, p.kv_format = KvFormat::kFp8DsMla; },
      [](auto& p, auto&) { p.out_dtype = DType::kF32; },
      [](auto&, auto& o) { o.num_threads = 4096; },
      [](auto&, auto& o) { o.fixed_split = 1; },
      [](auto&, auto& o) { o.num_splits = std::numeric_limits<std::int32_t>::max(); },
  };
  for (std::size_t i = 0; i < edges.size(); ++i) {
    for (const std::string& row : test::runnable_rows()) {
      DecodeProblem problem = valid_problem();
      PlanOptions options = test::forced(row);
      edges[i](problem, options);
      const std::vector<std::string> serving = test::serving_rows(problem, options);
      if (std::find(serving.begin(), serving.end(), row) == serving.end()) continue;
      const Result<DecodePlan> made = plan(problem, options);
      EXPECT_TRUE(made.ok()) << i << ' ' << row << ": " << made.status().message();
    }
  }
}

TEST(ValidateProblem, B105_PageBytesCountOneLatentRowPerToken) {
  DecodeProblem problem;
  problem.page_size = 16;
  EXPECT_EQ(kv_page_bytes(problem) * 27, 16 * 576 * 2 * 27);
  problem.kv_format = KvFormat::kE4M3;
  EXPECT_EQ(kv_page_bytes(problem), 16 * 576);
  problem.kv_format = KvFormat::kFp8DsMla;
  EXPECT_EQ(kv_page_bytes(problem), 16 * 656);
  EXPECT_EQ(kv_row_elements(problem), 656);
  EXPECT_EQ(kv_dtype(problem.kv_format), DType::kU8);
  problem.kv_format = KvFormat::kF16;
  problem.kv_lora_rank = 256;
  problem.qk_rope_head_dim = 0;
  EXPECT_EQ(kv_page_bytes(problem), 16 * 256 * 2);
}

}  // namespace
}  // namespace mla
