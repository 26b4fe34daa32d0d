// How `mla bench` prints what it measured on a GPU.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gpu_measurement.hpp"
#include "peers.hpp"
#include "statistics.hpp"

namespace mla::cli {

/// Everything that is printed about one line.
struct GpuRow {
  std::string name;  ///< of the suite's shape; empty: the problem
  std::string problem;
  std::int64_t rows = 0;  ///< of one request
  GpuMeasurement measured;
  double limit_us = 0.0;
  Peer peer;  ///< without a name: none

  double gbs() const { return measured.work.bytes / (measured.median_us * 1e3); }
  double tflops() const { return measured.work.flops / (measured.median_us * 1e6); }
  double over_limit() const { return measured.median_us / limit_us; }
  double peer_ratio() const { return peer.us / measured.median_us; }
  double spread() const { return (measured.worst_us - measured.best_us) / measured.median_us; }
};

/// Prints to stdout; `format` is table, csv or json.
class GpuOutput {
 public:
  explicit GpuOutput(std::string format) : format_(std::move(format)) {}

  void header(const GpuInfo& gpu, const std::string& backend, const std::string& peers_device);
  void row(const GpuRow& row);
  /// A line that the row does not serve.
  void unserved(const std::string& name, const std::string& reason);
  /// The means, with more than one line, and the verdict.
  void finish(const BenchTally& tally);

 private:
  void table_row(const GpuRow& row);
  void csv_row(const GpuRow& row);
  void json_row(const GpuRow& row);
  void print_summary(const RatioSummary& summary) const;

  std::string format_;
  bool first_ = true;
  std::vector<RatioLine> lines_;
  nlohmann::ordered_json document_;
};

}  // namespace mla::cli
