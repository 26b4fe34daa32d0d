// Batch files: one decode call in a safetensors file (docs/batch-files.md).
//
// Tensors: q, or q_nope and q_pe; kv_cache; block_table, seq_lens (dense) or indices (sparse);
// optional query_start_loc, causal_seqlens_kv_global, sinks, alibi_slopes, kv_page_ids.
// Metadata: format=mla-batch-1, kv_lora_rank, qk_rope_head_dim, bmm1_scale; optional bmm2_scale,
// causal, cp_world, cp_rank, cp_interleave, logits_soft_cap, sliding_window, lse_base, out_dtype,
// kv_layer, kv_pool_pages.
//
// Values are parsed strictly: the whole string is one integer, one finite decimal number, one of
// true/false/1/0, or one listed word. Names that the format does not have are kept in
// `Batch::ignored`, so that a file may carry notes and expected results, except a name that is one
// edit away from a known name which is absent: that is refused as a misspelling.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors.hpp"
#include "mla/problem.hpp"
#include "mla/status.hpp"

namespace mla::io {

/// A batch and the memory that its views point into.
struct Batch {
  DecodeProblem problem;             ///< bounds are the file's own lengths
  DecodeTensors tensors;             ///< inputs only; out and lse are not given
  std::vector<std::string> ignored;  ///< tensors and keys that the format does not have
  std::vector<std::shared_ptr<const void>> storage;
};

struct BatchLimits {
  /// Address space of the pool that kv_pool_pages asks for. Unowned pages cost no memory.
  std::uint64_t max_pool_bytes = std::uint64_t{1} << 40;
};

/// Reads a batch. The tensors' types and ranks are what the format asks for, and what is needed to
/// fill `problem` has been checked; that shapes and contents agree is left to `mla::run`.
///
/// kIo: the file cannot be read. kInvalidArgument: one sentence that names the tensor or key, the
/// value found and the value needed. kOutOfMemory: no address space for the pool.
Result<Batch> read_batch(const std::string& path, const BatchLimits& limits = {});

/// The same from memory, which must outlive the batch. `source` stands for the path in messages.
Result<Batch> parse_batch(std::span<const std::byte> bytes, const std::string& source = "memory",
                          const BatchLimits& limits = {});

struct BatchWriteOptions {
  /// Writes only the pages that block_table (up to seq_lens) or indices name, with kv_page_ids and
  /// kv_pool_pages, so that a small batch of a large pool makes a small file.
  bool only_owned_pages = false;
};

/// Writes a batch whose tensors lie in host memory; `read_batch` gives back the same values, with
/// contiguous tensors and with max_seq_len and max_query_len as tight as the lengths. Strides are
/// free. Scales given by pointer are read.
Status write_batch(const std::string& path, const DecodeProblem& problem,
                   const DecodeTensors& tensors, const BatchWriteOptions& options = {});

/// Writes `out` and, when given, `lse`.
Status write_result(const std::string& path, const TensorView& out, const TensorView& lse,
                    const Metadata& metadata = {});

}  // namespace mla::io
