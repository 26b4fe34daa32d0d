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
  struct Row {
    std::int64_t token = 0;
    std::int64_t head = 0;
  };
  bool complete = true;     ///< every row is there
  std::vector<Row> rows;
  std::vector<double> out;  ///< [rows, L]
  std::vector<double> lse;  ///< [rows], in the problem's base
};

/// Every row. Fails when the tensors or their contents are not valid.
Result<Oracle> full_oracle(const DecodeProblem& problem, const DecodeTensors& tensors);

/// Rows spread over the batch (the first and the last included) whose oracle costs about `budget`
/// (row, key) pairs; the full oracle when that is within the budget.
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

/// An incomplete oracle still has every element of out and lse looked at: none may be NaN.
Comparison compare(const DecodeProblem& problem, const DecodeTensors& tensors, const Oracle& oracle);

/// The guard bands of out and lse, as one sentence; empty: intact.
std::string guard_damage(const Buffer& out, const Buffer& lse);

/// `repro: mla check --problem "..." --backend NAME`; with threads > 0 also `--threads N`.
std::string repro_line(const Case& problem, const std::string& backend, int threads);

}  // namespace mla::testkit
