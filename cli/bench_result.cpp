#include "bench_result.hpp"

#include <iostream>

#include "cli.hpp"
#include "core/diagnostics.hpp"
#include "testkit/check.hpp"

namespace mla::cli {

BenchWork bench_work(const testkit::Batch& batch) noexcept {
  const DecodeProblem& problem = batch.problem;
  const auto token_bytes = static_cast<double>(kv_row_elements(problem)) *
                           static_cast<double>(dtype_bytes(kv_dtype(problem.kv_format)));
  const auto rank = static_cast<double>(problem.kv_lora_rank);
  const auto width = static_cast<double>(problem.head_dim());
  const auto heads = static_cast<double>(problem.num_heads);
  BenchWork work;
  for (std::size_t b = 0; b < batch.lengths.seq_lens.size(); ++b) {
    const auto tokens = static_cast<double>(batch.lengths.query_lens[b]);
    const auto keys =
        static_cast<double>(problem.sparse() ? problem.num_indices : batch.lengths.seq_lens[b]);
    work.flops += keys * heads * tokens * 2.0 * (width + rank);
    work.bytes += keys * token_bytes * (problem.sparse() ? tokens : 1.0);
  }
  const double rows = static_cast<double>(problem.num_tokens) * heads;
  work.bytes += rows * width * static_cast<double>(dtype_bytes(problem.q_dtype));
  work.bytes += rows * rank * static_cast<double>(dtype_bytes(problem.resolved_out_dtype()));
  return work;
}

std::string BenchCheck::rows_text() const {
  return text(all_rows ? "all " : "sample ", rows, " rows");
}

Result<BenchCheck> check_outputs(const testkit::Batch& batch, double oracle_budget) {
  const Result<testkit::Oracle> oracle = testkit::sampled_oracle(batch, oracle_budget);
  if (!oracle.ok()) return oracle.status();
  const testkit::Comparison comparison = testkit::compare(batch.problem, batch.tensors, *oracle);
  BenchCheck check{oracle->rows.size(), oracle->complete, comparison.error, comparison.problem};
  if (check.problem.empty()) check.problem = testkit::guard_damage(batch.out, batch.lse);
  return check;
}

void BenchTally::wrong(const BenchCheck& check, const testkit::Case& problem,
                       const std::string& backend, int threads) {
  ++wrong_;
  std::cout.flush();
  std::cerr << "mla bench: not timed, the result is wrong: " << check.problem << '\n'
            << testkit::repro_line(problem, backend, threads) << std::endl;
}

std::string BenchTally::verdict() const {
  return text("wrong values: ", wrong_, wrong_ == 0 ? " OK" : " FAILED");
}

int BenchTally::exit_code() const {
  if (wrong_ > 0) return kExitCheckFailed;
  return timed_ == 0 && !unserved_.ok() ? fail("bench", unserved_) : kExitDone;
}

}  // namespace mla::cli
