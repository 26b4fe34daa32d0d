#include "testkit/compare.hpp"

#include <algorithm>
#include <cmath>

#include "core/diagnostics.hpp"
#include "cpu/reference.hpp"

namespace mla::testkit {
namespace {

constexpr double kLn2 = 0.693147180559945309417232121458;

double to_natural(const DecodeProblem& problem, double lse) noexcept {
  return problem.lse_base == LseBase::kTwo ? lse * kLn2 : lse;
}

const std::byte* element(const TensorView& view, std::int64_t token, std::int64_t head) noexcept {
  return static_cast<const std::byte*>(view.data) +
         (token * view.stride[0] + head * view.stride[1]) *
             static_cast<std::int64_t>(dtype_bytes(view.dtype));
}

/// Sub-tensor of tokens and heads; axes 0 and 1 of a rank 2 or 3 view.
TensorView rows_of(TensorView view, std::int64_t token, std::int64_t num_tokens, std::int64_t head,
                   std::int64_t num_heads) noexcept {
  if (!view.given()) return view;
  view.data = const_cast<std::byte*>(element(view, token, head));
  view.shape[0] = num_tokens;
  view.shape[1] = num_heads;
  return view;
}

/// Elements [first, first + count) of axis 0.
TensorView slice_of(TensorView view, std::int64_t first, std::int64_t count) noexcept {
  if (!view.given()) return view;
  view.data = static_cast<std::byte*>(view.data) +
              first * view.stride[0] * static_cast<std::int64_t>(dtype_bytes(view.dtype));
  view.shape[0] = count;
  return view;
}

Status run_oracle(const DecodeProblem& problem, const DecodeTensors& tensors, Oracle::Rows& rows) {
  rows.num_tokens = problem.num_tokens;
  rows.num_heads = problem.num_heads;
  const auto count = static_cast<std::size_t>(problem.num_tokens * problem.num_heads);
  rows.out.assign(count * static_cast<std::size_t>(problem.kv_lora_rank), 0.0);
  rows.lse.assign(count, 0.0);
  return reference::decode(problem, tensors, rows.out.data(), rows.lse.data());
}

/// One head of one request, all its tokens, as a problem of its own.
Status run_request_oracle(const Batch& batch, std::int64_t request, std::int64_t head,
                          Oracle::Rows& rows) {
  const auto b = static_cast<std::size_t>(request);
  const std::int64_t token = batch.lengths.query_start_loc[b];
  const std::int64_t count = batch.lengths.query_lens[b];
  DecodeProblem problem = batch.problem;
  problem.num_requests = 1;
  problem.num_tokens = count;
  problem.num_heads = 1;
  DecodeTensors tensors = batch.tensors;
  tensors.q = rows_of(tensors.q, token, count, head, 1);
  tensors.q_nope = rows_of(tensors.q_nope, token, count, head, 1);
  tensors.q_pe = rows_of(tensors.q_pe, token, count, head, 1);
  tensors.out = rows_of(tensors.out, token, count, head, 1);
  tensors.lse = rows_of(tensors.lse, token, count, head, 1);
  tensors.indices = slice_of(tensors.indices, token, count);
  tensors.block_table = slice_of(tensors.block_table, request, 1);
  tensors.seq_lens = slice_of(tensors.seq_lens, request, 1);
  tensors.causal_seqlens_kv_global = slice_of(tensors.causal_seqlens_kv_global, request, 1);
  tensors.query_start_loc = {};  // one request owns all tokens
  tensors.sinks = slice_of(tensors.sinks, head, 1);
  tensors.alibi_slopes = slice_of(tensors.alibi_slopes, head, 1);
  rows.token_begin = token;
  rows.head_begin = head;
  return run_oracle(problem, tensors, rows);
}

/// Padding rows see nothing: 0, and -inf or the sink.
Oracle::Rows padding_rows(const Batch& batch) {
  Oracle::Rows rows;
  rows.token_begin = batch.lengths.query_start_loc.back();
  rows.num_tokens = batch.lengths.num_tokens - rows.token_begin;
  rows.num_heads = batch.source.h;
  const auto count = static_cast<std::size_t>(rows.num_tokens * rows.num_heads);
  rows.out.assign(count * static_cast<std::size_t>(batch.source.l), 0.0);
  rows.lse.assign(count, -std::numeric_limits<double>::infinity());
  if (!batch.source.sinks) return rows;
  const double unit = batch.problem.lse_base == LseBase::kTwo ? 1.0 / kLn2 : 1.0;
  for (std::size_t i = 0; i < count; ++i) {
    const float sink = batch.sinks.as<float>()[i % static_cast<std::size_t>(rows.num_heads)];
    rows.lse[i] = static_cast<double>(sink) * unit;
  }
  return rows;
}

/// Multiply-adds of the oracle for one head of a request.
double request_cost(const Batch& batch, std::int64_t request) {
  const auto b = static_cast<std::size_t>(request);
  const std::int64_t keys = batch.source.k > 0 ? batch.source.k : batch.lengths.seq_lens[b];
  return static_cast<double>(batch.lengths.query_lens[b]) * static_cast<double>(keys + 1) *
         static_cast<double>(2 * batch.source.l + batch.source.r);
}

/// Collects errors row by row.
class Comparer {
 public:
  Comparer(const DecodeProblem& problem, const DecodeTensors& tensors)
      : problem_(problem), tensors_(tensors), tolerance_(tolerance_for(problem)) {}

