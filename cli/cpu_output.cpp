#include "cpu_output.hpp"

#include <iomanip>
#include <iostream>

#include "cli.hpp"
#include "core/diagnostics.hpp"

namespace mla::cli {
namespace {

using Json = nlohmann::ordered_json;

/// Three or four digits that mean something.
std::string milliseconds(double value) {
  return fixed(value, value < 1 ? 4 : value < 10 ? 3 : value < 100 ? 2 : 1);
}

}  // namespace

void CpuOutput::header(const MachineInfo& machine) {
  if (format_ == "json") {
    document_ = {{"version", version()},
                 {"commit", build_commit()},
                 {"date", utc_now()},
                 {"cpu", machine.cpu_name},
                 {"usable_cpus", machine.usable_cpus},
                 {"clock_mhz", machine.clock_mhz},
                 {"rows", Json::array()}};
    return;
  }
  std::cout << "# mla bench " << version() << ", commit " << build_commit() << ", " << utc_now()
            << '\n'
            << "# " << machine.cpu_name << ", " << machine.usable_cpus << " CPUs usable, "
            << fixed(machine.clock_mhz, 0) << " MHz now, ";
  for (const CacheInfo& cache : machine.caches) {
    if (cache.type != "Instruction")
      std::cout << 'L' << cache.level << ' ' << size_text(cache.bytes) << ' ';
  }
  std::cout << '\n'
            << "# median over samples whose probes, before and after, were near the best seen;\n"
               "# FLOP = keys * heads * query tokens * 2 * (L + R + L); %FMA is of the f32 FMA\n"
               "# probe; bytes = cached tokens once + q + out; %DRAM is of the DRAM read probe,\n"
               "# and more than 100 is cache\n";
  if (format_ == "csv") {
    std::cout
        << "group,problem,backend,threads,best_ms,median_ms,gflops,gbs,fma_percent,dram_percent,"
           "fma_peak_gflops,dram_peak_gbs,fma_isa,samples,kept,checked_rows,all_rows_checked,"
           "error\n";
  }
}

void CpuOutput::row(const CpuRow& row) {
  if (format_ == "json")
    json_row(row);
  else if (format_ == "csv")
    csv_row(row);
  else
    table_row(row);
  std::cout << std::flush;
}

void CpuOutput::finish(const BenchTally& tally) {
  if (format_ == "json") {
    document_["wrong_values"] = tally.wrong_values();
    print_json(document_);
  } else {
    std::cout << (format_ == "csv" ? "# " : "") << tally.verdict() << '\n';
  }
}

void CpuOutput::json_row(const CpuRow& row) {
  const Measurement& m = row.measured;
  document_["rows"].push_back({{"group", row.group},
                               {"problem", row.problem},
                               {"backend", m.backend},
                               {"threads", m.threads},
                               {"best_ms", m.best_ms},
                               {"median_ms", m.median_ms},
                               {"gflops", row.gflops()},
                               {"gbs", row.gbs()},
                               {"fma_percent", row.fma_percent()},
                               {"dram_percent", row.dram_percent()},
                               {"fma_peak_gflops", m.peak_gflops},
                               {"dram_peak_gbs", m.peak_gbs},
                               {"fma_isa", to_string(m.isa)},
                               {"samples", m.samples},
                               {"kept", m.kept},
                               {"checked_rows", m.check.rows},
                               {"all_rows_checked", m.check.all_rows},
                               {"error", m.check.error}});
}

void CpuOutput::csv_row(const CpuRow& row) const {
  const Measurement& m = row.measured;
  std::cout << '"' << row.group << "\",\"" << row.problem << "\"," << m.backend << ',' << m.threads
            << ',' << m.best_ms << ',' << m.median_ms << ',' << row.gflops() << ',' << row.gbs()
            << ',' << row.fma_percent() << ',' << row.dram_percent() << ',' << m.peak_gflops << ','
            << m.peak_gbs << ',' << to_string(m.isa) << ',' << m.samples << ',' << m.kept << ','
            << m.check.rows << ',' << m.check.all_rows << ',' << m.check.error << '\n';
}

void CpuOutput::table_row(const CpuRow& row) {
  const Measurement& m = row.measured;
  if (first_ || row.group != group_) {
    std::cout << '\n'
              << (row.group.empty() ? "problems" : row.group) << '\n'
              << "problem                             backend         thr   best ms    median"
                 "  GFLOP/s  %FMA    GB/s %DRAM   kept  checked\n";
  }
  first_ = false;
  group_ = row.group;
  std::cout << std::left << std::setw(35) << row.problem << ' ' << std::setw(15) << m.backend
            << std::right << std::setw(4) << m.threads << std::setw(10) << milliseconds(m.best_ms)
            << std::setw(10) << milliseconds(m.median_ms) << std::setw(9) << fixed(row.gflops(), 1)
            << std::setw(6) << fixed(row.fma_percent(), 0) << std::setw(8) << fixed(row.gbs(), 1)
            << std::setw(6) << fixed(row.dram_percent(), 0) << std::setw(7)
            << text(m.kept, '/', m.samples) << "  " << m.check.rows_text()
            << (m.kept == 0 ? "  disturbed: no probe stayed healthy" : "") << '\n';
}

}  // namespace mla::cli
