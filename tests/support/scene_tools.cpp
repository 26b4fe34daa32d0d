// What tests do with scenes and outputs: shards, merges, distances.
#include <cmath>

#include "mla/merge.hpp"
#include "support/scene.hpp"

namespace mla::test {

Scene with_zero_queries(Scene scene) {
  for (Request& request : scene.requests) {
    for (float& value : request.query) value = 0;
  }
  return scene;
}

Scene shard(const Scene& scene, std::int64_t world, std::int64_t rank, std::int64_t interleave) {
  Scene part = scene;
  part.problem.cp_world = world;
  part.problem.cp_rank = rank;
  part.problem.cp_interleave = interleave;
  const std::int64_t width = scene.head_dim();
  for (std::size_t b = 0; b < scene.requests.size(); ++b) {
    Request& request = part.requests[b];
    request.global_len = scene.seq_len(b);
    request.keys.clear();
    request.pages.clear();
    for (std::int64_t g = 0; g < scene.seq_len(b); ++g) {
      if ((g / interleave) % world != rank) continue;
      const auto key = scene.requests[b].keys.begin() + g * width;
      request.keys.insert(request.keys.end(), key, key + width);
    }
  }
  return part;
}

Output merge_outputs(const std::vector<Output>& parts, LseBase base) {
  Output merged = parts[0];
  std::vector<AttentionState> states;
  const auto view = [](const Output& part) {
    const auto tokens = static_cast<std::int64_t>(part.lse.size()) / part.heads;
    EXPECT_EQ(part.dtype, DType::kF32);
    return AttentionState{
        TensorView::contiguous(part.out.data(), part.dtype, {tokens, part.heads, part.rank}),
        TensorView::contiguous(part.lse.data(), DType::kF32, {tokens, part.heads})};
  };
  for (const Output& part : parts) states.push_back(view(part));
  const Status status =
      merge(states.data(), static_cast<std::int64_t>(states.size()), view(merged), base);
  EXPECT_TRUE(status.ok()) << status.message();
  return merged;
}

double relative_error(const Output& a, const std::vector<double>& b) {
  double error = 0, norm = 0;
  const std::int64_t width = a.heads * a.rank;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const double difference = a.at(at / width, at % width / a.rank, at % a.rank) - b[i];
    error += difference * difference;
    norm += b[i] * b[i];
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

double relative_error(const Output& a, const Output& b) {
  std::vector<double> values;
  const auto tokens = static_cast<std::int64_t>(b.lse.size()) / b.heads;
  for (std::int64_t i = 0; i < tokens * b.heads * b.rank; ++i) {
    values.push_back(b.at(i / (b.heads * b.rank), i / b.rank % b.heads, i % b.rank));
  }
  return relative_error(a, values);
}

}  // namespace mla::test
