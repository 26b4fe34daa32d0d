#include "machine.hpp"

#include <omp.h>
#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

#include "mla_commit.hpp"

namespace mla::cli {
namespace {

// Names as /proc/cpuinfo spells them (x86 "flags", Arm "Features").
constexpr std::array kFeatures = {
    "sse4_1",      "avx",         "f16c",     "fma",      "avx2",    "avx512f",  "avx512dq", "avx512bw",
    "avx512vl",    "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd",       "asimdhp",     "bf16",     "sve",      "sve2",    "svebf16",  "i8mm"};

std::string trimmed(const std::string& text) {
  const std::size_t first = text.find_first_not_of(" \t\n");
  if (first == std::string::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\n") - first + 1);
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return trimmed(line);
}

void read_cpuinfo(MachineInfo& machine) {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::string key = trimmed(line.substr(0, colon));
    const std::string value = trimmed(line.substr(colon + 1));
    if (key == "model name" && machine.cpu_name.empty()) machine.cpu_name = value;
    if (key == "cpu MHz") machine.clock_mhz = std::max(machine.clock_mhz, std::atof(value.c_str()));
    if ((key != "flags" && key != "Features") || !machine.features.empty()) continue;
    std::istringstream words(value);
    const std::vector<std::string> present{std::istream_iterator<std::string>(words), {}};
    for (const char* feature : kFeatures) {
      if (std::find(present.begin(), present.end(), feature) != present.end()) {
        machine.features.emplace_back(feature);
      }
    }
  }
}

std::int64_t parse_size(const std::string& text) {
  std::int64_t value = std::atoll(text.c_str());
  if (!text.empty() && text.back() == 'K') value <<= 10;
  if (!text.empty() && text.back() == 'M') value <<= 20;
  return value;
}

void read_caches(MachineInfo& machine) {
  for (int index = 0; index < 8; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + '/';
    CacheInfo cache;
    cache.level = std::atoi(first_line(folder + "level").c_str());
    if (cache.level == 0) break;
    cache.type = first_line(folder + "type");
    cache.bytes = parse_size(first_line(folder + "size"));
    cache.shared_by = first_line(folder + "shared_cpu_list");
    machine.caches.push_back(cache);
  }
}

}  // namespace

MachineInfo read_machine() {
  MachineInfo machine;
  read_cpuinfo(machine);
  read_caches(machine);
  machine.online_cpus = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  machine.usable_cpus = machine.online_cpus;
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof(usable), &usable) == 0) machine.usable_cpus = CPU_COUNT(&usable);
  machine.openmp_threads = omp_get_max_threads();
  machine.memory_bytes = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  utsname system{};
  if (uname(&system) == 0) {
    machine.operating_system = std::string(system.sysname) + ' ' + system.release + ' ' + system.machine;
  }
  if (machine.cpu_name.empty()) machine.cpu_name = system.machine;
  return machine;
}

std::string size_text(std::int64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < std::size(units)) {
    value /= 1024.0;
    ++unit;
  }
  std::array<char, 32> buffer{};
  const bool whole = value == static_cast<double>(static_cast<std::int64_t>(value));
  std::snprintf(buffer.data(), buffer.size(), whole ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return buffer.data();
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::array<char, 32> buffer{};
  std::strftime(buffer.data(), buffer.size(), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return buffer.data();
}

const char* build_commit() noexcept { return MLA_COMMIT; }

}  // namespace mla::cli
