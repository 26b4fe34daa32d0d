// The host side that the CUDA backends share: grid, workspace and parameters of a call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/split.hpp"
#include "cuda/call_params.hpp"
#include "mla/decode.hpp"

namespace mla::cuda {

inline constexpr std::size_t kWorkspaceAlignment = 256;

/// What a plan fixes: row-block size, CTAs of a worker, grid, workspace.
struct Geometry {
  int block_rows = 0;
  int group = 1;
  int num_workers = 1;
  int num_ctas = 1;

  // Workspace, byte offsets.
  std::size_t progress = 0;
  std::size_t partial_stats = 0;
  std::size_t partial_out = 0;
  std::size_t total = 0;
};

/// Deals the row blocks of a request of at most `rows` rows to at most `max_ctas` CTAs that are
/// resident together. A partial row holds `latent` values.
Geometry make_geometry(std::int64_t rows, int block_rows, int max_ctas,
                       std::int64_t latent) noexcept;

/// The bound of a request's rows: tokens x heads, tokens at most `most_tokens`.
std::int64_t row_bound(const DecodeProblem& problem, std::int64_t most_tokens) noexcept;

/// The two query operands as views: the parts of q, or q_nope and q_pe.
void query_views(const DecodeProblem& problem, const DecodeTensors& tensors, TensorView& nope,
                 TensorView& pe) noexcept;

/// Whether base and strides of all rows are multiples of `bytes`.
bool rows_aligned(const TensorView& view, std::int64_t bytes) noexcept;

/// Lowers a bound that may be any int64.
std::int32_t clamp_to_int32(std::int64_t value) noexcept;

/// "run: workspace: ..." unless it is aligned.
Status check_workspace(const std::byte* workspace);

/// Everything that follows from the call and its geometry alone. `query_load` stays kRows.
void fill_call_params(const PlanState& state, const DecodeTensors& tensors,
                      const Geometry& geometry, std::byte* workspace, CallParams& p) noexcept;

}  // namespace mla::cuda
