// Which rows of the backend table a test runs, and how it names a refusal.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "mla/decode.hpp"

namespace mla::test {

/// Rows that run on this machine, in table order. Never empty: cpu_reference always runs.
std::vector<std::string> runnable_rows();

/// Of those, the rows that serve the problem.
std::vector<std::string> serving_rows(const DecodeProblem& problem,
                                      const PlanOptions& options = {});

/// `options` with the row forced.
PlanOptions forced(const std::string& row, PlanOptions options = {});

/// Success when the status is the refusal with exactly this sentence.
testing::AssertionResult refused(const Status& status, StatusCode code,
                                 const std::string& sentence);

}  // namespace mla::test
