#include "distributed/agreement.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "core/diagnostics.hpp"

namespace mla {
namespace {

constexpr std::size_t kMaxFields = 24;

/// What a rank tells the others. Fixed in size, so that ranks that differ in anything can still
/// read it.
struct Report {
  std::int32_t code = 0;
  std::int32_t num_fields = 0;
  std::array<std::int64_t, kMaxFields> fields{};
  std::array<char, 824> message{};  // cut when longer
};
static_assert(std::is_trivially_copyable_v<Report> && sizeof(Report) == 1024);

Report report_of(const Status& mine, const std::vector<AgreedField>& fields) {
  Report report;
  report.code = static_cast<std::int32_t>(mine.code());
  report.num_fields = static_cast<std::int32_t>(fields.size());
  for (std::size_t i = 0; i < std::min(fields.size(), kMaxFields); ++i) {
    report.fields[i] = fields[i].value;
  }
  mine.message().copy(report.message.data(), report.message.size() - 1);
  return report;
}

}  // namespace

Status agree(Communicator& ranks, const char* operation, const Status& mine,
             const std::vector<AgreedField>& fields) {
  const Report report = report_of(mine, fields);
  std::vector<Report> all(static_cast<std::size_t>(ranks.world()));
  MLA_RETURN_IF_ERROR(ranks.exchange(&report, all.data(), sizeof(Report)));
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].code == 0) continue;
    all[r].message.back() = '\0';
    return {static_cast<StatusCode>(all[r].code), text("rank ", r, ": ", all[r].message.data())};
  }
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r].num_fields != all[0].num_fields) {
      return bad_argument(operation, text("rank ", r),
                          text(all[r].num_fields, " fields to agree on"),
                          text(all[0].num_fields, " as on rank 0: one version of the library"));
    }
    const auto differs =
        std::mismatch(all[r].fields.begin(), all[r].fields.end(), all[0].fields.begin());
    if (differs.first == all[r].fields.end()) continue;
    const auto field = static_cast<std::size_t>(differs.first - all[r].fields.begin());
    return bad_argument(operation, text("rank ", r, " ", fields[field].name), *differs.first,
                        text(*differs.second, " as on rank 0"));
  }
  return {};
}

}  // namespace mla
