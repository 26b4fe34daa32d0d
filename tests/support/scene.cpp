#include "support/scene.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "support/rows.hpp"
#include "testkit/check.hpp"
#include "testkit/problem_gen.hpp"
#include "testkit/rng.hpp"

namespace mla::test {
namespace {

// All bits set: NaN in every float type of the library, -1 in int32.
constexpr unsigned char kPoison = 0xFF;
constexpr std::int32_t kFarIds[] = {std::numeric_limits<std::int32_t>::max(), -1, 2147480000};

std::int64_t num_pages(const Scene& scene, std::size_t b) {
  return (scene.seq_len(b) + scene.problem.page_size - 1) / scene.problem.page_size;
}

/// Page ids of each request: given, or dealt from the free ids in a shuffled order.
std::vector<std::vector<std::int32_t>> deal_pages(const Scene& scene, std::int64_t& pool_pages) {
  std::vector<std::vector<std::int32_t>> pages;
  std::vector<std::int32_t> taken;
  std::int64_t needed = 0;
  for (std::size_t b = 0; b < scene.requests.size(); ++b) {
    pages.push_back(scene.requests[b].pages);
    taken.insert(taken.end(), pages.back().begin(), pages.back().end());
    if (pages.back().empty()) needed += num_pages(scene, b);
  }
  std::sort(taken.begin(), taken.end());
  std::vector<std::int32_t> free;
  for (std::int32_t id = 0; static_cast<std::int64_t>(free.size()) < needed + scene.extra_pages;
       ++id) {
    if (!std::binary_search(taken.begin(), taken.end(), id)) free.push_back(id);
  }
  testkit::Rng rng(11, free.size());
  for (std::size_t i = free.size(); i > 1; --i) {
    std::swap(free[i - 1], free[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(i)))]);
  }
  pool_pages = 0;
  for (const std::int32_t id : free) pool_pages = std::max<std::int64_t>(pool_pages, id + 1);
  for (const std::int32_t id : taken) pool_pages = std::max<std::int64_t>(pool_pages, id + 1);
  auto next = free.begin();
  for (std::size_t b = 0; b < pages.size(); ++b) {
    if (!pages[b].empty()) continue;
    pages[b].assign(next, next + num_pages(scene, b));
    next += num_pages(scene, b);
  }
  return pages;
}

TensorView put(Buffer& buffer, const std::vector<std::int32_t>& values) {
  buffer = Buffer(values.size() * 4, 0);
  if (!values.empty()) std::memcpy(buffer.data(), values.data(), buffer.size());
  return TensorView::contiguous(buffer.data(), DType::kI32,
                                {static_cast<std::int64_t>(values.size())});
}

TensorView put(Buffer& buffer, const std::vector<float>& values) {
  buffer = Buffer(values.size() * 4, 0);
  if (!values.empty()) std::memcpy(buffer.data(), values.data(), buffer.size());
  return TensorView::contiguous(buffer.data(), DType::kF32,
                                {static_cast<std::int64_t>(values.size())});
}

void put_query(const Scene& scene, Laid& laid) {
  const DecodeProblem& problem = laid.problem;
  const std::int64_t width = problem.head_dim();
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(problem.q_dtype));
  laid.q = Buffer(static_cast<std::size_t>(problem.num_tokens * problem.num_heads * width * bytes),
                  kPoison);
  std::byte* next = laid.q.data();
  for (const Request& request : scene.requests) {
    testkit::encode(problem.q_dtype, request.query.data(),
                    static_cast<std::int64_t>(request.query.size()), next);
    next += static_cast<std::int64_t>(request.query.size()) * bytes;
  }
  laid.tensors.q = TensorView::contiguous(laid.q.data(), problem.q_dtype,
                                          {problem.num_tokens, problem.num_heads, width});
}

void put_cache(const Scene& scene, Laid& laid, const std::vector<std::vector<std::int32_t>>& pages,
               std::int64_t pool_pages) {
  const DecodeProblem& problem = laid.problem;
  const std::int64_t token_bytes =
      kv_row_elements(problem) *
      static_cast<std::int64_t>(dtype_bytes(kv_dtype(problem.kv_format)));
  laid.kv = Buffer(static_cast<std::size_t>(pool_pages * problem.page_size * token_bytes), kPoison);
  for (std::size_t b = 0; b < scene.requests.size(); ++b) {
    for (std::int64_t j = 0; j < scene.seq_len(b); ++j) {
      const std::int64_t page = pages[b][static_cast<std::size_t>(j / problem.page_size)];
      const std::int64_t slot = page * problem.page_size + j % problem.page_size;
      store_key(problem, scene.requests[b].keys.data() + j * problem.head_dim(),
                laid.kv.data() + slot * token_bytes);
    }
  }
  laid.tensors.kv_cache =
      TensorView::contiguous(laid.kv.data(), kv_dtype(problem.kv_format),
                             {pool_pages, problem.page_size, kv_row_elements(problem)});
}

