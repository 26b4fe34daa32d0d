// Tensors of a Case: the data its seed means, laid out so that every byte nobody owns is poison.
//
// Poisoned are page 0 and all other pages without an owner, the slots past S_b in a last page, the gaps
// between strided rows, q of padding rows, block table columns past the length and, in sparse mode,
// block_table and seq_lens altogether. out and lse are NaN and lie between guard bands.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mla/decode.hpp"
#include "mla/status.hpp"
#include "testkit/buffer.hpp"
#include "testkit/case.hpp"

namespace mla::testkit {

/// out and lse of a problem: contiguous, NaN, between guard bands. Throws std::bad_alloc.
struct Outputs {
  explicit Outputs(const DecodeProblem& problem);
  Buffer out, lse;
  TensorView out_view, lse_view;
};

/// A generated batch. The views of `tensors` point into the buffers of this object.
struct Batch {
  Case source;
  CaseLengths lengths;
  DecodeProblem problem;
  DecodeTensors tensors;
  std::vector<std::vector<std::int32_t>> pages;  ///< page ids of each request, in key order

  Buffer q, q_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc;
  Buffer causal_seqlens_kv_global, sinks, alibi_slopes, indices;
  Buffer out, lse;

  /// Writes NaN over out and lse again.
  void poison_outputs() noexcept;
  /// A fingerprint of all inputs, gaps and poison included.
  std::uint64_t input_fingerprint() const noexcept;
};

/// kInvalidArgument: a count does not fit the 32-bit arrays of a batch. kOutOfMemory: it does not fit
/// the memory.
Result<std::unique_ptr<Batch>> make_batch(const Case& problem);

/// The same batch without a cache, for keys that lie elsewhere: `kv_cache` has its shape and a null
/// address, and `block_table` and `indices` name pages 0, 1, 2, ... in the order of the requests.
Result<std::unique_ptr<Batch>> make_batch_without_cache(const Case& problem);

/// Bytes that the tensors of a case take, about.
double batch_bytes(const Case& problem, const CaseLengths& lengths) noexcept;

/// Writes `count` floats as `dtype` (bf16, f16, f32, e4m3), rounded to nearest even.
void encode(DType dtype, const float* values, std::int64_t count, std::byte* bytes) noexcept;
/// Reads one element of `dtype`.
double decode(DType dtype, const std::byte* bytes) noexcept;

}  // namespace mla::testkit
