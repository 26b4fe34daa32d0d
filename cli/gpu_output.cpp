#include "gpu_output.hpp"

#include <iomanip>
#include <iostream>

#include "cli.hpp"
#include "core/diagnostics.hpp"
#include "machine.hpp"

namespace mla::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kNameWidth = 36;

/// Digits that mean something.
std::string microseconds(double value) {
  return fixed(value, value < 100 ? 2 : 1);
}

std::string cuda_version(int number) {
  return text(number / 1000, '.', number % 1000 / 10);
}

/// Long lists of lengths would push the columns out of sight.
std::string shortened(const std::string& name) {
  return name.size() <= kNameWidth ? name : name.substr(0, kNameWidth - 3) + "...";
}

Json to_json(const RatioSummary& summary) {
  Json classes = Json::array();
  for (const RatioClass& found : summary.classes) {
    if (found.lines == 0) continue;
    classes.push_back({{"class", found.name},
                       {"lines", found.lines},
                       {"lines_with_peer", found.peers},
                       {"peer_over_ours", found.peers > 0 ? Json(found.peer_ratio) : Json()},
                       {"ours_over_limit", found.over_limit}});
  }
  Json worst;
  if (!summary.worst.name.empty()) {
    worst = {{"name", summary.worst.name},
             {"peer_over_ours", summary.worst.peer_us / summary.worst.us}};
  }
  return {{"classes", classes}, {"worst", worst}};
}

}  // namespace

void GpuOutput::header(const GpuInfo& gpu, const std::string& backend,
                       const std::string& peers_device) {
  if (format_ == "json") {
    document_ = {{"version", version()},
                 {"commit", build_commit()},
                 {"date", utc_now()},
                 {"gpu", gpu.name},
                 {"multiprocessors", gpu.multiprocessors},
                 {"memory_bytes", gpu.memory_bytes},
                 {"l2_bytes", gpu.l2_bytes},
                 {"driver_cuda", cuda_version(gpu.driver)},
                 {"runtime_cuda", cuda_version(gpu.runtime)},
                 {"backend", backend},
                 {"peers_device", peers_device},
                 {"rows", Json::array()},
                 {"unserved", Json::array()}};
    return;
  }
  std::cout
      << "# mla bench " << version() << ", commit " << build_commit() << ", " << utc_now() << '\n'
      << "# " << gpu.name << ", " << gpu.multiprocessors << " SMs, " << size_text(gpu.memory_bytes)
      << ", L2 " << size_text(gpu.l2_bytes) << ", driver for CUDA " << cuda_version(gpu.driver)
      << ", runtime " << cuda_version(gpu.runtime) << ", backend " << backend << '\n'
      << "# us: median of ten replays of a graph that chains calls on cold, randomly permuted\n"
         "# pages, per call; spread: slowest less fastest replay; bytes = cached tokens once\n"
         "# + q + out; FLOP = keys * heads * query tokens * 2 * (L + R + L); limits and peers\n"
         "# (page 64, same method) were measured on "
      << peers_device << ";\n# peer/ours above 1: we are faster\n";
  if (format_ == "csv") {
    std::cout << "name,problem,backend,median_us,best_us,worst_us,gbs,tflops,limit_us,"
                 "ours_over_limit,peer,peer_us,peer_over_ours,clock_before_mhz,clock_after_mhz,"
                 "calls,replays,cold,checked_rows,all_rows_checked,error\n";
  }
}

void GpuOutput::row(const GpuRow& row) {
  lines_.push_back({row.name.empty() ? row.problem : row.name, row.measured.median_us, row.limit_us,
                    row.peer.us, row.peer.name, row.rows});
  if (format_ == "json")
    json_row(row);
  else if (format_ == "csv")
    csv_row(row);
  else
    table_row(row);
  std::cout << std::flush;
}

