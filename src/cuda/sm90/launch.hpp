// The host side of the sm90 kernels: which instantiation, how large a grid, how much workspace.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/split.hpp"
#include "cuda/call.hpp"
#include "cuda/sm90/params.hpp"
#include "mla/decode.hpp"

namespace mla::sm90 {

/// What the copy engine reads, by value.
struct TensorMaps {
  CUtensorMap kv;      ///< [pages][page_size][D] in boxes of box_keys x 64
  CUtensorMap q_nope;  ///< rows in boxes of block_rows x 64; unused with QueryLoad::kRows
  CUtensorMap q_pe;
};

/// Launches one instantiation on a stream; a cooperative launch of `num_ctas`.
using LaunchKernel = cudaError_t (*)(const TensorMaps& maps, const KernelParams& params,
                                     int num_ctas, cudaStream_t stream);

/// The instantiations of one element type and width, by row-block size (16, 32 or 64), with or
/// without the rare paths.
LaunchKernel kernel_bf16_512_64(int rows, bool plain);  // decode_bf16_512_64.cu, and so on
LaunchKernel kernel_bf16_512_0(int rows, bool plain);
LaunchKernel kernel_bf16_256_64(int rows, bool plain);
LaunchKernel kernel_f16_512_64(int rows, bool plain);
LaunchKernel kernel_f16_512_0(int rows, bool plain);
LaunchKernel kernel_f16_256_64(int rows, bool plain);

Geometry make_geometry(const PlanState& state, int num_multiprocessors) noexcept;

Status configure(PlanState& state);
Status launch(const PlanState& state, const DecodeTensors& tensors, std::byte* workspace,
              void* stream);

}  // namespace mla::sm90
