// What the integer arrays may say: every refusal, and what must not be refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/small_call.hpp"

namespace mla {
namespace {

using test::expect_refusals;
using test::SmallCall;

void expect_accepted(const std::function<void(SmallCall&)>& change) {
  for (const std::string& row : test::runnable_rows()) {
    SCOPED_TRACE(row);
    SmallCall call;
    change(call);
    const Status status = call.run_on(row);
    EXPECT_TRUE(status.ok()) << status.message();
    const std::int64_t tokens = call.problem.num_tokens;
    EXPECT_EQ(std::count(call.out.begin(), call.out.begin() + tokens * 32, 0xFFFF), 0);
    EXPECT_EQ(std::count(call.lse.begin(), call.lse.begin() + tokens * 2, -1.0F), 0);
  }
}

TEST(ValidateContents, QueryStartsThatAreNotMonotoneAreRefused) {
  expect_refusals({
      {[](auto& c) {
         c.starts = {1, 2, 4};
       },
       "run: query_start_loc[0]: found 1, needed 0"},
      {[](auto& c) {
         c.starts = {-1, 2, 4};
       },
       "run: query_start_loc[0]: found -1, needed 0"},
      {[](auto& c) {
         c.starts = {0, 2, 1};
       },
       "run: query_start_loc[2]: found 1, needed at least query_start_loc[1] = 2"},
      {[](auto& c) {
         c.starts = {0, -2, 4};
       },
       "run: query_start_loc[1]: found -2, needed at least query_start_loc[0] = 0"},
      {[](auto& c) {
         c.starts = {0, 2, 5};
       },
       "run: query_start_loc[2]: found 5, needed at most num_tokens = 4"},
      {[](auto& c) {
         c.starts = {0, 3, 4};
       },
       "run: query length of request 0: found 3, needed at most max_query_len = 2"},
      {[](auto& c) { c.tensors.query_start_loc = {}, c.problem.max_query_len = 1; },
       "run: num_tokens / num_requests: found 2, needed at most max_query_len = 1"},
  });
}

TEST(ValidateContents, LengthsOutOfBoundsAreRefused) {
  expect_refusals({
      {[](auto& c) {
         c.seq_lens = {4, -1};
       },
       "run: seq_lens[1]: found -1, needed 0 to max_seq_len = 8"},
      {[](auto& c) {
         c.seq_lens = {9, 6};
       },
       "run: seq_lens[0]: found 9, needed 0 to max_seq_len = 8"},
      {[](auto& c) {
         c.problem.cp_world = 2;
         c.globals = {4, -6};
         c.tensors.causal_seqlens_kv_global =
             TensorView::contiguous(c.globals.data(), DType::kI32, {2});
       },
       "run: causal_seqlens_kv_global[1]: found -6, needed 0 or more"},
  });
}

TEST(ValidateContents, PagesThatDoNotExistAreRefused) {
  expect_refusals({
      {[](auto& c) { c.table[4] = 5; },
       "run: block_table[1][1]: found 5, needed 0 to 4 (kv_cache has 5 pages)"},
      {[](auto& c) { c.table[0] = -1; },
       "run: block_table[0][0]: found -1, needed 0 to 4 (kv_cache has 5 pages)"},
      {[](auto& c) { c.table[3] = std::numeric_limits<std::int32_t>::max(); },
       "run: block_table[1][0]: found 2147483647, needed 0 to 4 (kv_cache has 5 pages)"},
      {[](auto& c) { c.tensors.block_table.shape[1] = 1, c.tensors.block_table.stride[0] = 3; },
       "run: block_table width: found 1, needed at least 2 pages for seq_lens[1] = 6"},
  });
}

TEST(ValidateContents, UnusedColumnsMayHoldAnything) {
  expect_accepted([](auto& c) { c.table = {1, -2147483647 - 1, 2147483647, 4, 0, 12345}; });
}

TEST(ValidateContents, ATableWiderThanNeededIsAccepted) {
  expect_accepted([](auto& c) {
    c.table.assign(2 * 1000, -1);
    c.table[0] = 1;
    c.table[1000] = 4;
    c.table[1001] = 0;
    c.tensors.block_table = TensorView::contiguous(c.table.data(), DType::kI32, {2, 1000});
  });
}

TEST(ValidateContents, PagesBeforeASlidingWindowMayBeStale) {
  // Request 1: keys 0..5 on two pages; its rows stand at 4 and 5 and see two keys each at most.
  expect_accepted([](auto& c) {
    c.problem.sliding_window = 1;
    c.table[3] = -1;
  });
}

TEST(ValidateContents, TablesOfRequestsWithoutRowsMayBeStale) {
  expect_accepted([](auto& c) {
    c.starts = {0, 2, 2};
    c.table[3] = c.table[4] = -1;
  });
}

TEST(ValidateContents, NoRequestsAndNoTokensAreAccepted) {
  expect_accepted([](auto& c) {
    c.problem.num_requests = c.problem.num_tokens = 0;
    for (TensorView* view : {&c.tensors.q, &c.tensors.out, &c.tensors.lse, &c.tensors.seq_lens,
                             &c.tensors.block_table}) {
      view->shape[0] = 0;
      view->data = nullptr;
    }
    c.tensors.query_start_loc = {};
  });
  // No token, but requests.
  expect_accepted([](auto& c) {
    c.problem.num_tokens = 0;
    c.starts = {0, 0, 0};
    for (TensorView* view : {&c.tensors.q, &c.tensors.out, &c.tensors.lse}) view->shape[0] = 0;
  });
  // No request, but padding rows.
  expect_accepted([](auto& c) {
    c.problem.num_requests = 0;
    c.tensors.seq_lens.shape[0] = c.tensors.block_table.shape[0] = 0;
    c.tensors.query_start_loc.shape[0] = 1;
  });
}

TEST(ValidateContents, AnEmptyPoolServesEmptyRequests) {
  expect_accepted([](auto& c) {
    c.seq_lens = {0, 0};
    c.tensors.kv_cache.shape[0] = 0;
    c.tensors.kv_cache.data = nullptr;
    c.tensors.block_table.shape[1] = 0;
    c.tensors.block_table.data = nullptr;
  });
}

TEST(ValidateContents, SparseModeReadsNeitherTableNorLengths) {
  expect_accepted([](auto& c) {
    c.make_sparse();
    c.tensors.block_table = {};
    c.tensors.seq_lens = {};
  });
  expect_accepted([](auto& c) {
    c.make_sparse();
    c.seq_lens = {-5, 1000000};
    c.table.assign(6, -1);
    c.indices.assign(12, std::numeric_limits<std::int32_t>::min());
  });
}

TEST(ValidateContents, BoundsMayOverEstimateWithoutLimit) {
  expect_accepted([](auto& c) {
    c.problem.max_seq_len = std::numeric_limits<std::int64_t>::max();
    c.problem.max_query_len = std::numeric_limits<std::int64_t>::max();
  });
}

TEST(ValidateContents, OutputsAndInputsMayLieBackwardsOrApart) {
  // Token stride negative in out, head outside of token in lse.
  for (const std::string& row : test::runnable_rows()) {
    SmallCall plain;
    ASSERT_TRUE(plain.run_on(row).ok());
    SmallCall call;
    call.tensors.out.data = call.out.data() + 3 * 32;
    call.tensors.out.stride[0] = -32;
    call.tensors.lse.stride[0] = 1;
    call.tensors.lse.stride[1] = 4;
    ASSERT_TRUE(call.run_on(row).ok());
    for (std::size_t token = 0; token < 4; ++token) {
      EXPECT_TRUE(std::equal(call.out.begin() + static_cast<std::ptrdiff_t>((3 - token) * 32),
                             call.out.begin() + static_cast<std::ptrdiff_t>((4 - token) * 32),
                             plain.out.begin() + static_cast<std::ptrdiff_t>(token * 32)));
      for (std::size_t head = 0; head < 2; ++head) {
        EXPECT_EQ(call.lse[head * 4 + token], plain.lse[token * 2 + head]);
      }
    }
  }
}

TEST(ValidateContents, TheSmallCallHasItsValue) {
  // Ones everywhere: out 1, lse = 0.25 * 32 + ln(visible keys).
  const int visible[] = {3, 4, 5, 6};
  for (const std::string& row : test::runnable_rows()) {
    SmallCall call;
    ASSERT_TRUE(call.run_on(row).ok());
    EXPECT_EQ(std::count(call.out.begin(), call.out.end(), 0x3F80), 4 * 2 * 16);
    for (std::size_t i = 0; i < 8; ++i)
      EXPECT_NEAR(call.lse[i], 8.0 + std::log(visible[i / 2]), 1e-5);
  }
}

}  // namespace
}  // namespace mla
