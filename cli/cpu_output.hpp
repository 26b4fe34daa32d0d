// How `mla bench` prints what it measured on CPU rows.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "bench.hpp"
#include "machine.hpp"

namespace mla::cli {

/// Everything that is printed about one line.
struct CpuRow {
  std::string group;
  std::string problem;
  Measurement measured;
  BenchWork work;

  double gflops() const { return work.flops / (measured.median_ms * 1e6); }
  double gbs() const { return work.bytes / (measured.median_ms * 1e6); }
  double fma_percent() const { return percent(gflops(), measured.peak_gflops); }
  double dram_percent() const { return percent(gbs(), measured.peak_gbs); }
  static double percent(double part, double whole) { return whole > 0 ? 100 * part / whole : 0.0; }
};

/// Prints to stdout; `format` is table, csv or json.
class CpuOutput {
 public:
  explicit CpuOutput(std::string format) : format_(std::move(format)) {}

  void header(const MachineInfo& machine);
  void row(const CpuRow& row);
  void finish(const BenchTally& tally);

 private:
  void json_row(const CpuRow& row);
  void csv_row(const CpuRow& row) const;
  void table_row(const CpuRow& row);

  std::string format_;
  bool first_ = true;
  std::string group_;
  nlohmann::ordered_json document_;
};

}  // namespace mla::cli
