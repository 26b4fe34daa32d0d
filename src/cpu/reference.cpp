// The oracle. Slow on purpose: every key of every row is decoded, tested for visibility by the
// formula itself and accumulated in double, in order.
#include "cpu/reference.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/diagnostics.hpp"
#include "core/element.hpp"
#include "core/kv_layout.hpp"
#include "core/stages.hpp"

namespace mla {
namespace {

/// The D values of one query row, latent part first.
std::vector<double> query_row(const DecodeProblem& problem, const DecodeTensors& tensors,
                              std::int64_t token, std::int64_t head) {
  std::vector<double> q;
  for (std::int64_t d = 0; d < problem.head_dim(); ++d) {
    if (tensors.q.given()) {
      q.push_back(load_element(row_address(tensors.q, token, head), problem.q_dtype, d));
    } else if (d < problem.kv_lora_rank) {
      q.push_back(load_element(row_address(tensors.q_nope, token, head), problem.q_dtype, d));
    } else {
      q.push_back(load_element(row_address(tensors.q_pe, token, head), problem.q_dtype,
                          d - problem.kv_lora_rank));
    }
  }
  return q;
}

/// The D values of one cached token.
void decode_key(const DecodeProblem& problem, const std::byte* token, double* key) {
  if (problem.kv_format != KvFormat::kFp8DsMla) {
    const DType dtype = kv_dtype(problem.kv_format);
    for (std::int64_t d = 0; d < problem.head_dim(); ++d) key[d] = load_element(token, dtype, d);
    return;
  }
  for (std::int64_t d = 0; d < fp8_ds_mla::kRank; ++d) {
    const double scale =
        load_element(token + fp8_ds_mla::kScaleOffset, DType::kF32, d / fp8_ds_mla::kScaleGroup);
    key[d] = scale * load_element(token, DType::kE4M3, d);
  }
  for (std::int64_t d = 0; d < fp8_ds_mla::kRope; ++d) {
    key[fp8_ds_mla::kRank + d] = load_element(token + fp8_ds_mla::kRopeOffset, DType::kBF16, d);
  }
}

std::int32_t int32_at(const TensorView& view, std::int64_t index) {
  return static_cast<const std::int32_t*>(view.data)[index];
}

double scale_value(const Scale& scale) { return scale.pointer != nullptr ? *scale.pointer : scale.value; }

/// Where a row stands: its request, its place in it, and the request's lengths. request < 0: padding.
struct RowPlace {
  std::int64_t request = -1;
  std::int64_t position = 0;  // p = G_b - n_b + i
  std::int64_t seq_len = 0;   // S_b
};

RowPlace find_row(const DecodeProblem& problem, const DecodeTensors& tensors, std::int64_t token) {
  for (std::int64_t b = 0; b < problem.num_requests; ++b) {
    const std::int64_t uniform = problem.num_tokens / problem.num_requests;
    const bool ragged = tensors.query_start_loc.given();
    const std::int64_t begin = ragged ? int32_at(tensors.query_start_loc, b) : b * uniform;
    const std::int64_t end = ragged ? int32_at(tensors.query_start_loc, b + 1) : begin + uniform;
    if (token < begin || token >= end) continue;
    RowPlace place;
    place.request = b;
    if (problem.sparse()) return place;
    place.seq_len = int32_at(tensors.seq_lens, b);
    const bool sharded = problem.cp_world > 1 && tensors.causal_seqlens_kv_global.given();
    const std::int64_t global = sharded ? int32_at(tensors.causal_seqlens_kv_global, b) : place.seq_len;
    place.position = global - (end - begin) + (token - begin);
    return place;
  }
  return {};
}

}  // namespace

void reference_row(const DecodeProblem& problem, const DecodeTensors& tensors, std::int64_t token,
                   std::int64_t head, double* out, double* lse) {
  const TensorView& cache = tensors.kv_cache;
  const auto element_bytes = static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  const KvLayout layout{static_cast<const std::byte*>(cache.data), cache.shape[0], problem.page_size,
                        cache.stride[0] * element_bytes, cache.stride[1] * element_bytes};
  const RowPlace place = find_row(problem, tensors, token);
  const std::vector<double> q = query_row(problem, tensors, token, head);
  const double scale = scale_value(tensors.bmm1_scale);
  const double cap = problem.logits_soft_cap;

  // The visible keys and their scores.
  std::vector<const std::byte*> keys;
  std::vector<double> scores;
  std::vector<double> key(static_cast<std::size_t>(problem.head_dim()));
  const std::int64_t num_candidates =
      place.request < 0 ? 0 : (problem.sparse() ? problem.num_indices : place.seq_len);
  for (std::int64_t j = 0; j < num_candidates; ++j) {
    const std::byte* address = nullptr;
    std::int64_t g = j;
    if (problem.sparse()) {
      const std::int64_t slot = int32_at(tensors.indices, token * tensors.indices.stride[0] + j);
      if (slot < 0 || slot >= layout.num_slots()) continue;
      address = layout.slot(slot);
    } else {
      g = ((j / problem.cp_interleave) * problem.cp_world + problem.cp_rank) * problem.cp_interleave +
          j % problem.cp_interleave;
      if (problem.causal && g > place.position) continue;
      if (problem.sliding_window > 0 && g <= place.position - problem.sliding_window) continue;
      const std::int64_t entry =
          place.request * tensors.block_table.stride[0] + j / problem.page_size;
      address = layout.token(int32_at(tensors.block_table, entry), j % problem.page_size);
    }
    decode_key(problem, address, key.data());
    double x = 0;
    for (std::size_t d = 0; d < key.size(); ++d) x += q[d] * key[d];
    x *= scale;
    double s = cap > 0 ? cap * std::tanh(x / cap) : x;
    if (problem.uses_alibi_slopes) {
      s += static_cast<double>(static_cast<const float*>(tensors.alibi_slopes.data)[head]) *
           static_cast<double>(g - place.position);
    }
    keys.push_back(address);
    scores.push_back(s);
  }

  // lse = ln(sum exp(s_j) + [exp(sink)]), out = bmm2_scale * sum exp(s_j - lse) c_j.
  double sink = -std::numeric_limits<double>::infinity();
  if (problem.uses_sinks) sink = static_cast<const float*>(tensors.sinks.data)[head];
  if (!std::isfinite(sink)) sink = -std::numeric_limits<double>::infinity();
  double largest = sink;
  for (double s : scores) largest = std::max(largest, s);
  double natural_lse = -std::numeric_limits<double>::infinity();
  for (std::int64_t d = 0; d < problem.kv_lora_rank; ++d) out[d] = 0;
  if (largest != natural_lse) {
    double sum = std::exp(sink - largest);
    for (double s : scores) sum += std::exp(s - largest);
    natural_lse = largest + std::log(sum);
    for (std::size_t k = 0; k < keys.size(); ++k) {
      decode_key(problem, keys[k], key.data());
      const double weight = std::exp(scores[k] - natural_lse);
      for (std::int64_t d = 0; d < problem.kv_lora_rank; ++d) {
        out[d] += weight * key[static_cast<std::size_t>(d)];
      }
    }
    const double value_scale = scale_value(tensors.bmm2_scale);
    for (std::int64_t d = 0; d < problem.kv_lora_rank; ++d) out[d] *= value_scale;
  }
  *lse = problem.lse_base == LseBase::kTwo ? natural_lse / std::log(2.0) : natural_lse;
}

Status reference_decode(const DecodeProblem& problem, const DecodeTensors& tensors, double* out,
                        double* lse) {
  MLA_RETURN_IF_ERROR(validate_problem(problem, {}));
  MLA_RETURN_IF_ERROR(validate_inputs(problem, tensors));
  MLA_RETURN_IF_ERROR(validate_contents(problem, tensors));
  const std::int64_t num_rows = problem.num_tokens * problem.num_heads;
#pragma omp parallel for schedule(dynamic, 1)
  for (std::int64_t row = 0; row < num_rows; ++row) {
    reference_row(problem, tensors, row / problem.num_heads, row % problem.num_heads,
                  out + row * problem.kv_lora_rank, lse + row);
  }
  return {};
}

}  // namespace mla