void GpuOutput::table_row(const GpuRow& row) {
  const GpuMeasurement& m = row.measured;
  if (first_) {
    std::cout << '\n'
              << std::left << std::setw(kNameWidth) << "name" << std::right
              << "        us      best spread    GB/s TFLOP/s     limit x limit      peer"
                 " peer/ours             MHz  calls  checked\n";
  }
  first_ = false;
  std::cout << std::left << std::setw(kNameWidth)
            << shortened(row.name.empty() ? row.problem : row.name) << std::right << std::setw(10)
            << microseconds(m.median_us) << std::setw(10) << microseconds(m.best_us) << std::setw(6)
            << fixed(100 * row.spread(), 1) << '%' << std::setw(8) << fixed(row.gbs(), 0)
            << std::setw(8) << fixed(row.tflops(), 1) << std::setw(10) << microseconds(row.limit_us)
            << std::setw(8) << fixed(row.over_limit(), 2);
  if (row.peer.name.empty()) {
    std::cout << std::setw(10) << '-' << std::setw(10) << '-' << ' ' << std::left << std::setw(10)
              << "" << std::right;
  } else {
    std::cout << std::setw(10) << microseconds(row.peer.us) << std::setw(10)
              << fixed(row.peer_ratio(), 3) << ' ' << std::left << std::setw(10) << row.peer.name
              << std::right;
  }
  std::cout << std::setw(5) << (m.clock_after > 0 ? std::to_string(m.clock_after) : "-")
            << std::setw(7) << m.calls << "  " << m.check.rows_text()
            << (m.cold ? "" : "  too small to be cold") << '\n';
}

void GpuOutput::csv_row(const GpuRow& row) {
  const GpuMeasurement& m = row.measured;
  std::cout << row.name << ",\"" << row.problem << "\"," << m.backend << ',' << m.median_us << ','
            << m.best_us << ',' << m.worst_us << ',' << row.gbs() << ',' << row.tflops() << ','
            << row.limit_us << ',' << row.over_limit() << ',';
  if (row.peer.name.empty())
    std::cout << ",,";
  else
    std::cout << row.peer.name << ',' << row.peer.us << ',' << row.peer_ratio();
  std::cout << ',' << m.clock_before << ',' << m.clock_after << ',' << m.calls << ',' << m.replays
            << ',' << m.cold << ',' << m.check.rows << ',' << m.check.all_rows << ','
            << m.check.error << '\n';
}

void GpuOutput::json_row(const GpuRow& row) {
  const GpuMeasurement& m = row.measured;
  const bool peer = !row.peer.name.empty();
  document_["rows"].push_back({{"name", row.name},
                               {"problem", row.problem},
                               {"backend", m.backend},
                               {"median_us", m.median_us},
                               {"best_us", m.best_us},
                               {"worst_us", m.worst_us},
                               {"gbs", row.gbs()},
                               {"tflops", row.tflops()},
                               {"limit_us", row.limit_us},
                               {"ours_over_limit", row.over_limit()},
                               {"peer", row.peer.name},
                               {"peer_us", peer ? Json(row.peer.us) : Json()},
                               {"peer_over_ours", peer ? Json(row.peer_ratio()) : Json()},
                               {"clock_before_mhz", m.clock_before},
                               {"clock_after_mhz", m.clock_after},
                               {"calls", m.calls},
                               {"replays", m.replays},
                               {"cold", m.cold},
                               {"checked_rows", m.check.rows},
                               {"all_rows_checked", m.check.all_rows},
                               {"error", m.check.error}});
}

void GpuOutput::unserved(const std::string& name, const std::string& reason) {
  if (format_ == "json")
    document_["unserved"].push_back({{"name", name}, {"reason", reason}});
  else
    std::cout << (format_ == "csv" ? "# " : "") << shortened(name) << "  not served: " << reason
              << std::endl;
}

void GpuOutput::print_summary(const RatioSummary& summary) const {
  const char* comment = format_ == "csv" ? "# " : "";
  std::cout << (format_ == "csv" ? "" : "\n") << comment << std::left << std::setw(22)
            << "geometric means" << std::right << "  lines  peer/ours  ours/limit\n";
  for (const RatioClass& found : summary.classes) {
    if (found.lines == 0) continue;
    std::cout << comment << std::left << std::setw(22) << found.name << std::right << std::setw(7)
              << found.lines << std::setw(11)
              << (found.peers > 0 ? fixed(found.peer_ratio, 3) : "-") << std::setw(12)
              << fixed(found.over_limit, 3) << '\n';
  }
  if (summary.worst.name.empty()) return;
  std::cout << comment << "worst: " << shortened(summary.worst.name) << ", "
            << fixed(summary.worst.peer_us / summary.worst.us, 3) << " of " << summary.worst.peer
            << '\n';
}

void GpuOutput::finish(const BenchTally& tally) {
  const RatioSummary summary = summarise(lines_);
  if (format_ == "json") {
    document_["summary"] = to_json(summary);
    document_["wrong_values"] = tally.wrong_values();
    print_json(document_);
    return;
  }
  if (lines_.size() > 1) print_summary(summary);
  std::cout << (format_ == "csv" ? "# " : "") << tally.verdict() << '\n';
}

}  // namespace mla::cli
