#include "testkit/compare.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "core/diagnostics.hpp"
#include "core/stages.hpp"
#include "cpu/reference.hpp"
#include "testkit/rng.hpp"

namespace mla::testkit {
namespace {

constexpr double kLn2 = 0.693147180559945309417232121458;
constexpr std::uint64_t kSampleStream = 8;  // problem_gen.cpp has 1 to 7
constexpr int kMaxSamples = 2000;
// A row whose keys all weigh next to nothing beside a sink has a result below the normal range of its
// type. One step of the f16 subnormals; a weight below the f32 normals times the largest value.
constexpr double kF16Underflow = 0x1p-24;
constexpr double kF32Underflow = 0x1p-116;

double to_natural(const DecodeProblem& problem, double lse) noexcept {
  return problem.lse_base == LseBase::kTwo ? lse * kLn2 : lse;
}

const std::byte* element(const TensorView& view, std::int64_t token, std::int64_t head) noexcept {
  return static_cast<const std::byte*>(view.data) +
         (token * view.stride[0] + head * view.stride[1]) *
             static_cast<std::int64_t>(dtype_bytes(view.dtype));
}

/// The request that owns a token, or b for a padding row.
std::int64_t request_of(const Batch& batch, std::int64_t token) {
  const auto& starts = batch.lengths.query_start_loc;
  const auto next = std::upper_bound(starts.begin(), starts.end(), token);
  return next - starts.begin() - 1;
}

/// Keys that the oracle walks for one row of the token.
double row_cost(const Batch& batch, std::int64_t token) {
  const std::int64_t request = request_of(batch, token);
  if (request >= batch.source.b) return 1.0;
  const std::int64_t keys = batch.source.k > 0
                                ? batch.source.k
                                : batch.lengths.seq_lens[static_cast<std::size_t>(request)];
  return static_cast<double>(keys + 1);
}

/// Collects errors row by row.
class Comparer {
 public:
  Comparer(const DecodeProblem& problem, const DecodeTensors& tensors)
      : problem_(problem), tensors_(tensors), tolerance_(tolerance_for(problem)),
        underflow_(tensors.out.dtype == DType::kF16 ? kF16Underflow : kF32Underflow) {}

  void add(const Oracle& oracle) {
    for (std::size_t i = 0; i < oracle.rows.size(); ++i) {
      add_row(oracle.rows[i].token, oracle.rows[i].head,
              oracle.out.data() + i * static_cast<std::size_t>(problem_.kv_lora_rank), oracle.lse[i]);
    }
  }

  /// Rows that have no reference: written at all?
  void find_nan() {
    const auto step = static_cast<std::int64_t>(dtype_bytes(tensors_.out.dtype));
    for (std::int64_t token = 0; token < problem_.num_tokens && result_.passed(); ++token) {
      for (std::int64_t head = 0; head < problem_.num_heads; ++head) {
        const std::byte* out = element(tensors_.out, token, head);
        for (std::int64_t d = 0; d < problem_.kv_lora_rank; ++d) {
          if (!std::isnan(decode(tensors_.out.dtype, out + d * step))) continue;
          return report(token, head, d, text("out[", token, ',', head, ',', d, "] is NaN"));
        }
        if (tensors_.lse.given() && std::isnan(decode(DType::kF32, element(tensors_.lse, token, head)))) {
          return report(token, head, -1, text("lse[", token, ',', head, "] is NaN"));
        }
      }
    }
  }

  Comparison result() {
    result_.error = reference_square_ > 0.0 ? std::sqrt(error_square_ / reference_square_)
                                            : std::sqrt(error_square_);
    if (!std::isfinite(error_square_)) result_.error = std::numeric_limits<double>::infinity();
    if (result_.passed() && !(result_.error <= tolerance_.whole)) {
      result_.problem = text("out: whole error ", result_.error, ", allowed ", tolerance_.whole);
    }
    return result_;
  }

 private:
  void add_row(std::int64_t token, std::int64_t head, const double* reference, double lse) {
    const std::int64_t width = problem_.kv_lora_rank;
    const std::byte* out = element(tensors_.out, token, head);
    const auto step = static_cast<std::int64_t>(dtype_bytes(tensors_.out.dtype));
    double error_square = 0.0;
    double reference_square = 0.0;
    double largest = -1.0;
    std::int64_t worst = 0;
    for (std::int64_t d = 0; d < width; ++d) {
      const double found = decode(tensors_.out.dtype, out + d * step);
      double difference = std::abs(found - reference[d]);
      if (!std::isfinite(difference)) difference = std::numeric_limits<double>::infinity();
      if (reference[d] != 0.0) difference = std::max(0.0, difference - underflow_);
      error_square += difference * difference;
      reference_square += reference[d] * reference[d];
      if (difference > largest) {
        largest = difference;
        worst = d;
      }
    }
    error_square_ += error_square;
    reference_square_ += reference_square;
    // A reference of zeros is a row without keys (or q-independent zeros): nothing may be added to it.
    const bool zero_row = reference_square == 0.0;
    const double error = zero_row ? (error_square > 0.0 ? std::numeric_limits<double>::infinity() : 0.0)
                                  : std::sqrt(error_square / reference_square);
    result_.row_error = std::max(result_.row_error, error);
    if (!(error <= tolerance_.row)) {
      report(token, head, worst,
             text("out[", token, ',', head, ',', worst, "] is ",
                  decode(tensors_.out.dtype, out + worst * step), ", reference ", reference[worst],
                  zero_row ? " exactly" : "", "; row error ", error, ", allowed ", tolerance_.row));
    }
    if (tensors_.lse.given()) add_lse(token, head, lse, zero_row);
  }

