// Ranks compare what each of them checked alone, before any payload moves.
#pragma once

#include <cstdint>
#include <vector>

#include "mla/communicator.hpp"

namespace mla {

/// Something that must be the same on every rank.
struct AgreedField {
  const char* name;
  std::int64_t value;
};

/// The same Status on every rank: the first failing rank's `mine`, as "rank r: ..."; else the
/// refusal of the first field in which a rank differs from rank 0; else ok. Fields are in the same
/// order on every rank.
Status agree(Communicator& ranks, const char* operation, const Status& mine,
             const std::vector<AgreedField>& fields);

}  // namespace mla
