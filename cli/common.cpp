// Messages, exit codes, shared flags and progress.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iomanip>
#include <iostream>
#include <sstream>

#include "cli.hpp"
#include "core/backend.hpp"
#include "core/diagnostics.hpp"

namespace mla::cli {

int exit_code_of(const Status& status) noexcept {
  if (status.ok()) return kExitDone;
  return status.code() == StatusCode::kUnsupported ? kExitUnsupported : kExitBadInput;
}

std::string fixed(double value, int digits) {
  std::ostringstream stream;
  stream << std::fixed << std::setprecision(digits) << value;
  return stream.str();
}

int fail(const char* command, const Status& status) {
  return fail(command, exit_code_of(status), status.message());
}

int fail(const char* command, int exit_code, const std::string& message) {
  // Messages of the library begin with their operation, which often has the command's name.
  const std::string prefix = std::string(command) + ": ";
  const bool prefixed = message.compare(0, prefix.size(), prefix) == 0;
  std::cout.flush();
  std::cerr << "mla " << (prefixed ? "" : prefix) << message << std::endl;
  return exit_code;
}

PlanOptions BackendFlags::options() const {
  PlanOptions options;
  options.backend = backend;
  options.num_threads = threads;
  // A named row decides the device.
  for (const BackendInfo& row : backends()) {
    if (row.name == backend) options.device = row.device;
  }
  return options;
}

Result<BackendInfo> find_backend(const char* command, const std::string& name,
                                 std::optional<DeviceKind> device) {
  std::string known;
  std::string reason = absent_reason(name);
  for (const BackendInfo& row : backends()) {
    known += (known.empty() ? "" : ", ") + row.name;
    if (row.name != name) continue;
    if (device && row.device != *device) {
      return bad_argument(command, "--backend", name,
                          text("a row of device ", device_name(*device)));
    }
    if (row.reject_reason.empty()) return row;
    reason = row.reject_reason;
  }
  if (reason.empty()) return bad_argument(command, "--backend", name, text("one of ", known));
  return Status(StatusCode::kUnsupported, text(command, ": backend ", name, ": ", reason));
}

void add_backend_flags(CLI::App& command, BackendFlags& flags, const std::string& backend_help) {
  command.add_option("--backend", flags.backend, backend_help)->type_name("NAME");
  command.add_option("--threads", flags.threads, "CPU threads (default: all)")
      ->check(CLI::Range(1, 4096))
      ->type_name("N");
}

std::string example(const std::string& line) { return "Example:\n  " + line; }

void print_json(const nlohmann::ordered_json& value) {
  std::cout << value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n';
}

void Progress::update(std::int64_t done, std::int64_t total) {
  const auto now = Clock::now();
  const auto since = [now](Clock::time_point then) { return now - then; };
  if (since(start_) < std::chrono::seconds(2) || (shown_ && since(last_) < std::chrono::milliseconds(200))) {
    return;
  }
  if (isatty(STDERR_FILENO) == 0) return;
  std::cout.flush();
  std::string line = what_ + ' ' + std::to_string(done);
  if (total > 0) line += " of " + std::to_string(total);
  std::cerr << '\r' << line << "\033[K" << std::flush;
  last_ = now;
  shown_ = true;
}

void Progress::clear() {
  if (shown_) std::cerr << "\r\033[K" << std::flush;
  shown_ = false;
}

}  // namespace mla::cli