  void add_lse(std::int64_t token, std::int64_t head, double reference, bool zero_row) {
    const double found = decode(DType::kF32, element(tensors_.lse, token, head));
    bool right = false;
    if (std::isinf(reference)) {
      right = found == reference;
    } else {
      const double expected = to_natural(problem_, reference);
      const double error = std::abs(to_natural(problem_, found) - expected);
      const double allowed = tolerance_.lse_absolute + tolerance_.lse_relative * std::abs(expected);
      right = error <= allowed;
      result_.lse_error = std::isnan(error) ? std::numeric_limits<double>::infinity()
                                            : std::max(result_.lse_error, error);
      // Without keys only the sink is left, and it is returned as given.
      if (zero_row && problem_.uses_sinks && problem_.lse_base == LseBase::kE) {
        right = found == static_cast<double>(static_cast<float>(reference));
      }
    }
    if (right) return;
    report(token, head, -1,
           text("lse[", token, ',', head, "] is ", found, ", reference ", reference,
                std::isinf(reference) ? " exactly" : ""));
  }

  void report(std::int64_t token, std::int64_t head, std::int64_t column, std::string sentence) {
    if (!result_.passed()) return;
    result_.bad_token = token;
    result_.bad_head = head;
    result_.bad_column = column;
    result_.problem = std::move(sentence);
  }

  const DecodeProblem& problem_;
  const DecodeTensors& tensors_;
  Tolerance tolerance_;
  double underflow_;  ///< differences that the range of the types makes, not the arithmetic
  double error_square_ = 0.0;
  double reference_square_ = 0.0;
  Comparison result_;
};

}  // namespace

Tolerance tolerance_for(const DecodeProblem& problem) noexcept {
  const bool any_e4m3 = problem.q_dtype == DType::kE4M3 || problem.kv_format == KvFormat::kE4M3 ||
                        problem.kv_format == KvFormat::kFp8DsMla;
  const bool any_bf16 = problem.q_dtype == DType::kBF16 || problem.kv_format == KvFormat::kBF16 ||
                        problem.resolved_out_dtype() == DType::kBF16;
  Tolerance tolerance;
  tolerance.whole = any_e4m3 ? 2e-2 : any_bf16 ? 4e-3 : 2e-3;
  tolerance.row = 3.0 * tolerance.whole;
  return tolerance;
}

Result<Oracle> full_oracle(const DecodeProblem& problem, const DecodeTensors& tensors) {
  Oracle oracle;
  for (std::int64_t token = 0; token < problem.num_tokens; ++token) {
    for (std::int64_t head = 0; head < problem.num_heads; ++head) oracle.rows.push_back({token, head});
  }
  oracle.out.resize(oracle.rows.size() * static_cast<std::size_t>(problem.kv_lora_rank));
  oracle.lse.resize(oracle.rows.size());
  MLA_RETURN_IF_ERROR(reference_decode(problem, tensors, oracle.out.data(), oracle.lse.data()));
  return oracle;
}

Result<Oracle> sampled_oracle(const Batch& batch, double budget) {
  const std::int64_t num_tokens = batch.problem.num_tokens;
  const std::int64_t num_heads = batch.problem.num_heads;
  double whole = 0.0;
  for (std::int64_t token = 0; token < num_tokens; ++token) whole += row_cost(batch, token);
  if (whole * static_cast<double>(num_heads) <= budget) {
    return full_oracle(batch.problem, batch.tensors);
  }
  MLA_RETURN_IF_ERROR(validate_inputs(batch.problem, batch.tensors));
  MLA_RETURN_IF_ERROR(validate_contents(batch.problem, batch.tensors));

  Oracle oracle;
  oracle.complete = false;
  oracle.rows = {{0, 0}, {num_tokens - 1, num_heads - 1}};  // always looked at, whatever they cost
  double spent = row_cost(batch, 0) + row_cost(batch, num_tokens - 1);
  std::set<std::pair<std::int64_t, std::int64_t>> taken = {{0, 0}, {num_tokens - 1, num_heads - 1}};
  Rng rng(batch.source.seed, kSampleStream);
  for (int tries = 0; tries < kMaxSamples && spent < budget; ++tries) {
    const Oracle::Row row{rng.below(num_tokens), rng.below(num_heads)};
    const double cost = row_cost(batch, row.token);
    if (spent + cost > budget || !taken.insert({row.token, row.head}).second) continue;
    spent += cost;
    oracle.rows.push_back(row);
  }
  const auto width = static_cast<std::size_t>(batch.problem.kv_lora_rank);
  oracle.out.resize(oracle.rows.size() * width);
  oracle.lse.resize(oracle.rows.size());
#pragma omp parallel for schedule(dynamic, 1)
  for (std::size_t i = 0; i < oracle.rows.size(); ++i) {
    reference_row(batch.problem, batch.tensors, oracle.rows[i].token, oracle.rows[i].head,
                  oracle.out.data() + i * width, &oracle.lse[i]);
  }
  return oracle;
}

Comparison compare(const DecodeProblem& problem, const DecodeTensors& tensors, const Oracle& oracle) {
  Comparer comparer(problem, tensors);
  comparer.add(oracle);
  if (!oracle.complete) comparer.find_nan();
  return comparer.result();
}

std::string guard_damage(const Buffer& out, const Buffer& lse) {
  std::string damage;
  if (!out.intact()) damage = "out: memory next to the tensor was written";
  if (!lse.intact()) {
    if (!damage.empty()) damage += "; ";
    damage += "lse: memory next to the tensor was written";
  }
  return damage;
}

std::string repro_line(const Case& problem, const std::string& backend, int threads) {
  std::string line = text("repro: mla check --problem \"", to_string(problem), "\" --backend ", backend);
  if (threads > 0) line += text(" --threads ", threads);
  return line;
}

}  // namespace mla::testkit
