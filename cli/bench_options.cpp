#include "bench_options.hpp"

namespace mla::cli {

Result<testkit::Case> bench_case(const BenchOptions& options, const std::string& problem) {
  Result<testkit::Case> parsed = testkit::parse_case(problem);
  if (!parsed.ok()) return parsed;
  if (options.page_size > 0) parsed->page = options.page_size;
  for (KvFormat format : {KvFormat::kBF16, KvFormat::kF16, KvFormat::kE4M3, KvFormat::kFp8DsMla}) {
    if (options.cache == to_string(format)) parsed->kv = format;
  }
  // No row mixes f16 with bf16.
  if (options.cache == "f16") parsed->q = DType::kF16;
  return parsed;
}

}  // namespace mla::cli
