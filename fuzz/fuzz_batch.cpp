// libFuzzer target: batch files from memory. Whatever the bytes are, the reader answers with a
// batch whose views lie in memory, or with a sentence.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "io/batch_file.hpp"
#include "mutate.hpp"

namespace {

volatile unsigned sink;

/// Touches the first and the last element of a view; a memory checker does the rest.
void touch(const mla::TensorView& view) {
  if (!view.given()) return;
  std::int64_t last = 0;
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.shape[axis] < 0) std::abort();
    if (view.shape[axis] == 0) return;
    last += (view.shape[axis] - 1) * view.stride[axis];
  }
  const auto* bytes = static_cast<const unsigned char*>(view.data);
  const std::size_t width = mla::dtype_bytes(view.dtype);
  if (reinterpret_cast<std::uintptr_t>(bytes) % width != 0) std::abort();
  sink = sink + bytes[0];
  sink = sink + bytes[static_cast<std::size_t>(last) * width + width - 1];
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  mla::io::BatchLimits limits;
  limits.max_pool_bytes = std::uint64_t{1} << 22;  // both kinds of pool, and quick
  const mla::Result<mla::io::Batch> batch =
      mla::io::parse_batch(std::as_bytes(std::span(data, size)), "memory", limits);
  if (!batch.ok()) {
    const std::string& message = batch.status().message();
    if (message.find(": found ") == std::string::npos) std::abort();
    if (message.find(", needed ") == std::string::npos) std::abort();
    if (batch.status().code() == mla::StatusCode::kInternal) std::abort();
    return 0;
  }
  const mla::DecodeTensors& tensors = batch->tensors;
  for (const mla::TensorView* view :
       {&tensors.q, &tensors.q_nope, &tensors.q_pe, &tensors.kv_cache, &tensors.block_table,
        &tensors.seq_lens, &tensors.query_start_loc, &tensors.causal_seqlens_kv_global,
        &tensors.sinks, &tensors.alibi_slopes, &tensors.indices}) {
    touch(*view);
  }
  const mla::DecodeProblem& problem = batch->problem;
  if (problem.num_tokens < 0 || problem.num_heads < 0 || problem.page_size < 0 ||
      problem.num_requests < 0 || problem.max_seq_len < 0 || problem.max_query_len < 1) {
    std::abort();
  }
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  return mla::fuzz::mutate_safetensors(data, size, max_size, seed);
}
