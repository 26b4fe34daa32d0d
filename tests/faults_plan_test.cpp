// Faults that users met: plans used for another batch, workspaces with garbage, limits of counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "support/rows.hpp"
#include "support/scene.hpp"
#include "testkit/check.hpp"

namespace mla {
namespace {

using namespace test;

/// Runs a laid scene under an existing plan, in an existing workspace.
Status run_under(const DecodePlan& plan, Laid& laid, const Buffer& workspace) {
  return run(plan, laid.tensors, workspace.data(), workspace.size());
}

Output output_of(const Laid& laid) {
  Output output;
  output.dtype = laid.problem.resolved_out_dtype();
  output.heads = laid.problem.num_heads;
  output.rank = laid.problem.kv_lora_rank;
  output.out.assign(laid.out.data(), laid.out.data() + laid.out.size());
  output.lse.assign(laid.lse.as<float>(), laid.lse.as<float>() + laid.lse.size() / 4);
  return output;
}

TEST(Faults, B63_OnePlanServesEveryBatchWithinItsBounds) {
  // Planned and first run with 64 keys each, then with a batch of quite another shape.
  Scene first = random_scene(shape(4), std::vector<std::int64_t>(8, 64));
  first.max_seq_len = 4096;
  Scene second = random_scene(shape(4), {4096, 1, 1, 1, 900, 1, 1, 1}, {1}, 2);
  second.max_seq_len = 4096;
  const Exact right = exact(second);
  for_each_row(first, [&](const std::string& row) {
    Laid laid = lay_out(first);
    const Result<DecodePlan> made = plan(laid.problem, forced(row));
    ASSERT_TRUE(made.ok());
    const Buffer workspace = testkit::make_workspace(*made);
    ASSERT_TRUE(run_under(*made, laid, workspace).ok());
    expect_right(first, output_of(laid));
    Laid other = lay_out(second);
    ASSERT_TRUE(run_under(*made, other, workspace).ok());
    expect_right(second, output_of(other), right);
    EXPECT_TRUE(same_bits(output_of(other), decode(second, row)));
    EXPECT_TRUE(workspace.intact());
  });
}

TEST(Faults, B64_B108_APlanOfAnotherShapeIsRefusedWithTheNumbers) {
  const Scene scene = random_scene(shape(16), std::vector<std::int64_t>(8, 20));
  for_each_row(scene, [&](const std::string& row) {
    const Result<DecodePlan> made = plan(lay_out(scene).problem, forced(row));
    ASSERT_TRUE(made.ok());
    const Buffer workspace = testkit::make_workspace(*made);
    const auto expect = [&](const Scene& other, const std::string& sentence) {
      Laid laid = lay_out(other);
      EXPECT_TRUE(
          refused(run_under(*made, laid, workspace), StatusCode::kInvalidArgument, sentence));
      EXPECT_EQ(laid.lse.as<std::uint32_t>()[0], 0xFFFFFFFFU) << "written in spite of the refusal";
    };
    expect(random_scene(shape(16), std::vector<std::int64_t>(9, 20)),
           "run: q shape: found [9,16,576], needed [8,16,576]");
    expect(random_scene(shape(8), std::vector<std::int64_t>(8, 20)),
           "run: q shape: found [8,8,576], needed [8,16,576]");
    expect(random_scene(shape(16, 32), std::vector<std::int64_t>(8, 20)),
           "run: kv_cache shape: found [11,32,576], needed [any,64,576]");
    expect(random_scene(shape(16), {20, 20, 20, 20, 20}, {2, 2, 2, 1, 1}),
           "run: block_table shape: found [5,3], needed [8,any]");
    expect(random_scene(shape(16), {20, 20, 20, 21, 20, 20, 20, 20}),
           "run: seq_lens[3]: found 21, needed 0 to max_seq_len = 20");
  });
}

TEST(Faults, B65_APlanForAnotherTypeIsRefused) {
  const Scene bf16 = random_scene(shape(32), {200, 1000, 64, 3});
  Scene fp8 = bf16;
  fp8.problem.kv_format = KvFormat::kE4M3;
  for_each_row(bf16, [&](const std::string& row) {
    Laid laid = lay_out(fp8);
    const Result<DecodePlan> made = plan(lay_out(bf16).problem, forced(row));
    const Buffer workspace = testkit::make_workspace(*made);
    EXPECT_TRUE(refused(run_under(*made, laid, workspace), StatusCode::kInvalidArgument,
                        "run: kv_cache dtype: found e4m3, needed bf16"));
    expect_right(fp8, decode(fp8, row));
  });
}

TEST(Faults, B71_B82_TheWorkspaceMayHoldAnything) {
  // A, B, A on one buffer that holds garbage before: right every time, and A equals A.
  const Scene a = random_scene(shape(16), {900, 30, 0, 400});
  const Scene b = random_scene(shape(5, 64, KvFormat::kE4M3), {5000, 5000}, {3});
  const Exact right_a = exact(a);
  const Exact right_b = exact(b);
  for (const std::int64_t splits : {0, 1, 8}) {
    for (const int threads : {1, 4}) {
      PlanOptions options;
      options.num_splits = splits;
      options.num_threads = threads;
      for_each_kernel_row(a, [&](const std::string& row) {
        const Result<DecodePlan> plan_a = plan(lay_out(a).problem, forced(row, options));
        const Result<DecodePlan> plan_b = plan(lay_out(b).problem, forced(row, options));
        ASSERT_TRUE(plan_a.ok() && plan_b.ok());
        for (const unsigned char garbage : {0xFF, 0x7F}) {
          const Buffer workspace(std::max(plan_a->workspace_bytes(), plan_b->workspace_bytes()),
                                 garbage);
          Laid first = lay_out(a), second = lay_out(b), third = lay_out(a);
          ASSERT_TRUE(run_under(*plan_a, first, workspace).ok());
          ASSERT_TRUE(run_under(*plan_b, second, workspace).ok());
          ASSERT_TRUE(run_under(*plan_a, third, workspace).ok());
          expect_right(a, output_of(first), right_a);
          expect_right(b, output_of(second), right_b);
          EXPECT_TRUE(same_bits(output_of(third), output_of(first)));
          EXPECT_TRUE(workspace.intact());
        }
      });
    }
  }
}

TEST(Faults, B72_TheTableMayBeAsWideAsTheLongestContext) {
  Scene scene = random_scene(shape(4), {64});
  scene.max_seq_len = 8192;
  scene.extra_columns = 127;
  Scene longer = random_scene(shape(4), {4096}, {1}, 3);
  longer.max_seq_len = 8192;
  longer.extra_columns = 64;
  for_each_row(scene, [&](const std::string& row) {
    Laid small = lay_out(scene), large = lay_out(longer);
    ASSERT_EQ(small.tensors.block_table.shape[1], large.tensors.block_table.shape[1]);
    const Result<DecodePlan> made = plan(small.problem, forced(row));
    const Buffer workspace = testkit::make_workspace(*made);
    ASSERT_TRUE(run_under(*made, small, workspace).ok());
    expect_right(scene, output_of(small));
    ASSERT_TRUE(run_under(*made, large, workspace).ok());
    expect_right(longer, output_of(large));
  });
}

TEST(Faults, B81_B93_TheWorkspaceIsKnownBeforeTheRunAndDoesNotGrowWithRows) {
  DecodeProblem problem = shape(64);
  problem.num_requests = problem.num_tokens = 16384;
  problem.max_seq_len = 100000;
  DecodeProblem narrow = shape(16);
  narrow.num_requests = narrow.num_tokens = 24576;
  narrow.max_seq_len = 100000;
  for (const std::string& row : serving_rows(problem)) {
    PlanOptions options = forced(row);
    options.num_threads = 8;
    const Result<std::size_t> bytes = workspace_size(problem, options);
    ASSERT_TRUE(bytes.ok());
    EXPECT_LT(*bytes, std::size_t{64} << 20) << row;
    // Below a tenth of q and out: nothing is padded or copied for the whole batch.
    const Result<std::size_t> small = workspace_size(narrow, options);
    ASSERT_TRUE(small.ok());
    EXPECT_LT(static_cast<double>(*small), 0.1 * 24576 * 16 * (576 + 512) * 2) << row;
  }
}

/// L=16, R=0: for counts of requests and tokens, where the width does not matter.
DecodeProblem narrow_shape(std::int64_t heads, std::int64_t page_size) {
  DecodeProblem problem = shape(heads, page_size);
  problem.kv_lora_rank = 16;
  problem.qk_rope_head_dim = 0;
  return problem;
}

TEST(Faults, B83_ManyRequestsAreAllRight) {
  for (const std::size_t requests : {std::size_t{16384}, std::size_t{16385}, std::size_t{17000}}) {
    const Scene scene = random_scene(narrow_shape(16, 4), std::vector<std::int64_t>(requests, 4));
    const Exact right = exact(scene);
    for_each_kernel_row(
        scene, [&](const std::string& row) { expect_right(scene, decode(scene, row), right); });
  }
}

TEST(Faults, B84_MoreThan65535RequestsOrTokens) {
  const Scene wide = random_scene(narrow_shape(1, 1), std::vector<std::int64_t>(65537, 1));
  const Exact right = exact(wide);
  for_each_kernel_row(
      wide, [&](const std::string& row) { expect_right(wide, decode(wide, row), right); });
  // A window keeps 65536 tokens on 65536 keys cheap; with zero queries lse counts the keys.
  DecodeProblem problem = narrow_shape(1, 64);
  problem.sliding_window = 8;
  const Scene deep = with_zero_queries(random_scene(problem, {65536}, {65536}));
  for_each_kernel_row(deep, [&](const std::string& row) {
    const Output output = decode(deep, row);
    for (std::int64_t token = 0; token < 65536; ++token) {
      const double seen = static_cast<double>(std::min<std::int64_t>(8, token + 1));
      ASSERT_NEAR(output.lse_at(token, 0), std::log(seen), 1e-4) << token;
    }
  });
}

TEST(Faults, B85_PromptsOfAFewDozenTokensWithManyHeads) {
  for (const KvFormat kv : {KvFormat::kE4M3, KvFormat::kBF16}) {
    for (const std::int64_t tokens : {66, 67, 128}) {
      DecodeProblem problem = shape(128, 64, kv);
      problem.kv_lora_rank = 64;
      problem.qk_rope_head_dim = 16;
      const Scene scene = random_scene(problem, {tokens}, {tokens});
      const Exact right = exact(scene);
      for_each_kernel_row(
          scene, [&](const std::string& row) { expect_right(scene, decode(scene, row), right); });
    }
  }
}

}  // namespace
}  // namespace mla
