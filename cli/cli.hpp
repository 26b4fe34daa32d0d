// What the commands of the `mla` program share: registration, exit codes, messages, progress.
//
// A command is one file cmd_<name>.cpp with one `add_<name>_command` that registers a CLI11 subcommand
// whose callback does the work and sets `exit_code`. main.cpp parses and returns the exit code.
// Results go to stdout, every message to stderr. Flags are long; each command has `--json` and a
// `--help` that ends with one runnable example.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "mla/decode.hpp"
#include "mla/status.hpp"

namespace mla::cli {

inline constexpr int kExitDone = 0;
inline constexpr int kExitCheckFailed = 1;
inline constexpr int kExitBadInput = 2;     ///< bad usage or bad input
inline constexpr int kExitUnsupported = 3;  ///< a valid request that nothing here serves

// One function per command. CLI11 keeps references to the options of a command until parsing is over,
// so each command owns its options in a shared_ptr captured by its callback.
void add_info_command(CLI::App& app, int& exit_code);
void add_run_command(CLI::App& app, int& exit_code);
void add_plan_command(CLI::App& app, int& exit_code);
void add_check_command(CLI::App& app, int& exit_code);
void add_bench_command(CLI::App& app, int& exit_code);
void add_generate_command(CLI::App& app, int& exit_code);

/// The exit code of a failed Status: kUnsupported gives 3, a wrong result is the caller's business,
/// all other codes give 2.
int exit_code_of(const Status& status) noexcept;

/// `digits` after the point.
std::string fixed(double value, int digits);

/// Prints "mla <command>: <message>" on stderr and returns the exit code that belongs to it.
int fail(const char* command, const Status& status);
int fail(const char* command, int exit_code, const std::string& message);

/// --backend, --threads: how to run.
struct BackendFlags {
  std::string backend;  ///< empty: the first row that serves the problem
  int threads = 0;      ///< 0: as many as OpenMP gives

  PlanOptions options() const;
};
/// The row called `name`, which runs here. kInvalidArgument: there is no such row, or it is of
/// another device than `device`. kUnsupported: it does not run here.
Result<BackendInfo> find_backend(const char* command, const std::string& name,
                                 std::optional<DeviceKind> device = {});
/// Adds the two flags; `backend_help` describes --backend.
void add_backend_flags(CLI::App& command, BackendFlags& flags, const std::string& backend_help);

/// The footer of a command's --help: "Example:\n  <line>".
std::string example(const std::string& line);

/// Writes indented JSON and a newline to stdout.
void print_json(const nlohmann::ordered_json& value);

/// One line of progress on stderr, rewritten in place: only on a terminal, and only once the work has
/// lasted two seconds.
class Progress {
 public:
  explicit Progress(std::string what) : what_(std::move(what)) {}
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` of `total`; a total of 0 shows the count alone.
  void update(std::int64_t done, std::int64_t total);
  /// Removes the line; call before printing anything else.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = start_;
  bool shown_ = false;
};

}  // namespace mla::cli