  void add(const Oracle::Rows& rows) {
    const std::int64_t width = problem_.kv_lora_rank;
    for (std::int64_t t = 0; t < rows.num_tokens; ++t) {
      for (std::int64_t h = 0; h < rows.num_heads; ++h) {
        const std::int64_t row = t * rows.num_heads + h;
        const double* out = rows.out.data() + row * width;
        add_row(rows.token_begin + t, rows.head_begin + h, out, rows.lse[static_cast<std::size_t>(row)]);
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
  oracle.num_rows = problem.num_tokens * problem.num_heads;
  MLA_RETURN_IF_ERROR(run_oracle(problem, tensors, oracle.parts.emplace_back()));
  return oracle;
}

Result<Oracle> sampled_oracle(const Batch& batch, double budget) {
  const Case& problem = batch.source;
  double whole = 0.0;
  for (std::int64_t b = 0; b < problem.b; ++b) whole += request_cost(batch, b);
  whole *= static_cast<double>(problem.h);
  if (whole <= budget) return full_oracle(batch.problem, batch.tensors);

  // Candidates alternate between both ends of the batch, with another head each time; `seen` keeps one
  // (request, head) pair from being computed twice.
  Oracle oracle;
  oracle.complete = false;
  double spent = 0.0;
  std::vector<std::pair<std::int64_t, std::int64_t>> seen;
  for (std::int64_t i = 0; i < 4 * problem.b + 64 && spent < budget; ++i) {
    const std::int64_t request = (i % 2 == 0 ? i / 2 : problem.b - 1 - i / 2 % problem.b) % problem.b;
    const std::int64_t head = i == 1 ? problem.h - 1 : i * 37 % problem.h;
    if (std::find(seen.begin(), seen.end(), std::pair(request, head)) != seen.end()) continue;
    // The first and the last request are always looked at, however long they are.
    if (i >= 2 && spent + request_cost(batch, request) > budget) continue;
    seen.emplace_back(request, head);
    spent += request_cost(batch, request);
    MLA_RETURN_IF_ERROR(run_request_oracle(batch, request, head, oracle.parts.emplace_back()));
  }
  oracle.parts.push_back(padding_rows(batch));
  for (const Oracle::Rows& rows : oracle.parts) oracle.num_rows += rows.num_tokens * rows.num_heads;
  return oracle;
}

Comparison compare(const DecodeProblem& problem, const DecodeTensors& tensors, const Oracle& oracle) {
  Comparer comparer(problem, tensors);
  for (const Oracle::Rows& rows : oracle.parts) comparer.add(rows);
  return comparer.result();
}

std::string guard_damage(const Batch& batch) {
  std::string damage;
  if (!batch.out.intact()) damage = "out: memory next to the tensor was written";
  if (!batch.lse.intact()) {
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
