// What the benches of CPU and GPU rows share: the work of a batch, the check before a timing, and
// the verdict at the end.
#pragma once

#include <cstddef>
#include <string>

#include "mla/status.hpp"
#include "testkit/problem_gen.hpp"

namespace mla::cli {

/// Work of a batch. FLOP = keys * heads * query tokens * 2 * (L + R + L), over all requests. Bytes:
/// each request's cached tokens once (sparse mode: each row's indexed tokens), q and out.
struct BenchWork {
  double flops = 0.0;
  double bytes = 0.0;
};
BenchWork bench_work(const testkit::Batch& batch) noexcept;

/// A result that was compared with the oracle.
struct BenchCheck {
  std::size_t rows = 0;  ///< that were compared
  bool all_rows = false;
  double error = 0.0;   ///< ||out - ref|| / ||ref|| of those rows
  std::string problem;  ///< what is wrong, one sentence; empty: the result is right

  std::string rows_text() const;  ///< "all 16 rows", "sample 40 rows"
};

/// Compares the outputs of a batch and looks at their guard bands. `oracle_budget`: (row, key)
/// pairs that the oracle may cost, about; a larger problem is compared on a sample of rows.
Result<BenchCheck> check_outputs(const testkit::Batch& batch, double oracle_budget);

/// Counts lines by how they ended; the exit code follows from that.
class BenchTally {
 public:
  void timed() noexcept { ++timed_; }
  /// Prints what is wrong and the line that repeats it on stderr.
  void wrong(const BenchCheck& check, const testkit::Case& problem, const std::string& backend,
             int threads);
  /// A valid line that its row does not serve.
  void unserved(const Status& status) { unserved_ = status; }

  int wrong_values() const noexcept { return wrong_; }
  /// The last line of a table: "wrong values: 0 OK".
  std::string verdict() const;
  /// Prints a reason on stderr when no line was served.
  int exit_code() const;

 private:
  int timed_ = 0;
  int wrong_ = 0;
  Status unserved_;
};

}  // namespace mla::cli
