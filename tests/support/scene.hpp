// Scenes: small batches given by their logical content (keys and queries as numbers), laid out in
// memory in any way a test wants - page size, page ids, pool, strides, poison - and decoded by one
// row of the backend table. The same request can so be met alone, in a batch, or at another place
// of the pool, and `exact` gives its result from the numbers alone, without pages, strides or
// library code.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "mla/decode.hpp"
#include "testkit/buffer.hpp"

namespace mla::test {

using testkit::Buffer;

/// One request. Keys are those of this rank, in local order.
struct Request {
  std::int64_t num_tokens = 1;
  std::vector<float> keys;       ///< [S, D]
  std::vector<float> query;      ///< [n, H, D]
  std::int64_t global_len = -1;  ///< G; -1: S
  std::vector<std::vector<std::int64_t>>
      indices;                      ///< sparse: per token, key numbers; kRaw + x: x itself
  std::vector<std::int32_t> pages;  ///< page ids; empty: dealt in a shuffled order
};
inline constexpr std::int64_t kRaw = std::int64_t{1} << 40;

struct Scene {
  DecodeProblem problem;  ///< shape, types and modes; B, T and unset bounds follow the requests
  std::vector<Request> requests;
  float scale = 0.0721687836F;  ///< bmm1_scale; 1/sqrt(192)
  float value_scale = 1.0F;     ///< bmm2_scale
  std::vector<float> sinks, alibi_slopes;
  std::int64_t padding = 0;        ///< rows behind the last request
  std::int64_t max_seq_len = 0;    ///< 0: the longest request
  std::int64_t max_query_len = 0;  ///< 0: the most tokens
  std::int64_t extra_pages = 3;    ///< pages nobody owns
  std::int64_t extra_columns = 2;  ///< of the block table, poison
  bool uniform = false;            ///< no query_start_loc

  std::int64_t head_dim() const { return problem.head_dim(); }
  std::int64_t seq_len(std::size_t b) const {
    return static_cast<std::int64_t>(requests[b].keys.size()) / head_dim();
  }
  std::int64_t num_tokens() const;
};

/// A scene in memory, ready to run. Everything nobody owns is NaN or an id out of the pool.
struct Laid {
  DecodeProblem problem;
  DecodeTensors tensors;
  Buffer q, kv, table, seq_lens, starts, globals, indices, sinks, alibi_slopes, out, lse;
};
Laid lay_out(const Scene& scene);

/// What a run wrote.
struct Output {
  DType dtype = DType::kBF16;
  std::int64_t heads = 0, rank = 0;
  std::vector<std::byte> out;
  std::vector<float> lse;
  std::string error;  ///< why there is no result

  double at(std::int64_t token, std::int64_t head, std::int64_t d) const;
  float lse_at(std::int64_t token, std::int64_t head) const {
    return lse[static_cast<std::size_t>(token * heads + head)];
  }
  bool finite() const;
};

/// Runs and checks guard bands; a failure is reported to GoogleTest and left in `error`.
Output run_laid(Laid& laid, const std::string& row, const PlanOptions& options = {});
Output decode(const Scene& scene, const std::string& row, const PlanOptions& options = {});

/// The contract's formula in double.
struct Exact {
  std::int64_t heads = 0, rank = 0;
  std::vector<double> out, lse;
};
Exact exact(const Scene& scene);

/// Compares by the tolerances of the contract; every row.
void expect_right(const Scene& scene, const Output& found, const Exact& exact);
void expect_right(const Scene& scene, const Output& found);

/// Success when `count` tokens have the same bits in out and lse.
testing::AssertionResult same_bits(const Output& a, std::int64_t token_a, const Output& b,
                                   std::int64_t token_b, std::int64_t count = 1);
testing::AssertionResult same_bits(const Output& a, const Output& b);

/// Keys and queries near N(0,1) from a seed; a request's data depend on the seed alone.
Request random_request(const DecodeProblem& problem, std::int64_t seq_len, std::int64_t num_tokens,
                       std::uint64_t seed);
/// One scene with a request per length; `query_lens` has one entry, or one per request.
Scene random_scene(const DecodeProblem& problem, const std::vector<std::int64_t>& seq_lens,
                   const std::vector<std::int64_t>& query_lens = {1}, std::uint64_t seed = 1);
/// The scene with request b alone.
Scene solo(const Scene& scene, std::size_t b);

/// A problem with the given heads, page size and types.
DecodeProblem shape(std::int64_t heads, std::int64_t page_size = 64, KvFormat kv = KvFormat::kBF16,
                    DType q = DType::kBF16);

/// The values that a query element, or a token of the cache, has once it is stored.
float stored(DType dtype, float value);
std::vector<double> stored_key(const DecodeProblem& problem, const float* key);
void store_key(const DecodeProblem& problem, const float* key, std::byte* address);

/// The scene with all queries 0: every visible key weighs the same, so lse is the log of their
/// number.
Scene with_zero_queries(Scene scene);

/// The part of a one-rank scene that lies on one context-parallel rank.
Scene shard(const Scene& scene, std::int64_t world, std::int64_t rank, std::int64_t interleave);
/// mla::merge of f32 outputs; fails the test when it is refused.
Output merge_outputs(const std::vector<Output>& parts, LseBase base = LseBase::kE);
/// ||a - b|| / ||b|| over all rows.
double relative_error(const Output& a, const std::vector<double>& b);
double relative_error(const Output& a, const Output& b);

/// Runs `check` for each row that serves the scene's problem.
void for_each_row(const Scene& scene, const PlanOptions& options,
                  const std::function<void(const std::string& row)>& check);
void for_each_row(const Scene& scene, const std::function<void(const std::string& row)>& check);
/// The same without cpu_reference, where a shape is large for plain loops: it has no tiles, splits
/// or workspace that a size could break.
void for_each_kernel_row(const Scene& scene,
                         const std::function<void(const std::string& row)>& check);

}  // namespace mla::test
