// MLA_API marks what the shared library exports.
#pragma once

#if defined(__GNUC__)
#define MLA_API __attribute__((visibility("default")))
#else
#define MLA_API
#endif
