// The table of backends: order, honest answers, and a forced row that is the row that runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "core/backend.hpp"
#include "mla/decode.hpp"
#include "support/rows.hpp"
#include "support/small_call.hpp"

namespace mla {
namespace {

DecodeProblem small_problem() {
  DecodeProblem problem;
  problem.num_requests = problem.num_tokens = 2;
  problem.num_heads = 16;
  problem.max_seq_len = 100;
  return problem;
}

TEST(Registry, RowsHaveNamesDescriptionsAndOneOrder) {
  const std::vector<BackendInfo> rows = backends();
  std::vector<std::string> names;
  for (const BackendInfo& row : rows) {
    if (row.device == DeviceKind::kCpu) names.push_back(row.name);
    EXPECT_FALSE(row.description.empty()) << row.name;
  }
  EXPECT_EQ(names, (std::vector<std::string>{"cpu_amx", "cpu_avx512bf16", "cpu_avx512", "cpu_avx2",
                                             "cpu_portable", "cpu_reference"}));
}

TEST(Registry, TheReferenceAlwaysRuns) {
  const std::vector<std::string> rows = test::runnable_rows();
  EXPECT_EQ(std::count(rows.begin(), rows.end(), "cpu_reference"), 1);
}

TEST(Registry, TheFirstServingRowIsChosen) {
  for (KvFormat kv : {KvFormat::kBF16, KvFormat::kF16, KvFormat::kE4M3, KvFormat::kFp8DsMla}) {
    for (DType q : {DType::kBF16, DType::kF16, DType::kE4M3}) {
      DecodeProblem problem = small_problem();
      problem.kv_format = kv;
      problem.q_dtype = q;
      const std::vector<std::string> rows = test::serving_rows(problem);
      ASSERT_FALSE(rows.empty());
      const Result<DecodePlan> made = plan(problem);
      ASSERT_TRUE(made.ok());
      EXPECT_EQ(made->backend_name(), rows.front());
    }
  }
}

TEST(Registry, AForcedRowIsTheRowThatRuns) {
  // The workspace proves it: launch is the row's own function.
  for (const BackendInfo& info : backends(small_problem())) {
    if (info.device != DeviceKind::kCpu) continue;
    const Result<DecodePlan> made = plan(small_problem(), test::forced(info.name));
    if (!info.reject_reason.empty()) {
      ASSERT_FALSE(made.ok()) << info.name << " must not fall back";
      EXPECT_EQ(made.status().code(), StatusCode::kUnsupported);
      EXPECT_NE(made.status().message().find("(" + info.name + ": " + info.reject_reason + ")"),
                std::string::npos)
          << made.status().message();
      continue;
    }
    ASSERT_TRUE(made.ok()) << info.name;
    EXPECT_EQ(made->backend_name(), info.name);
    EXPECT_EQ(made->state().entry->name, info.name);
    EXPECT_NE(made->to_string().find("backend=" + info.name), std::string::npos);
  }
}

TEST(Registry, AForcedRowNeverFallsBackWhenItRejectsTheProblem) {
  DecodeProblem problem = small_problem();
  problem.q_dtype = DType::kF16;
  for (const BackendInfo& info : backends(problem)) {
    if (info.device != DeviceKind::kCpu) continue;
    const Result<DecodePlan> made = plan(problem, test::forced(info.name));
    EXPECT_EQ(made.ok(), info.reject_reason.empty()) << info.name;
    if (made.ok()) {
      EXPECT_EQ(made->backend_name(), info.name);
    } else {
      EXPECT_EQ(made.status().code(), StatusCode::kUnsupported);
    }
  }
}

TEST(Registry, AnUnknownNameListsTheRows) {
  const Result<DecodePlan> made = plan(small_problem(), test::forced("cpu_avx3"));
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.status().code(), StatusCode::kInvalidArgument);
  const std::string& message = made.status().message();
  EXPECT_EQ(message.rfind("plan: backend: found cpu_avx3, needed one of ", 0), 0U) << message;
  EXPECT_NE(message.find("cpu_amx, cpu_avx512bf16, "), std::string::npos) << message;
  for (const BackendInfo& row : backends()) EXPECT_NE(message.find(row.name), std::string::npos);
}

TEST(Registry, ADeviceWithoutRowsIsUnsupportedWithAReason) {
  PlanOptions options;
  options.device = DeviceKind::kCuda;
  const bool has_cuda = [] {
    for (const BackendInfo& row : backends()) {
      if (row.device == DeviceKind::kCuda) return true;
    }
    return false;
  }();
  if (!has_cuda) {
    const Result<DecodePlan> made = plan(small_problem(), options);
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.status().code(), StatusCode::kUnsupported);
    EXPECT_NE(made.status().message().find("this build has no row for device cuda"),
              std::string::npos);
    // Other builds have it, so its name is no misspelling.
    EXPECT_TRUE(test::refused(plan(small_problem(), test::forced("sm90")).status(),
                              StatusCode::kUnsupported,
                              "plan: backend: found none that serves b=2,h=16,maxlen=100, needed "
                              "one (sm90: this build has no CUDA)"));
  }
  options.backend = "cpu_reference";
  EXPECT_TRUE(test::refused(plan(small_problem(), options).status(), StatusCode::kInvalidArgument,
                            "plan: backend: found cpu_reference, needed a row of device cuda"));
}

TEST(Registry, RowsAnswerPerProblem) {
  DecodeProblem problem = small_problem();
  problem.kv_format = KvFormat::kF16;
  for (const BackendInfo& row : backends(problem)) {
    if (row.name == "cpu_amx" || row.name == "cpu_avx512bf16") {
      EXPECT_FALSE(row.reject_reason.empty()) << row.name;
    }
  }
  problem.num_heads = 0;
  for (const BackendInfo& row : backends(problem)) {
    EXPECT_EQ(row.reject_reason, "plan: num_heads: found 0, needed 1 to 2147483647");
  }
}

TEST(Registry, APlanKeepsWhatItWasMadeFrom) {
  PlanOptions options = test::forced("cpu_reference");
  options.num_threads = 3;
  options.fixed_split = 256;
  const Result<DecodePlan> made = plan(small_problem(), options);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(made->num_workers(), 3);
  EXPECT_EQ(made->problem().num_heads, 16);
  EXPECT_EQ(made->options().fixed_split, 256);
  EXPECT_EQ(made->to_string(),
            "backend=cpu_reference workers=3 workspace_bytes=0 fixed_split=256 "
            "problem=b=2,h=16,maxlen=100");
  const DecodePlan copy = *made;
  EXPECT_EQ(&copy.state(), &made->state());
  EXPECT_STREQ(version(), "0.1.0");
}

}  // namespace
}  // namespace mla
