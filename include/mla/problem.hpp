// DecodeProblem and DecodeTensors: what one decode-attention call computes, and on which memory.
//
// Notation (docs/notation.md): B requests, T query tokens of all requests, H query heads,
// L = kv_lora_rank, R = qk_rope_head_dim, D = L + R, K = entries of a sparse index row,
// S_b = keys of request b on this rank, n_b = its query tokens, G_b = its global key count.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "mla/export.hpp"
#include "mla/status.hpp"
#include "mla/tensor.hpp"

namespace mla {

/// How a token is stored in the latent cache. The values are part of the C ABI.
enum class KvFormat : int {
  kBF16 = 1,      ///< D bf16 values, latent first
  kF16 = 2,       ///< D f16 values
  kE4M3 = 3,      ///< D e4m3 values; their one scale is inside bmm1_scale and bmm2_scale
  kFp8DsMla = 4,  ///< 656 bytes: 512 e4m3, 4 f32 scales (one per 128 latent values), 64 bf16 rope
};

/// "bf16", "f16", "e4m3" or "fp8_ds_mla".
MLA_API const char* to_string(KvFormat format) noexcept;

/// Base of the returned log-sum-exp. The values are part of the C ABI.
enum class LseBase : int { kE = 1, kTwo = 2 };

/// Everything that is known before a batch's lengths are: shapes, bounds, types and modes. A plan is
/// made from it alone and serves every batch within the bounds.
struct DecodeProblem {
  std::int64_t num_requests = 0;        ///< B
  std::int64_t num_tokens = 0;          ///< T, padding rows included
  std::int64_t num_heads = 0;           ///< H, any from 1
  std::int64_t kv_lora_rank = 512;      ///< L
  std::int64_t qk_rope_head_dim = 64;   ///< R, may be 0
  std::int64_t page_size = 64;          ///< tokens of a page, any from 1
  std::int64_t max_seq_len = 0;         ///< upper bound of S_b; may over-estimate without limit
  std::int64_t max_query_len = 1;       ///< upper bound of n_b; may over-estimate
  std::int64_t num_indices = 0;         ///< K; 0 means dense, more means sparse (`indices` is used)

  DType q_dtype = DType::kBF16;         ///< bf16, f16 or e4m3
  KvFormat kv_format = KvFormat::kBF16; ///< independent of q_dtype
  DType out_dtype = DType::kNone;       ///< bf16, f16 or f32; kNone: q's type, bf16 for e4m3 q

  bool causal = true;                   ///< row i of request b sees global positions <= G_b - n_b + i
  float logits_soft_cap = 0.0F;         ///< 0: off; else s = cap * tanh(x / cap)
  std::int64_t sliding_window = 0;      ///< 0: off; else only the last `sliding_window` positions
  bool uses_sinks = false;              ///< `sinks` will be given
  bool uses_alibi_slopes = false;       ///< `alibi_slopes` will be given

  std::int64_t cp_world = 1;            ///< W ranks share each sequence
  std::int64_t cp_rank = 0;             ///< r, this rank
  std::int64_t cp_interleave = 1;       ///< I consecutive tokens go to one rank

  LseBase lse_base = LseBase::kE;

  std::int64_t head_dim() const noexcept { return kv_lora_rank + qk_rope_head_dim; }
  bool sparse() const noexcept { return num_indices > 0; }
  /// Whether some row's visible keys depend on its own global position.
  bool uses_positions() const noexcept { return causal || sliding_window > 0 || uses_alibi_slopes; }
  DType resolved_out_dtype() const noexcept {
    if (out_dtype != DType::kNone) return out_dtype;
    return q_dtype == DType::kE4M3 ? DType::kBF16 : q_dtype;
  }
};

/// Type and row width of the kv_cache tensor for a format: element type, elements of one token.
MLA_API DType kv_dtype(KvFormat format) noexcept;
MLA_API std::int64_t kv_row_elements(const DecodeProblem& problem) noexcept;

/// Bytes of one page of one layer: page_size tokens. A latent cache has one row a token, not a key and
/// a value.
MLA_API std::int64_t kv_page_bytes(const DecodeProblem& problem) noexcept;

/// A factor given by value, or as one f32 that the backend reads when it runs (in host memory for a
/// CPU backend, in device memory for a CUDA backend).
struct Scale {
  float value = std::numeric_limits<float>::quiet_NaN();
  const float* pointer = nullptr;

  Scale() noexcept = default;
  Scale(float factor) noexcept : value(factor) {}            // NOLINT(google-explicit-constructor)
  explicit Scale(const float* factor) noexcept : pointer(factor) {}
};

/// The memory of one call. All pointers are host memory for a CPU backend and device memory for a
/// CUDA backend; the library reads and writes them only inside `run`.
struct DecodeTensors {
  TensorView q;       ///< [T,H,D], latent part first; or leave it out and give the two parts:
  TensorView q_nope;  ///< [T,H,L], the absorbed query
  TensorView q_pe;    ///< [T,H,R], the rotary query (not given when R = 0)

  TensorView kv_cache;     ///< [pages,page_size,D] (fp8_ds_mla: [pages,page_size,656] u8); strides of
                           ///< page and token free, last stride 1
  TensorView block_table;  ///< [B,width] i32, row stride free; columns >= ceil(S_b/page_size) unread
  TensorView seq_lens;     ///< [B] i32, S_b, new tokens included
  TensorView query_start_loc;           ///< [B+1] i32; not given: n_b = T/B for every request
  TensorView causal_seqlens_kv_global;  ///< [B] i32, G_b; needed when W > 1 and positions matter
  TensorView sinks;                     ///< [H] f32, natural-log units
  TensorView alibi_slopes;              ///< [H] f32
  TensorView indices;  ///< [T,K] i32, sparse mode: page * page_size + offset; an entry outside the
                       ///< pool is no key. block_table and seq_lens are then not read.

  TensorView out;  ///< [T,H,L], written in full
  TensorView lse;  ///< [T,H] f32, optional, written in full

  Scale bmm1_scale;         ///< the complete softmax scale, dequantisation included; required
  Scale bmm2_scale = 1.0F;  ///< value dequantisation
};

/// The problem string: `key=value` pairs joined by commas, for example
/// `b=4,h=128,page=64,kv=bf16,maxlen=4096,maxq=1`. Only what differs from a default is printed.
/// tests, CLI, logs and benches share this grammar (docs/notation.md).
MLA_API std::string to_string(const DecodeProblem& problem);

}  // namespace mla
