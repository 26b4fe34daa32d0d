// What a scene means: stored values, random content, the formula in double, and the comparison.
#include "support/scene.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "testkit/compare.hpp"
#include "testkit/problem_gen.hpp"
#include "testkit/rng.hpp"

namespace mla::test {
namespace {

// The record of fp8_ds_mla, written down a second time on purpose.
constexpr std::int64_t kRecordLatent = 512, kRecordGroup = 128, kRecordRope = 64;

struct ScoredKey {
  std::int64_t key;
  double score;
};

/// Global position of local key j.
std::int64_t position_of(const DecodeProblem& problem, std::int64_t j) {
  const std::int64_t interleave = problem.cp_interleave;
  return ((j / interleave) * problem.cp_world + problem.cp_rank) * interleave + j % interleave;
}

class RowOracle {
 public:
  RowOracle(const Scene& scene, std::size_t b) : scene_(scene), problem_(scene.problem), b_(b) {
    for (std::int64_t j = 0; j < scene.seq_len(b); ++j) {
      keys_.push_back(
          stored_key(problem_, scene.requests[b].keys.data() + j * problem_.head_dim()));
    }
  }

  /// out[L] and lse of token i, head h.
  double row(std::int64_t i, std::int64_t h, double* out) const {
    const Request& request = scene_.requests[b_];
    const std::int64_t width = problem_.head_dim();
    std::vector<double> q;
    for (std::int64_t d = 0; d < width; ++d) {
      const auto at = static_cast<std::size_t>((i * problem_.num_heads + h) * width + d);
      q.push_back(static_cast<double>(stored(problem_.q_dtype, request.query[at])));
    }
    std::vector<ScoredKey> scored;
    for (const ScoredKey& seen : visible(i)) {
      double x = 0;
      const std::vector<double>& key = keys_[static_cast<std::size_t>(seen.key)];
      for (std::size_t d = 0; d < q.size(); ++d) x += q[d] * key[d];
      x *= static_cast<double>(scene_.scale);
      const auto cap = static_cast<double>(problem_.logits_soft_cap);
      if (cap > 0) x = cap * std::tanh(x / cap);
      if (!scene_.alibi_slopes.empty()) {
        x += static_cast<double>(scene_.alibi_slopes[static_cast<std::size_t>(h)]) * seen.score;
      }
      scored.push_back({seen.key, x});
    }
    return softmax(scored, h, out);
  }

 private:
  /// Visible keys; `score` holds g(j) - p.
  std::vector<ScoredKey> visible(std::int64_t i) const {
    const Request& request = scene_.requests[b_];
    std::vector<ScoredKey> seen;
    if (problem_.sparse()) {
      for (const std::int64_t entry : request.indices[static_cast<std::size_t>(i)]) {
        if (entry < kRaw / 2) seen.push_back({entry, 0});
      }
      return seen;
    }
    const auto num_keys = static_cast<std::int64_t>(keys_.size());
    const std::int64_t global = request.global_len < 0 ? num_keys : request.global_len;
    const std::int64_t p = global - request.num_tokens + i;
    for (std::int64_t j = 0; j < num_keys; ++j) {
      const std::int64_t g = position_of(problem_, j);
      if (problem_.causal && g > p) continue;
      if (problem_.sliding_window > 0 && g <= p - problem_.sliding_window) continue;
      seen.push_back({j, static_cast<double>(g - p)});
    }
    return seen;
  }

