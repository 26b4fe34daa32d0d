// What `mla bench` finds out about one line on a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "bench_result.hpp"

namespace mla::cli {

/// The card as it names itself.
struct GpuInfo {
  std::string name;
  int multiprocessors = 0;
  std::int64_t memory_bytes = 0;
  std::int64_t l2_bytes = 0;
  int driver = 0;  ///< CUDA version, 13000 for 13.0
  int runtime = 0;
};

/// One timed line. Times are microseconds of one call with all its launches.
struct GpuMeasurement {
  std::string backend;
  BenchWork work;
  double median_us = 0.0;
  double best_us = 0.0;
  double worst_us = 0.0;
  int replays = 0;
  int calls = 0;              ///< of the graph, each on other pages, with its own q and outputs
  bool cold = false;          ///< enough bytes lie between two uses of a page
  unsigned clock_before = 0;  ///< MHz while the replays before the timed ones ran; 0: not known
  unsigned clock_after = 0;   ///< MHz at the end of the timed ones
  BenchCheck check;           ///< before the timing; a wrong result is not timed
};

}  // namespace mla::cli
