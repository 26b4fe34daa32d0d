// All of libmla's C++ interface.
#pragma once

#include "mla/communicator.hpp"
#include "mla/decode.hpp"   // IWYU pragma: export
#include "mla/distributed.hpp"
#include "mla/merge.hpp"    // IWYU pragma: export
#include "mla/problem.hpp"  // IWYU pragma: export
#include "mla/sharding.hpp" // IWYU pragma: export
#include "mla/status.hpp"   // IWYU pragma: export
#include "mla/tensor.hpp"   // IWYU pragma: export
