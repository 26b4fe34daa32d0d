#include "support/conformance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>

#include "support/rows.hpp"
#include "testkit/check.hpp"
#include "testkit/compare.hpp"
#include "testkit/problem_gen.hpp"

namespace mla::test {
namespace {

std::vector<std::byte> bytes_of(const testkit::Buffer& buffer) {
  return buffer.size() == 0 ? std::vector<std::byte>()
                            : std::vector<std::byte>(buffer.data(), buffer.data() + buffer.size());
}

/// What the options leave open comes from the problem.
PlanOptions all_options(const testkit::Case& problem, const PlanOptions& options) {
  const bool splits_given = options.num_splits > 0 || options.fixed_split > 0;
  return splits_given ? options : testkit::plan_options(problem, options);
}

void check_row(testkit::Batch& batch, const testkit::Oracle& oracle, const PlanOptions& options) {
  const Result<DecodePlan> made = plan(batch.problem, all_options(batch.source, options));
  ASSERT_TRUE(made.ok()) << made.status().message();
  const testkit::Buffer workspace = testkit::make_workspace(*made);
  const std::uint64_t inputs = batch.input_fingerprint();
  std::vector<std::byte> out, lse;
  // The reference is a plain loop: running it twice would only take time.
  const int repeats = options.backend == "cpu_reference" ? 1 : 2;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    batch.poison_outputs();
    const Status status = run(*made, batch.tensors, workspace.data(), workspace.size());
    ASSERT_TRUE(status.ok()) << status.message();
    if (repeat == 0) {
      const testkit::Comparison comparison = testkit::compare(batch.problem, batch.tensors, oracle);
      ASSERT_TRUE(comparison.passed()) << comparison.problem;
      ASSERT_EQ(testkit::guard_damage(batch.out, batch.lse), "");
      ASSERT_TRUE(workspace.intact()) << "memory next to the workspace was written";
      ASSERT_EQ(batch.input_fingerprint(), inputs) << "an input was written";
      out = bytes_of(batch.out);
      lse = bytes_of(batch.lse);
    } else {
      ASSERT_EQ(bytes_of(batch.out), out) << "a second run gave other bits in out";
      ASSERT_EQ(bytes_of(batch.lse), lse) << "a second run gave other bits in lse";
    }
  }
}

}  // namespace

void expect_conformance(const std::string& problem, const std::vector<PlanOptions>& options) {
  const Result<testkit::Case> parsed = testkit::parse_case(problem);
  ASSERT_TRUE(parsed.ok()) << problem << ": " << parsed.status().message();
  Result<std::unique_ptr<testkit::Batch>> batch = testkit::make_batch(*parsed);
  ASSERT_TRUE(batch.ok()) << problem << ": " << batch.status().message();
  const Result<testkit::Oracle> oracle = testkit::full_oracle((*batch)->problem, (*batch)->tensors);
  ASSERT_TRUE(oracle.ok()) << problem << ": " << oracle.status().message();
  for (const PlanOptions& base : options) {
    const std::vector<std::string> rows = serving_rows((*batch)->problem, base);
    ASSERT_FALSE(rows.empty()) << problem;
    for (const std::string& row : rows) {
      SCOPED_TRACE(testkit::repro_line(*parsed, row, base.num_threads));
      check_row(**batch, *oracle, forced(row, base));
    }
  }
}

void expect_conformance(const std::vector<std::string>& problems) {
  for (const std::string& problem : problems) expect_conformance(problem);
}

}  // namespace mla::test
