// Building a Status: one sentence, "operation: argument: found X, needed Y".
#pragma once

#include <sstream>
#include <string>

#include "mla/status.hpp"

#define MLA_RETURN_IF_ERROR(expression)                          \
  do {                                                           \
    if (::mla::Status mla_status = (expression); !mla_status.ok()) return mla_status; \
  } while (false)

namespace mla {

/// Joins its arguments with operator<<.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

/// The refusal of one argument.
template <class Found, class Needed>
Status bad_argument(const char* operation, const std::string& argument, const Found& found,
                    const Needed& needed) {
  return {StatusCode::kInvalidArgument,
          text(operation, ": ", argument, ": found ", found, ", needed ", needed)};
}

}  // namespace mla