void put_table(const Scene& scene, Laid& laid,
               const std::vector<std::vector<std::int32_t>>& pages) {
  const DecodeProblem& problem = laid.problem;
  std::int64_t width = scene.extra_columns;
  for (const auto& row : pages) {
    width = std::max(width, static_cast<std::int64_t>(row.size()) + scene.extra_columns);
  }
  std::vector<std::int32_t> table(static_cast<std::size_t>(problem.num_requests * width));
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = kFarIds[i % std::size(kFarIds)];
  for (std::size_t b = 0; b < pages.size(); ++b) {
    std::copy(pages[b].begin(), pages[b].end(),
              table.begin() + static_cast<std::ptrdiff_t>(b) * static_cast<std::ptrdiff_t>(width));
  }
  put(laid.table, table);
  laid.tensors.block_table =
      TensorView::contiguous(laid.table.data(), DType::kI32, {problem.num_requests, width});
}

void put_indices(const Scene& scene, Laid& laid,
                 const std::vector<std::vector<std::int32_t>>& pages) {
  const DecodeProblem& problem = laid.problem;
  std::vector<std::int32_t> rows(static_cast<std::size_t>(problem.num_tokens * problem.num_indices),
                                 -1);
  std::int64_t token = 0;
  for (std::size_t b = 0; b < scene.requests.size(); ++b) {
    for (const std::vector<std::int64_t>& list : scene.requests[b].indices) {
      std::int64_t at = token++ * problem.num_indices;
      for (const std::int64_t entry : list) {
        std::int64_t slot = entry - kRaw;
        if (entry < kRaw / 2) {
          slot = pages[b][static_cast<std::size_t>(entry / problem.page_size)] * problem.page_size +
                 entry % problem.page_size;
        }
        rows[static_cast<std::size_t>(at++)] = static_cast<std::int32_t>(slot);
      }
    }
  }
  put(laid.indices, rows);
  laid.tensors.indices = TensorView::contiguous(laid.indices.data(), DType::kI32,
                                                {problem.num_tokens, problem.num_indices});
}

void put_lengths(const Scene& scene, Laid& laid) {
  std::vector<std::int32_t> seq_lens, globals, starts{0};
  for (std::size_t b = 0; b < scene.requests.size(); ++b) {
    const Request& request = scene.requests[b];
    seq_lens.push_back(static_cast<std::int32_t>(scene.seq_len(b)));
    globals.push_back(request.global_len < 0 ? seq_lens.back()
                                             : static_cast<std::int32_t>(request.global_len));
    starts.push_back(starts.back() + static_cast<std::int32_t>(request.num_tokens));
  }
  laid.tensors.seq_lens = put(laid.seq_lens, seq_lens);
  if (!scene.uniform) laid.tensors.query_start_loc = put(laid.starts, starts);
  if (laid.problem.cp_world > 1) laid.tensors.causal_seqlens_kv_global = put(laid.globals, globals);
}

}  // namespace

std::int64_t Scene::num_tokens() const {
  std::int64_t tokens = padding;
  for (const Request& request : requests) tokens += request.num_tokens;
  return tokens;
}

Laid lay_out(const Scene& scene) {
  Laid laid;
  laid.problem = scene.problem;
  DecodeProblem& problem = laid.problem;
  problem.num_requests = static_cast<std::int64_t>(scene.requests.size());
  problem.num_tokens = scene.num_tokens();
  problem.max_seq_len = scene.max_seq_len;
  problem.max_query_len = std::max<std::int64_t>(1, scene.max_query_len);
  problem.uses_sinks = !scene.sinks.empty();
  problem.uses_alibi_slopes = !scene.alibi_slopes.empty();
  for (std::size_t b = 0; b < scene.requests.size(); ++b) {
    if (scene.max_seq_len == 0)
      problem.max_seq_len = std::max(problem.max_seq_len, scene.seq_len(b));
    if (scene.max_query_len == 0) {
      problem.max_query_len = std::max(problem.max_query_len, scene.requests[b].num_tokens);
    }
  }
  std::int64_t pool_pages = 0;
  const auto pages = deal_pages(scene, pool_pages);
  put_query(scene, laid);
  put_cache(scene, laid, pages, pool_pages);
  put_lengths(scene, laid);
  if (problem.sparse()) {
    put_indices(scene, laid, pages);
  } else {
    put_table(scene, laid, pages);
  }
  if (problem.uses_sinks) laid.tensors.sinks = put(laid.sinks, scene.sinks);
  if (problem.uses_alibi_slopes)
    laid.tensors.alibi_slopes = put(laid.alibi_slopes, scene.alibi_slopes);
  const DType out_dtype = problem.resolved_out_dtype();
  const std::int64_t rows = problem.num_tokens * problem.num_heads;
  laid.out = Buffer(static_cast<std::size_t>(rows * problem.kv_lora_rank) * dtype_bytes(out_dtype),
                    kPoison);
  laid.lse = Buffer(static_cast<std::size_t>(rows) * 4, kPoison);
  laid.tensors.out = TensorView::contiguous(
      laid.out.data(), out_dtype, {problem.num_tokens, problem.num_heads, problem.kv_lora_rank});
  laid.tensors.lse =
      TensorView::contiguous(laid.lse.data(), DType::kF32, {problem.num_tokens, problem.num_heads});
  laid.tensors.bmm1_scale = scene.scale;
  laid.tensors.bmm2_scale = scene.value_scale;
  return laid;
}

