#include "support/rows.hpp"

namespace mla::test {
namespace {

std::vector<std::string> names(const std::vector<BackendInfo>& table) {
  std::vector<std::string> rows;
  for (const BackendInfo& row : table) {
    if (row.device == DeviceKind::kCpu && row.reject_reason.empty()) rows.push_back(row.name);
  }
  return rows;
}

}  // namespace

std::vector<std::string> runnable_rows() {
  return names(backends());
}

std::vector<std::string> serving_rows(const DecodeProblem& problem, const PlanOptions& options) {
  return names(backends(problem, options));
}

PlanOptions forced(const std::string& row, PlanOptions options) {
  options.backend = row;
  return options;
}

testing::AssertionResult refused(const Status& status, StatusCode code,
                                 const std::string& sentence) {
  if (status.ok()) return testing::AssertionFailure() << "accepted; needed: " << sentence;
  if (status.code() == code && status.message() == sentence) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << "found:  " << to_string(status.code()) << ": " << status.message()
         << "\nneeded: " << to_string(code) << ": " << sentence;
}

}  // namespace mla::test
