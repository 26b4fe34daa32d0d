// Every refusal of run() that needs no array's contents, on every row of the table.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/small_call.hpp"

namespace mla {
namespace {

using test::expect_refusals;
using test::refused;
using test::SmallCall;

void split_query(SmallCall& c) {
  c.tensors.q_nope = TensorView::contiguous(c.q.data(), DType::kBF16, {4, 2, 16});
  c.tensors.q_pe = TensorView::contiguous(c.q.data(), DType::kBF16, {4, 2, 16});
  c.tensors.q = {};
}

TEST(ValidateTensors, TheSmallCallItselfIsAccepted) {
  for (const std::string& row : test::runnable_rows()) {
    SmallCall whole;
    EXPECT_TRUE(whole.run_on(row).ok()) << whole.run_on(row).message();
    SmallCall split;
    split_query(split);
    EXPECT_TRUE(split.run_on(row).ok());
    EXPECT_EQ(split.out, whole.out);
    SmallCall sparse;
    sparse.make_sparse();
    EXPECT_TRUE(sparse.run_on(row).ok());
  }
}

TEST(ValidateTensors, QueriesThatDoNotFitAreRefused) {
  expect_refusals({
      {[](auto& c) { c.tensors.q = {}; },
       "run: q: found none, needed a bf16 tensor [4,2,32], or q_nope and q_pe"},
      {[](auto& c) { c.tensors.q_pe = c.tensors.q; },
       "run: q: found q together with q_nope or q_pe, needed either q or the two parts"},
      {[](auto& c) { c.tensors.q.dtype = DType::kF16; }, "run: q dtype: found f16, needed bf16"},
      {[](auto& c) { c.tensors.q.shape[0] = 5; }, "run: q shape: found [5,2,32], needed [4,2,32]"},
      {[](auto& c) { c.tensors.q.shape[1] = 1; }, "run: q shape: found [4,1,32], needed [4,2,32]"},
      {[](auto& c) { c.tensors.q.shape[2] = 16; }, "run: q shape: found [4,2,16], needed [4,2,32]"},
      {[](auto& c) { c.tensors.q.rank = 2; }, "run: q shape: found [4,2], needed [4,2,32]"},
      {[](auto& c) { c.tensors.q.data = nullptr; }, "run: q: found a null pointer, needed memory"},
      {[](auto& c) { c.tensors.q.stride[2] = 2; }, "run: q last stride: found 2, needed 1"},
      {[](auto& c) { c.tensors.q.stride[2] = 0; }, "run: q last stride: found 0, needed 1"},
      {[](auto& c) { split_query(c), c.tensors.q_nope = {}; },
       "run: q_nope: found none, needed a bf16 tensor [4,2,16]"},
      {[](auto& c) { split_query(c), c.tensors.q_pe = {}; },
       "run: q_pe: found none, needed a bf16 tensor [4,2,16]"},
      {[](auto& c) { split_query(c), c.tensors.q_nope.shape[2] = 32; },
       "run: q_nope shape: found [4,2,32], needed [4,2,16]"},
      {[](auto& c) { split_query(c), c.tensors.q_pe.dtype = DType::kE4M3; },
       "run: q_pe dtype: found e4m3, needed bf16"},
      {[](auto& c) { split_query(c), c.problem.qk_rope_head_dim = 0; },
       "run: q_pe shape: found [4,2,16], needed [4,2,0]"},
  });
}

TEST(ValidateTensors, CachesAndTablesThatDoNotFitAreRefused) {
  expect_refusals({
      {[](auto& c) { c.tensors.kv_cache = {}; },
       "run: kv_cache: found none, needed a bf16 tensor [any,4,32]"},
      {[](auto& c) { c.tensors.kv_cache.dtype = DType::kE4M3; },
       "run: kv_cache dtype: found e4m3, needed bf16"},
      {[](auto& c) { c.tensors.kv_cache.shape[1] = 8; },
       "run: kv_cache shape: found [5,8,32], needed [any,4,32]"},
      {[](auto& c) { c.tensors.kv_cache.shape[0] = -1; },
       "run: kv_cache shape: found [-1,4,32], needed [any,4,32]"},
      {[](auto& c) { c.tensors.kv_cache.rank = 4; },
       "run: kv_cache shape: found [5,4,32,0], needed [any,4,32]"},
      {[](auto& c) { c.tensors.kv_cache.data = nullptr; },
       "run: kv_cache: found a null pointer, needed memory"},
      {[](auto& c) { c.tensors.kv_cache.stride[2] = 5; },
       "run: kv_cache last stride: found 5, needed 1"},
      {[](auto& c) { c.tensors.block_table = {}; },
       "run: block_table: found none, needed a i32 tensor [2,any]"},
      {[](auto& c) { c.tensors.block_table.dtype = DType::kF32; },
       "run: block_table dtype: found f32, needed i32"},
      {[](auto& c) { c.tensors.block_table.shape[0] = 4; },
       "run: block_table shape: found [4,3], needed [2,any]"},
      {[](auto& c) { c.tensors.block_table.rank = 1; },
       "run: block_table shape: found [2], needed [2,any]"},
      {[](auto& c) { c.tensors.seq_lens = {}; },
       "run: seq_lens: found none, needed a i32 tensor [2]"},
      {[](auto& c) { c.tensors.seq_lens.shape[0] = 3; },
       "run: seq_lens shape: found [3], needed [2]"},
      {[](auto& c) { c.tensors.seq_lens.stride[0] = 2; },
       "run: seq_lens last stride: found 2, needed 1"},
      {[](auto& c) { c.make_sparse(), c.problem.num_indices = 0; },
       "run: indices: found [4,3], needed none: the plan is dense (num_indices is 0)"},
      {[](auto& c) { c.problem.num_indices = 3; },
       "run: indices: found none, needed a i32 tensor [4,3]"},
      {[](auto& c) { c.make_sparse(), c.tensors.indices.shape[1] = 2; },
       "run: indices shape: found [4,2], needed [4,3]"},
      {[](auto& c) { c.make_sparse(), c.tensors.indices.shape[0] = 2; },
       "run: indices shape: found [2,3], needed [4,3]"},
  });
}

TEST(ValidateTensors, LengthsAndHeadsThatDoNotFitAreRefused) {
  const auto global_view = [](SmallCall& c, std::int64_t count) {
    return TensorView::contiguous(c.globals.data(), DType::kI32, {count});
  };
  expect_refusals({
      {[](auto& c) { c.tensors.query_start_loc.shape[0] = 2; },
       "run: query_start_loc shape: found [2], needed [3]"},
      {[](auto& c) { c.tensors.query_start_loc.dtype = DType::kU8; },
       "run: query_start_loc dtype: found u8, needed i32"},
      {[](auto& c) {
         c.tensors.query_start_loc = {};
         c.problem.num_tokens = 3;
         c.tensors.q.shape[0] = c.tensors.out.shape[0] = c.tensors.lse.shape[0] = 3;
       },
       "run: query_start_loc: found none, needed it, because 3 tokens do not divide among 2 "
       "requests"},
      {[](auto& c) { c.problem.cp_world = 2; },
       "run: causal_seqlens_kv_global: found none, needed a i32 tensor [2]"},
      {[=](auto& c) {
         c.problem.cp_world = 2, c.tensors.causal_seqlens_kv_global = global_view(c, 1);
       },
       "run: causal_seqlens_kv_global shape: found [1], needed [2]"},
      {[](auto& c) { c.problem.uses_sinks = true; },
       "run: sinks: found none, needed a f32 tensor [2]"},
      {[](auto& c) { c.tensors.sinks = c.head_view(); },
       "run: sinks: found [2], needed none: the plan was made without sinks"},
      {[](auto& c) {
         c.problem.uses_sinks = true;
         c.tensors.sinks = c.head_view();
         c.tensors.sinks.dtype = DType::kBF16;
       },
       "run: sinks dtype: found bf16, needed f32"},
      {[](auto& c) { c.problem.uses_alibi_slopes = true; },
       "run: alibi_slopes: found none, needed a f32 tensor [2]"},
      {[](auto& c) { c.tensors.alibi_slopes = c.head_view(); },
       "run: alibi_slopes: found [2], needed none: the plan was made without alibi_slopes"},
      {[](auto& c) {
         c.problem.uses_alibi_slopes = true;
         c.tensors.alibi_slopes = c.head_view();
         c.tensors.alibi_slopes.shape[0] = 1;
       },
       "run: alibi_slopes shape: found [1], needed [2]"},
  });
}

TEST(ValidateTensors, ScalesMustBeGiven) {
  const float infinity = std::numeric_limits<float>::infinity();
  expect_refusals({
      {[](auto& c) { c.tensors.bmm1_scale = Scale(); },
       "run: bmm1_scale: found nan, needed a finite factor, or a pointer to one"},
      {[=](auto& c) { c.tensors.bmm1_scale = infinity; },
       "run: bmm1_scale: found inf, needed a finite factor, or a pointer to one"},
      {[](auto& c) { c.tensors.bmm2_scale = Scale(); },
       "run: bmm2_scale: found nan, needed a finite factor, or a pointer to one"},
      {[](auto& c) { c.tensors.bmm1_scale = Scale(&c.nan); },
       "run: the value bmm1_scale points to: found nan, needed a finite factor"},
      {[](auto& c) { c.tensors.bmm2_scale = Scale(&c.nan); },
       "run: the value bmm2_scale points to: found nan, needed a finite factor"},
  });
}

TEST(ValidateTensors, OutputsThatDoNotFitAreRefused) {
  expect_refusals({
      {[](auto& c) { c.tensors.out = {}; }, "run: out: found none, needed a bf16 tensor [4,2,16]"},
      {[](auto& c) { c.tensors.out.dtype = DType::kF32; },
       "run: out dtype: found f32, needed bf16"},
      {[](auto& c) { c.tensors.out.shape[2] = 32; },
       "run: out shape: found [4,2,32], needed [4,2,16]"},
      {[](auto& c) { c.tensors.out.data = nullptr; },
       "run: out: found a null pointer, needed memory"},
      {[](auto& c) { c.tensors.out.stride[2] = 2; }, "run: out last stride: found 2, needed 1"},
      {[](auto& c) { c.tensors.out.stride[1] = 8; },
       "run: out strides: found 32,8, needed rows that do not overlap"},
      {[](auto& c) { c.tensors.out.stride[0] = 0; },
       "run: out strides: found 0,16, needed rows that do not overlap"},
      {[](auto& c) { c.tensors.out.stride[0] = 16; },
       "run: out strides: found 16,16, needed rows that do not overlap"},
      {[](auto& c) { c.tensors.lse.rank = 1; }, "run: lse shape: found [4], needed [4,2]"},
      {[](auto& c) { c.tensors.lse.dtype = DType::kBF16; },
       "run: lse dtype: found bf16, needed f32"},
      {[](auto& c) { c.tensors.lse.shape[1] = 3; },
       "run: lse shape: found [4,3,1], needed [4,2,1]"},
      {[](auto& c) { c.tensors.lse.data = nullptr; },
       "run: lse: found a null pointer, needed memory"},
      {[](auto& c) { c.tensors.lse.stride[0] = 1; },
       "run: lse strides: found 1,1, needed rows that do not overlap"},
  });
}

TEST(ValidateTensors, MisalignedMemoryIsRefused) {
  for (const std::string& row : test::runnable_rows()) {
    SmallCall call;
    call.tensors.q.data = reinterpret_cast<std::byte*>(call.q.data()) + 1;
    const Status status = call.run_on(row);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message().rfind("run: q address: found 0x", 0), 0U) << status.message();
    EXPECT_NE(status.message().find(", needed a multiple of 2"), std::string::npos);
  }
}

TEST(ValidateTensors, StridesThatLeaveTheAddressSpaceAreRefused) {
  const std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
  const std::int64_t highest = std::numeric_limits<std::int64_t>::max();
  for (const std::string& row : test::runnable_rows()) {
    for (const std::int64_t stride : {lowest, highest, highest / 2, lowest / 2}) {
      SmallCall call;
      for (TensorView* view : {&call.tensors.q, &call.tensors.kv_cache, &call.tensors.block_table,
                               &call.tensors.out, &call.tensors.lse}) {
        const std::int64_t original = view->stride[0];
        view->stride[0] = stride;
        const Status status = call.run_on(row);
        EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << stride;
        EXPECT_NE(status.message().find(" stride"), std::string::npos) << status.message();
        view->stride[0] = original;
      }
      EXPECT_TRUE(call.run_on(row).ok());
    }
  }
}

TEST(ValidateTensors, WorkspacesThatDoNotFitAreRefused) {
  for (const std::string& row : test::runnable_rows()) {
    SCOPED_TRACE(row);
    SmallCall call;
    const Result<DecodePlan> made = plan(call.problem, test::forced(row));
    ASSERT_TRUE(made.ok());
    const std::size_t needed = made->workspace_bytes();
    EXPECT_EQ(*workspace_size(call.problem, test::forced(row)), needed);
    if (needed == 0) {
      EXPECT_TRUE(run(*made, call.tensors, nullptr, 0).ok());
      continue;
    }
    std::vector<double> workspace(needed / sizeof(double) + 3);
    EXPECT_TRUE(refused(run(*made, call.tensors, workspace.data(), needed - 1),
                        StatusCode::kInvalidArgument,
                        "run: workspace_bytes: found " + std::to_string(needed - 1) +
                            ", needed at least " + std::to_string(needed)));
    EXPECT_TRUE(refused(
        run(*made, call.tensors, nullptr, needed), StatusCode::kInvalidArgument,
        "run: workspace: found a null pointer, needed " + std::to_string(needed) + " bytes"));
    const Status status = run(*made, call.tensors, workspace.data() + 1, needed);
    const Status other = run(*made, call.tensors, workspace.data() + 2, needed);
    // One of two neighbouring doubles is not aligned to 16 bytes.
    const Status& misaligned = status.ok() ? other : status;
    EXPECT_NE(misaligned.message().find("needed an address aligned to 16"), std::string::npos);
  }
}

}  // namespace
}  // namespace mla