Output run_laid(Laid& laid, const std::string& row, const PlanOptions& options) {
  Output output;
  output.dtype = laid.problem.resolved_out_dtype();
  output.heads = laid.problem.num_heads;
  output.rank = laid.problem.kv_lora_rank;
  const Result<DecodePlan> made = plan(laid.problem, forced(row, options));
  Status status = made.ok() ? Status() : made.status();
  if (status.ok()) {
    const Buffer workspace = testkit::make_workspace(*made);
    status = run(*made, laid.tensors, workspace.data(), workspace.size());
    EXPECT_TRUE(workspace.intact()) << row << ": memory next to the workspace was written";
  }
  EXPECT_TRUE(status.ok()) << row << ": " << status.message();
  EXPECT_TRUE(laid.out.intact() && laid.lse.intact())
      << row << ": memory next to an output was written";
  output.error = status.message();
  const std::size_t rows = laid.lse.size() / 4;
  output.out.assign(laid.out.data(), laid.out.data() + laid.out.size());
  output.lse.assign(laid.lse.as<float>(), laid.lse.as<float>() + rows);
  return output;
}

Output decode(const Scene& scene, const std::string& row, const PlanOptions& options) {
  Laid laid = lay_out(scene);
  return run_laid(laid, row, options);
}

double Output::at(std::int64_t token, std::int64_t head, std::int64_t d) const {
  const std::int64_t index = (token * heads + head) * rank + d;
  return testkit::decode(dtype, out.data() + index * static_cast<std::int64_t>(dtype_bytes(dtype)));
}

bool Output::finite() const {
  const auto step = dtype_bytes(dtype);
  for (std::size_t i = 0; i < out.size(); i += step) {
    if (!std::isfinite(testkit::decode(dtype, out.data() + i))) return false;
  }
  return std::none_of(lse.begin(), lse.end(), [](float x) { return std::isnan(x); });
}

testing::AssertionResult same_bits(const Output& a, std::int64_t token_a, const Output& b,
                                   std::int64_t token_b, std::int64_t count) {
  const auto row_bytes = static_cast<std::size_t>(a.heads * a.rank) * dtype_bytes(a.dtype);
  const auto num_heads = static_cast<std::size_t>(a.heads);
  const auto first_a = static_cast<std::size_t>(token_a);
  const auto first_b = static_cast<std::size_t>(token_b);
  if (!a.error.empty() || !b.error.empty())
    return testing::AssertionFailure() << a.error << b.error;
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    if (std::memcmp(a.out.data() + (first_a + i) * row_bytes,
                    b.out.data() + (first_b + i) * row_bytes, row_bytes) != 0) {
      return testing::AssertionFailure() << "out of token " << i << " differs";
    }
    if (std::memcmp(a.lse.data() + (first_a + i) * num_heads,
                    b.lse.data() + (first_b + i) * num_heads, num_heads * sizeof(float)) != 0) {
      return testing::AssertionFailure() << "lse of token " << i << " differs";
    }
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult same_bits(const Output& a, const Output& b) {
  if (a.lse.size() != b.lse.size()) return testing::AssertionFailure() << "shapes differ";
  const std::int64_t tokens = a.heads > 0 ? static_cast<std::int64_t>(a.lse.size()) / a.heads : 0;
  return same_bits(a, 0, b, 0, tokens);
}

void for_each_row(const Scene& scene, const PlanOptions& options,
                  const std::function<void(const std::string& row)>& check) {
  const std::vector<std::string> rows = serving_rows(lay_out(scene).problem, options);
  EXPECT_FALSE(rows.empty());
  for (const std::string& row : rows) {
    SCOPED_TRACE(row);
    check(row);
  }
}

void for_each_row(const Scene& scene, const std::function<void(const std::string& row)>& check) {
  for_each_row(scene, {}, check);
}

void for_each_kernel_row(const Scene& scene,
                         const std::function<void(const std::string& row)>& check) {
  for_each_row(scene, [&](const std::string& row) {
    if (row != "cpu_reference") check(row);
  });
}

}  // namespace mla::test
