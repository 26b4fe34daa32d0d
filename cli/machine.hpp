// What the commands say about the machine. Everything is read from the operating system; what it does
// not tell is empty or 0.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mla::cli {

struct CacheInfo {
  int level = 0;
  std::string type;             ///< "Data", "Instruction" or "Unified"
  std::int64_t bytes = 0;
  std::string shared_by;        ///< CPU list, for example "0-7"
};

struct MachineInfo {
  std::string cpu_name;
  std::vector<std::string> features;  ///< of the ISA features that kernels care about, those present
  int online_cpus = 0;
  int usable_cpus = 0;                ///< this process may run on
  int openmp_threads = 0;             ///< the default number of workers
  double clock_mhz = 0.0;             ///< of the fastest CPU, now
  std::int64_t memory_bytes = 0;
  std::vector<CacheInfo> caches;      ///< of CPU 0
  std::string operating_system;
};

MachineInfo read_machine();

/// "12.3 GB", "512 KiB" style sizes; powers of two.
std::string size_text(std::int64_t bytes);

/// The date and time in UTC, "2026-01-31 17:05:00 UTC".
std::string utc_now();

/// The commit this program was built from, "unknown" outside a repository.
const char* build_commit() noexcept;

}  // namespace mla::cli
