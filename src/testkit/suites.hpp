// Case lists: built-in suites and random problems.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mla/status.hpp"
#include "testkit/case.hpp"
#include "testkit/rng.hpp"

namespace mla::testkit {

/// `smoke`: one case per feature, a few seconds. `full`: grids over heads, page sizes, types, modes,
/// masks, context parallelism, sparse lists, empty rows and padding; minutes.
/// kInvalidArgument: no such suite.
Result<std::vector<Case>> suite_cases(const std::string& name);

/// A valid small problem drawn from the whole grammar.
Case random_case(Rng& rng);

}  // namespace mla::testkit
