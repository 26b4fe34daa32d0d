// `mla check`: any backend against the double oracle, on problems, suites, random problems or a file.
#include <iomanip>
#include <iostream>
#include <memory>
#include <sstream>

#include "cli.hpp"
#include "core/diagnostics.hpp"
#include "io/batch_file.hpp"
#include "mla/decode.hpp"
#include "testkit/check.hpp"
#include "testkit/suites.hpp"

namespace mla::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kCommand = "check";

struct Options {
  std::vector<std::string> problems;
  std::string suite;
  std::int64_t random = 0;
  std::uint64_t seed = 1;
  std::string input;
  BackendFlags backend;
  bool json = false;
};

std::string short_number(double value) {
  std::ostringstream stream;
  stream << std::setprecision(2) << std::scientific << value;
  return stream.str();
}

/// Counts verdicts and prints a line (or collects JSON) for each.
class Report {
 public:
  explicit Report(bool json) : json_(json) {}

  void verdict(const std::string& problem, const testkit::CheckResult& result) {
    result.passed() ? ++passed_ : ++failed_;
    const testkit::Comparison& errors = result.comparison;
    if (json_) {
      cases_.push_back({{"problem", problem},
                        {"backend", result.backend},
                        {"passed", result.passed()},
                        {"error", finite(errors.error)},
                        {"row_error", finite(errors.row_error)},
                        {"lse_error", finite(errors.lse_error)},
                        {"message", result.problem},
                        {"repro", result.passed() ? "" : result.repro}});
      return;
    }
    std::cout << (result.passed() ? "ok    " : "FAIL  ") << std::left << std::setw(15) << result.backend
              << " out " << short_number(errors.error) << " row " << short_number(errors.row_error)
              << " lse " << short_number(errors.lse_error) << "  " << problem << '\n';
    if (result.passed()) return;
    std::cout << "      " << result.problem << '\n';
    if (!result.repro.empty()) std::cout << "      " << result.repro << '\n';
  }

  /// A valid case that the backend row does not serve.
  void unserved(const std::string& problem, const std::string& backend, const Status& status) {
    ++unserved_;
    if (json_) {
      cases_.push_back({{"problem", problem}, {"backend", backend}, {"unsupported", status.message()}});
    }
    last_unserved_ = status;
  }

  int finish() const {
    if (json_) {
      print_json({{"passed", passed_}, {"failed", failed_}, {"not_served", unserved_}, {"cases", cases_}});
    } else {
      if (unserved_ > 0) std::cout << unserved_ << " not served by the backend\n";
      std::cout << passed_ << " passed, " << failed_ << " failed\n";
    }
    if (failed_ > 0) return kExitCheckFailed;
    if (passed_ == 0 && unserved_ > 0) return fail(kCommand, last_unserved_);
    return kExitDone;
  }

 private:
  /// JSON has no infinity: null.
  static Json finite(double value) { return value <= std::numeric_limits<double>::max() ? Json(value) : Json(); }

  bool json_;
  int passed_ = 0;
  int failed_ = 0;
  int unserved_ = 0;
  Status last_unserved_;
  Json cases_ = Json::array();
};

/// The rows to check: the named one, "" for the library's choice, or all that run on this machine.
Result<std::vector<std::string>> backend_names(const std::string& asked) {
  if (asked.empty()) return std::vector<std::string>{""};
  if (asked != "all") {
    const Result<BackendInfo> row = find_backend(kCommand, asked);
    if (!row.ok()) return row.status();
    return std::vector<std::string>{asked};
  }
  std::vector<std::string> names;
  for (const BackendInfo& row : backends()) {
    if (row.reject_reason.empty()) names.push_back(row.name);
  }
  return names;
}

