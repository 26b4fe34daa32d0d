// Statistics of the benches: the median of samples, geometric means over lines.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mla::cli {

/// Of at least one value; of an even number, halfway between the middle two.
double median(std::vector<double> values);

/// One timed line beside its limit and its fastest peer; all times in one unit.
struct RatioLine {
  std::string name;
  double us = 0.0;
  double limit_us = 0.0;
  double peer_us = 0.0;  ///< 0: no peer
  std::string peer;
  std::int64_t rows = 0;  ///< of one request: heads * query tokens
};

/// Means over the lines of one class; those without a peer count for `over_limit` only.
struct RatioClass {
  std::string name;
  int lines = 0;
  int peers = 0;  ///< lines with a peer
  /// Geometric mean of peer / ours; above 1 we are faster. 0: no line has a peer.
  double peer_ratio = 0.0;
  /// Geometric mean of ours / limit. 0: no lines.
  double over_limit = 0.0;
};

struct RatioSummary {
  /// All lines, then by limit (under 5, 20, 75, 300 us, more), then by rows (up to 16, 32, 64, 128,
  /// more).
  std::vector<RatioClass> classes;
  /// The line with the lowest peer / ours; no name: no line has a peer.
  RatioLine worst;
};
RatioSummary summarise(const std::vector<RatioLine>& lines);

}  // namespace mla::cli
