// A result against the double oracle: errors by the accuracy rules, exact values of empty rows, guard
// bands, and the line that repeats a failure.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "mla/decode.hpp"
#include "mla/status.hpp"
#include "testkit/problem_gen.hpp"

namespace mla::testkit {

/// Upper bounds of the errors. out: ||out - ref|| / ||ref||; lse (natural log):
/// |lse - ref| <= lse_absolute + lse_relative * |ref|.
struct Tolerance {
  double whole = 0.0;  ///< of the whole tensor
  double row = 0.0;    ///< of the worst (token, head) row
  double lse_absolute = 1e-3;
  double lse_relative = 1e-5;
};

/// By the coarsest type that takes part: any e4m3 2e-2, else any bf16 4e-3, else 2e-3; rows three
/// times that. The reason: one rounding of P and one of the output in that type.
Tolerance tolerance_for(const DecodeProblem& problem) noexcept;

/// The exact result of a problem, or of some of its rows.
struct Oracle {
  struct Rows {
    std::int64_t token_begin = 0;  ///< tokens [token_begin, token_begin + num_tokens) ...
    std::int64_t num_tokens = 0;
    std::int64_t head_begin = 0;   ///< ... of heads [head_begin, head_begin + num_heads)
    std::int64_t num_heads = 0;
    std::vector<double> out;       ///< [num_tokens, num_heads, L]
    std::vector<double> lse;       ///< [num_tokens, num_heads], in the problem's base
  };
  std::vector<Rows> parts;
  bool complete = true;            ///< the parts cover every row
  std::int64_t num_rows = 0;       ///< rows of all parts
};

/// Every row.
Result<Oracle> full_oracle(const DecodeProblem& problem, const DecodeTensors& tensors);

/// Rows of single requests and heads, spread over the batch (first and last included), whose oracle
/// costs about `budget` multiply-adds; the full oracle when that is within the budget. Padding rows
/// are always included.
Result<Oracle> sampled_oracle(const Batch& batch, double budget);

/// The errors of a result. Default: a perfect one.
struct Comparison {
  double error = 0.0;        ///< ||out - ref|| / ||ref|| of all compared rows
  double row_error = 0.0;    ///< of the worst row
  double lse_error = 0.0;    ///< largest |lse - ref|, natural log, over rows with a finite reference
  std::int64_t bad_token = -1;   ///< first bad element; -1: none
  std::int64_t bad_head = -1;
  std::int64_t bad_column = -1;  ///< -1: the lse
  std::string problem;           ///< what is wrong, one sentence; empty: the result is right

  bool passed() const noexcept { return problem.empty(); }
};

Comparison compare(const DecodeProblem& problem, const DecodeTensors& tensors, const Oracle& oracle);

/// The guard bands of out and lse, as one sentence; empty: intact.
std::string guard_damage(const Batch& batch);

/// `repro: mla check --problem "..." --backend NAME`; with threads > 0 also `--threads N`.
std::string repro_line(const Case& problem, const std::string& backend, int threads);

}  // namespace mla::testkit
