#include "statistics.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace mla::cli {
namespace {

struct ClassRule {
  const char* name;
  std::function<bool(const RatioLine&)> holds;
};

ClassRule by_limit(const char* name, double low, double high) {
  return {name, [low, high](const RatioLine& line) {
            return line.limit_us >= low && line.limit_us < high;
          }};
}

ClassRule by_rows(const char* name, std::int64_t low, std::int64_t high) {
  return {name,
          [low, high](const RatioLine& line) { return line.rows >= low && line.rows <= high; }};
}

std::vector<ClassRule> class_rules() {
  constexpr std::int64_t kAnyRows = INT64_MAX;
  return {{"all", [](const RatioLine&) { return true; }},
          by_limit("limit under 5 us", 0.0, 5.0),
          by_limit("limit 5 to 20 us", 5.0, 20.0),
          by_limit("limit 20 to 75 us", 20.0, 75.0),
          by_limit("limit 75 to 300 us", 75.0, 300.0),
          by_limit("limit from 300 us", 300.0, HUGE_VAL),
          by_rows("rows to 16", 0, 16),
          by_rows("rows 17 to 32", 17, 32),
          by_rows("rows 33 to 64", 33, 64),
          by_rows("rows 65 to 128", 65, 128),
          by_rows("rows from 129", 129, kAnyRows)};
}

double mean_of_logarithms(double sum, int count) {
  return count > 0 ? std::exp(sum / count) : 0.0;
}

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

RatioSummary summarise(const std::vector<RatioLine>& lines) {
  RatioSummary summary;
  for (const ClassRule& rule : class_rules()) {
    RatioClass found;
    found.name = rule.name;
    double peer_sum = 0.0;
    double limit_sum = 0.0;
    for (const RatioLine& line : lines) {
      if (!rule.holds(line)) continue;
      ++found.lines;
      limit_sum += std::log(line.us / line.limit_us);
      if (line.peer_us <= 0.0) continue;
      ++found.peers;
      peer_sum += std::log(line.peer_us / line.us);
    }
    found.over_limit = mean_of_logarithms(limit_sum, found.lines);
    found.peer_ratio = mean_of_logarithms(peer_sum, found.peers);
    summary.classes.push_back(found);
  }
  for (const RatioLine& line : lines) {
    if (line.peer_us <= 0.0) continue;
    const bool worse = summary.worst.name.empty() ||
                       line.peer_us / line.us < summary.worst.peer_us / summary.worst.us;
    if (worse) summary.worst = line;
  }
  return summary;
}

}  // namespace mla::cli