Result<std::vector<testkit::Case>> collect_cases(const Options& options) {
  std::vector<testkit::Case> cases;
  if (!options.suite.empty()) return testkit::suite_cases(options.suite);
  for (const std::string& problem : options.problems) {
    Result<testkit::Case> parsed = testkit::parse_case(problem);
    if (!parsed.ok()) return parsed.status();
    cases.push_back(std::move(*parsed));
  }
  testkit::Rng rng(options.seed, 9);
  for (std::int64_t i = 0; i < options.random; ++i) cases.push_back(testkit::random_case(rng));
  return cases;
}

int check_cases(const Options& options, const std::vector<std::string>& names) {
  const Result<std::vector<testkit::Case>> cases = collect_cases(options);
  if (!cases.ok()) return fail(kCommand, cases.status());
  Report report(options.json);
  Progress progress("check");
  const auto total = static_cast<std::int64_t>(cases->size() * names.size());
  std::int64_t done = 0;
  for (const testkit::Case& problem : *cases) {
    for (const std::string& name : names) {
      BackendFlags flags = options.backend;
      flags.backend = name;
      progress.update(done++, total);
      const Result<testkit::CheckResult> result = testkit::check_case(problem, flags.options());
      progress.clear();
      if (result.ok()) {
        report.verdict(testkit::to_string(problem), *result);
      } else if (result.status().code() == StatusCode::kUnsupported) {
        report.unserved(testkit::to_string(problem), name, result.status());
      } else {
        return fail(kCommand, kExitBadInput, testkit::to_string(problem) + ": " + result.status().message());
      }
    }
  }
  return report.finish();
}

int check_file(const Options& options, const std::vector<std::string>& names) {
  const Result<io::Batch> batch = io::read_batch(options.input);
  if (!batch.ok()) return fail(kCommand, batch.status());
  Report report(options.json);
  for (const std::string& name : names) {
    BackendFlags flags = options.backend;
    flags.backend = name;
    Result<testkit::CheckResult> result =
        testkit::check_tensors(batch->problem, batch->tensors, flags.options());
    if (result.ok()) {
      result->repro = text("repro: mla check --input ", options.input, " --backend ", result->backend);
      report.verdict(options.input + ": " + to_string(batch->problem), *result);
    } else if (result.status().code() == StatusCode::kUnsupported) {
      report.unserved(options.input, name, result.status());
    } else {
      return fail(kCommand, result.status());
    }
  }
  return report.finish();
}

int run_check(const Options& options) {
  const Result<std::vector<std::string>> names = backend_names(options.backend.backend);
  if (!names.ok()) return fail(kCommand, names.status());
  return options.input.empty() ? check_cases(options, *names) : check_file(options, *names);
}

}  // namespace

void add_check_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("check", "Compare backends with the double-precision oracle");
  CLI::Option_group* source = command->add_option_group("cases");
  source->add_option("--problem", options->problems, "Problem string, may be repeated (keys: mla info --help)")
      ->type_name("STR")
      ->allow_extra_args(false);
  source->add_option("--suite", options->suite, "Built-in cases: smoke (seconds) or full (minutes)")
      ->type_name("NAME");
  CLI::Option* random = source->add_option("--random", options->random, "Number of random problems")
                            ->check(CLI::Range(std::int64_t{1}, std::int64_t{1000000}))
                            ->type_name("N");
  source->add_option("--input", options->input, "Batch file (safetensors)")->type_name("FILE");
  source->require_option(1);
  command->add_option("--seed", options->seed, "Seed of --random (1)")->needs(random)->type_name("S");
  add_backend_flags(*command, options->backend,
                    "Row of `mla info`, or all that run here (default: the first that serves a case)");
  command->add_flag("--json", options->json, "Print JSON");
  command->footer(
      "Each case has poisoned memory around its data and guard bands around its outputs, and runs twice:\n"
      "the bits must agree. Tolerances: bf16 4e-3 (worst row 1.2e-2), f16 2e-3 (6e-3), e4m3 2e-2 (6e-2),\n"
      "lse 1e-3 + 1e-5 |lse|.\n" +
      example("mla check --backend all --suite smoke"));
  command->callback([options, &exit_code] { exit_code = run_check(*options); });
}

}  // namespace mla::cli