  double softmax(const std::vector<ScoredKey>& scored, std::int64_t h, double* out) const {
    const double none = -std::numeric_limits<double>::infinity();
    std::fill_n(out, problem_.kv_lora_rank, 0.0);
    double largest = none;
    double sink = none;
    if (!scene_.sinks.empty())
      sink = static_cast<double>(scene_.sinks[static_cast<std::size_t>(h)]);
    largest = std::max(largest, sink);
    for (const ScoredKey& key : scored) largest = std::max(largest, key.score);
    if (largest == none) return none;
    double sum = std::exp(sink - largest);
    for (const ScoredKey& key : scored) sum += std::exp(key.score - largest);
    const double lse = largest + std::log(sum);
    for (const ScoredKey& key : scored) {
      const double weight = std::exp(key.score - lse) * static_cast<double>(scene_.value_scale);
      for (std::int64_t d = 0; d < problem_.kv_lora_rank; ++d) {
        out[d] += weight * keys_[static_cast<std::size_t>(key.key)][static_cast<std::size_t>(d)];
      }
    }
    return problem_.lse_base == LseBase::kTwo ? lse / std::log(2.0) : lse;
  }

  const Scene& scene_;
  const DecodeProblem& problem_;
  std::size_t b_;
  std::vector<std::vector<double>> keys_;
};

}  // namespace

float stored(DType dtype, float value) {
  std::byte bytes[4];
  testkit::encode(dtype, &value, 1, bytes);
  return static_cast<float>(testkit::decode(dtype, bytes));
}

void store_key(const DecodeProblem& problem, const float* key, std::byte* address) {
  if (problem.kv_format != KvFormat::kFp8DsMla) {
    testkit::encode(kv_dtype(problem.kv_format), key, problem.head_dim(), address);
    return;
  }
  for (std::int64_t group = 0; group < kRecordLatent / kRecordGroup; ++group) {
    const float* values = key + group * kRecordGroup;
    float largest = 0;
    for (std::int64_t i = 0; i < kRecordGroup; ++i)
      largest = std::max(largest, std::fabs(values[i]));
    const float scale = largest > 0 ? largest / 448.0F : 1.0F;
    std::memcpy(address + kRecordLatent + group * 4, &scale, sizeof(scale));
    for (std::int64_t i = 0; i < kRecordGroup; ++i) {
      const float quotient = values[i] / scale;
      testkit::encode(DType::kE4M3, &quotient, 1, address + group * kRecordGroup + i);
    }
  }
  testkit::encode(DType::kBF16, key + kRecordLatent, kRecordRope, address + kRecordLatent + 16);
}

std::vector<double> stored_key(const DecodeProblem& problem, const float* key) {
  std::vector<double> values;
  if (problem.kv_format != KvFormat::kFp8DsMla) {
    for (std::int64_t d = 0; d < problem.head_dim(); ++d) {
      values.push_back(static_cast<double>(stored(kv_dtype(problem.kv_format), key[d])));
    }
    return values;
  }
  std::byte record[kRecordLatent + 16 + 2 * kRecordRope];
  store_key(problem, key, record);
  for (std::int64_t d = 0; d < kRecordLatent; ++d) {
    values.push_back(testkit::decode(DType::kF32, record + kRecordLatent + d / kRecordGroup * 4) *
                     testkit::decode(DType::kE4M3, record + d));
  }
  for (std::int64_t d = 0; d < kRecordRope; ++d) {
    values.push_back(testkit::decode(DType::kBF16, record + kRecordLatent + 16 + 2 * d));
  }
  return values;
}

Exact exact(const Scene& scene) {
  const DecodeProblem& problem = scene.problem;
  const auto rows = static_cast<std::size_t>(scene.num_tokens() * problem.num_heads);
  Exact result;
  result.heads = problem.num_heads;
  result.rank = problem.kv_lora_rank;
  result.out.resize(rows * static_cast<std::size_t>(problem.kv_lora_rank));
  std::size_t row = 0;
  for (std::size_t b = 0; b < scene.requests.size(); ++b) {
    const RowOracle oracle(scene, b);
    for (std::int64_t i = 0; i < scene.requests[b].num_tokens; ++i) {
      for (std::int64_t h = 0; h < problem.num_heads; ++h, ++row) {
        result.lse.push_back(
            oracle.row(i, h, result.out.data() + row * static_cast<std::size_t>(result.rank)));
      }
    }
  }
  // Padding rows hold nothing but the sink.
  const double base = problem.lse_base == LseBase::kTwo ? std::log(2.0) : 1.0;
  for (; row < rows; ++row) {
    const std::size_t h = row % static_cast<std::size_t>(problem.num_heads);
    result.lse.push_back(scene.sinks.empty() ? -std::numeric_limits<double>::infinity()
                                             : static_cast<double>(scene.sinks[h]) / base);
  }
  return result;
}

void expect_right(const Scene& scene, const Output& found, const Exact& exact) {
  ASSERT_TRUE(found.error.empty());
  ASSERT_EQ(found.lse.size(), exact.lse.size());
  const testkit::Tolerance tolerance = testkit::tolerance_for(scene.problem);
  const double base = scene.problem.lse_base == LseBase::kTwo ? std::log(2.0) : 1.0;
  double whole_error = 0, whole = 0;
  for (std::size_t row = 0; row < exact.lse.size(); ++row) {
    const auto token = static_cast<std::int64_t>(row) / exact.heads;
    const auto head = static_cast<std::int64_t>(row) % exact.heads;
    double error = 0, norm = 0;
    for (std::int64_t d = 0; d < exact.rank; ++d) {
      const double right =
          exact.out[row * static_cast<std::size_t>(exact.rank) + static_cast<std::size_t>(d)];
      const double difference = found.at(token, head, d) - right;
      error += difference * difference;
      norm += right * right;
    }
    ASSERT_LE(std::sqrt(error), tolerance.row * std::sqrt(norm))
        << "token " << token << " head " << head;
    whole_error += error;
    whole += norm;
    const double right = exact.lse[row];
    if (std::isinf(right)) {
      ASSERT_EQ(static_cast<double>(found.lse[row]), right)
          << "token " << token << " head " << head;
    } else {
      ASSERT_NEAR(found.lse[row] * base, right * base, 1e-3 + 1e-5 * std::fabs(right * base))
          << "token " << token << " head " << head;
    }
  }
  ASSERT_LE(std::sqrt(whole_error), tolerance.whole * std::sqrt(whole));
}

void expect_right(const Scene& scene, const Output& found) {
  expect_right(scene, found, exact(scene));
}

Request random_request(const DecodeProblem& problem, std::int64_t seq_len, std::int64_t num_tokens,
                       std::uint64_t seed) {
  Request request;
  request.num_tokens = num_tokens;
  testkit::Rng keys(seed, 101);
  testkit::Rng query(seed, 102);
  request.keys.resize(static_cast<std::size_t>(seq_len * problem.head_dim()));
  request.query.resize(
      static_cast<std::size_t>(num_tokens * problem.num_heads * problem.head_dim()));
  for (float& value : request.keys) value = keys.normal();
  for (float& value : request.query) value = query.normal();
  return request;
}

Scene random_scene(const DecodeProblem& problem, const std::vector<std::int64_t>& seq_lens,
                   const std::vector<std::int64_t>& query_lens, std::uint64_t seed) {
  Scene scene;
  scene.problem = problem;
  for (std::size_t b = 0; b < seq_lens.size(); ++b) {
    const std::int64_t num_tokens = query_lens.size() == 1 ? query_lens[0] : query_lens[b];
    scene.requests.push_back(random_request(problem, seq_lens[b], num_tokens, seed * 1000 + b));
  }
  return scene;
}

Scene solo(const Scene& scene, std::size_t b) {
  Scene alone = scene;
  alone.requests = {scene.requests[b]};
  alone.padding = 0;
  return alone;
}

DecodeProblem shape(std::int64_t heads, std::int64_t page_size, KvFormat kv, DType q) {
  DecodeProblem problem;
  problem.num_heads = heads;
  problem.page_size = page_size;
  problem.kv_format = kv;
  problem.q_dtype = q;
  return problem;
}

}  // namespace mla::test
