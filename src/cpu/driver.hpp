// Runs a plan with one instruction set's kernels: threads, schedule, merge, output.
#pragma once

#include <cstddef>

#include "core/split.hpp"
#include "cpu/kernel.hpp"
#include "mla/decode.hpp"

namespace mla::cpu {

/// Fills workers, tile geometry and workspace size of a plan that these kernels will run.
Status configure(PlanState& state, const KernelTable& kernels);

/// Computes out and lse.
Status launch(const PlanState& state, const KernelTable& kernels, const DecodeTensors& tensors,
              std::byte* workspace);

}  // namespace mla::cpu
