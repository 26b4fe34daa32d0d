// Conformance of every row of the backend table on problems of the grammar, with poison and guard
// bands.
#pragma once

#include <string>
#include <vector>

#include "mla/decode.hpp"

namespace mla::test {

/// For each row that serves the problem: values against the oracle, guard bands, untouched inputs,
/// and the same bits from a second run over poisoned outputs in the same workspace. With several
/// `options` each must be right.
void expect_conformance(const std::string& problem, const std::vector<PlanOptions>& options = {{}});

/// The same for a list; a problem that fails names its repro line.
void expect_conformance(const std::vector<std::string>& problems);

}  // namespace mla::test
