// `mla info`: the machine, and the backend table with the reason why a row does not run.
#include <algorithm>
#include <iomanip>
#include <iostream>
#include <memory>

#include "cli.hpp"
#include "core/backend.hpp"
#include "core/diagnostics.hpp"
#include "machine.hpp"
#include "mla/decode.hpp"
#include "testkit/case.hpp"

namespace mla::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kCommand = "info";

struct Options {
  std::string problem;
  bool json = false;
};

std::string cuda_text(const std::vector<BackendInfo>& rows) {
  const bool built = std::any_of(rows.begin(), rows.end(), [](const BackendInfo& row) {
    return row.device == DeviceKind::kCuda;
  });
  return built ? "see the cuda rows below" : "none (built without CUDA)";
}

Json to_json(const MachineInfo& machine) {
  Json caches = Json::array();
  for (const CacheInfo& cache : machine.caches) {
    caches.push_back({{"level", cache.level},
                      {"type", cache.type},
                      {"bytes", cache.bytes},
                      {"shared_by_cpus", cache.shared_by}});
  }
  return {{"cpu", machine.cpu_name},
          {"features", machine.features},
          {"online_cpus", machine.online_cpus},
          {"usable_cpus", machine.usable_cpus},
          {"threads", machine.openmp_threads},
          {"clock_mhz", machine.clock_mhz},
          {"memory_bytes", machine.memory_bytes},
          {"caches", caches},
          {"operating_system", machine.operating_system}};
}

void print_machine(const MachineInfo& machine, const std::vector<BackendInfo>& rows) {
  std::cout << "mla " << version() << " (commit " << build_commit() << ")\n\nMachine\n";
  const auto line = [](const char* name) -> std::ostream& {
    return std::cout << "  " << std::left << std::setw(10) << name << ' ';
  };
  line("cpu") << machine.cpu_name << '\n';
  line("features");
  for (const std::string& feature : machine.features) std::cout << feature << ' ';
  std::cout << '\n';
  line("threads") << machine.openmp_threads << " by default, " << machine.usable_cpus << " of "
                  << machine.online_cpus << " CPUs usable\n";
  line("caches");
  const char* separator = "";
  for (const CacheInfo& cache : machine.caches) {
    if (cache.type == "Instruction") continue;
    std::cout << separator << 'L' << cache.level << ' ' << size_text(cache.bytes) << " (CPUs "
              << cache.shared_by << ')';
    separator = ", ";
  }
  std::cout << '\n';
  line("memory") << size_text(machine.memory_bytes) << '\n';
  line("system") << machine.operating_system << '\n';
  line("cuda") << cuda_text(rows) << '\n';
}

void print_rows(const std::vector<BackendInfo>& rows, const std::string& chosen) {
  std::size_t width = 0;
  for (const BackendInfo& row : rows) width = std::max(width, row.name.size());
  for (const BackendInfo& row : rows) {
    std::cout << "  " << std::left << std::setw(static_cast<int>(width)) << row.name << "  "
              << std::setw(4) << device_name(row.device) << "  "
              << (row.reject_reason.empty() ? "runs" : "no: " + row.reject_reason)
              << (row.name == chosen ? ", chosen" : "") << "  (" << row.description << ")\n";
  }
}

int run_info(const Options& options) {
  const MachineInfo machine = read_machine();
  std::vector<BackendInfo> rows = backends();
  std::string chosen;
  Json asked;
  int exit_code = kExitDone;
  Status unserved;
  if (!options.problem.empty()) {
    const Result<testkit::Case> parsed = testkit::parse_case(options.problem);
    if (!parsed.ok()) return fail(kCommand, parsed.status());
    const DecodeProblem problem = testkit::decode_problem(*parsed, testkit::case_lengths(*parsed));
    const PlanOptions plan_options = testkit::plan_options(*parsed);
    const Result<DecodePlan> made = plan(problem, plan_options);
    if (!made.ok()) {
      exit_code = exit_code_of(made.status());
      if (exit_code == kExitBadInput) return fail(kCommand, made.status());
      unserved = made.status();
    } else {
      chosen = made->backend_name();
    }
    rows = backends(problem, plan_options);
    asked = {{"problem", testkit::to_string(*parsed)},
             {"chosen", made.ok() ? Json(chosen) : Json()},
             {"workspace_bytes", made.ok() ? Json(made->workspace_bytes()) : Json()}};
  }
  if (options.json) {
    Json table = Json::array();
    for (const BackendInfo& row : rows) {
      table.push_back({{"name", row.name},
                       {"device", device_name(row.device)},
                       {"description", row.description},
                       {"runs", row.reject_reason.empty()},
                       {"reason", row.reject_reason}});
    }
    Json result = {{"version", version()}, {"commit", build_commit()}, {"machine", to_json(machine)}};
    result["cuda_devices"] = Json::array();
    if (!asked.is_null()) result["asked"] = asked;
    result["backends"] = table;
    print_json(result);
  } else {
    print_machine(machine, rows);
    std::cout << "\nBackends, in order of preference";
    if (!asked.is_null()) std::cout << ", for " << asked["problem"].get<std::string>();
    std::cout << '\n';
    print_rows(rows, chosen);
  }
  return unserved.ok() ? exit_code : fail(kCommand, unserved);
}

}  // namespace

void add_info_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("info", "Show the machine and which backends run, or why not");
  command->add_option("--problem", options->problem, "Ask which backends serve this problem")
      ->type_name("STR");
  command->add_flag("--json", options->json, "Print JSON");
  command->footer("Keys of a problem:\n" + testkit::grammar_help() + '\n' +
                  example("mla info --problem b=4,h=128,len=4096"));
  command->callback([options, &exit_code] { exit_code = run_info(*options); });
}

}  // namespace mla::cli
