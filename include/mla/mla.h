/* The C interface of libmla (C99). It mirrors mla/decode.hpp and mla/merge.hpp; the contract of every
 * tensor and number is written there and in docs/notation.md.
 *
 * Structs begin with their size, so that fields can be appended: initialise them with the MLA_*_INIT
 * macros and never by hand. No function throws, prints or exits; each returns an mla_status, and
 * mla_last_error() gives the sentence that belongs to the last failure of the calling thread. */
#ifndef MLA_MLA_H_
#define MLA_MLA_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MLA_C_API __attribute__((visibility("default")))
#else
#define MLA_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mla_status {
  MLA_OK = 0,
  MLA_INVALID_ARGUMENT = 1,
  MLA_UNSUPPORTED = 2,
  MLA_OUT_OF_MEMORY = 3,
  MLA_IO = 4,
  MLA_DEVICE = 5,
  MLA_INTERNAL = 6,
  MLA_PEER = 7
} mla_status;

typedef enum mla_dtype {
  MLA_DTYPE_NONE = 0,
  MLA_F32 = 1,
  MLA_F16 = 2,
  MLA_BF16 = 3,
  MLA_E4M3 = 4,
  MLA_U8 = 5,
  MLA_I32 = 6
} mla_dtype;

typedef enum mla_kv_format {
  MLA_KV_BF16 = 1,
  MLA_KV_F16 = 2,
  MLA_KV_E4M3 = 3,
  MLA_KV_FP8_DS_MLA = 4
} mla_kv_format;

typedef enum mla_lse_base { MLA_LSE_BASE_E = 1, MLA_LSE_BASE_TWO = 2 } mla_lse_base;
typedef enum mla_device { MLA_DEVICE_CPU = 1, MLA_DEVICE_CUDA = 2 } mla_device;

/* Enumerators travel as int32_t, whose size no compiler flag changes. */

typedef struct mla_tensor {
  void* data;
  int32_t dtype;     /* mla_dtype; MLA_DTYPE_NONE: not given */
  int32_t rank;      /* 0 to 4 */
  int64_t shape[4];
  int64_t stride[4]; /* in elements */
} mla_tensor;

typedef struct mla_scale {
  float value;
  const float* pointer; /* when not null, read instead of value, in the backend's memory */
} mla_scale;

typedef struct mla_problem {
  size_t struct_size;
  int64_t num_requests;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t kv_lora_rank;
  int64_t qk_rope_head_dim;
  int64_t page_size;
  int64_t max_seq_len;
  int64_t max_query_len;
  int64_t num_indices;
  int32_t q_dtype;
  int32_t kv_format;
  int32_t out_dtype;
  int32_t causal;
  float logits_soft_cap;
  int32_t uses_sinks;
  int64_t sliding_window;
  int32_t uses_alibi_slopes;
  int32_t lse_base;
  int64_t cp_world;
  int64_t cp_rank;
  int64_t cp_interleave;
} mla_problem;

#define MLA_PROBLEM_INIT                                                                          \
  {sizeof(mla_problem), 0, 0, 0, 512, 64, 64, 0, 1, 0, MLA_BF16, MLA_KV_BF16, MLA_DTYPE_NONE, 1,  \
   0.0f, 0, 0, 0, MLA_LSE_BASE_E, 1, 0, 1}

typedef struct mla_plan_options {
  size_t struct_size;
  int32_t device;
  int32_t device_index;
  const char* backend; /* null: the first row that can run */
  int32_t num_threads;
  int32_t reserved;    /* 0 */
  int64_t num_splits;
  int64_t fixed_split;
} mla_plan_options;

#define MLA_PLAN_OPTIONS_INIT {sizeof(mla_plan_options), MLA_DEVICE_CPU, 0, NULL, 0, 0, 0, 0}

typedef struct mla_tensors {
  size_t struct_size;
  mla_tensor q, q_nope, q_pe;
  mla_tensor kv_cache, block_table, seq_lens, query_start_loc, causal_seqlens_kv_global;
  mla_tensor sinks, alibi_slopes, indices;
  mla_tensor out, lse;
  mla_scale bmm1_scale; /* required: the initialiser's NaN is refused */
  mla_scale bmm2_scale;
} mla_tensors;

/* Fills in the size, "not given" everywhere, bmm1_scale NaN and bmm2_scale 1. */
MLA_C_API void mla_tensors_init(mla_tensors* tensors);

/* A contiguous tensor of 1 to 4 dimensions. */
MLA_C_API mla_tensor mla_contiguous(const void* data, int32_t dtype, int32_t rank,
                                    const int64_t* shape);

typedef struct mla_plan mla_plan; /* immutable; may be shared between threads */

/* Validates and chooses a backend. *plan is written on success only; free it with mla_plan_destroy.
 * options may be null. */
MLA_C_API mla_status mla_plan_create(const mla_problem* problem, const mla_plan_options* options,
                                     mla_plan** plan);
MLA_C_API void mla_plan_destroy(mla_plan* plan); /* null is allowed */
MLA_C_API size_t mla_plan_workspace_bytes(const mla_plan* plan);
MLA_C_API const char* mla_plan_backend(const mla_plan* plan); /* lives as long as the library */

MLA_C_API mla_status mla_workspace_size(const mla_problem* problem, const mla_plan_options* options,
                                        size_t* bytes);

/* Computes out and lse; see mla::run. stream is a cudaStream_t for CUDA plans, else ignored. */
MLA_C_API mla_status mla_run(const mla_plan* plan, const mla_tensors* tensors, void* workspace,
                             size_t workspace_bytes, void* stream);

/* Merges `count` states given as parallel arrays; see mla::merge. */
MLA_C_API mla_status mla_merge(const mla_tensor* outs, const mla_tensor* lses, int64_t count,
                               const mla_tensor* merged_out, const mla_tensor* merged_lse,
                               int32_t lse_base);

/* Rows of the backend table. reject_reason is "" when the row runs on this machine; strings live until
 * the calling thread's next mla_backend call. */
MLA_C_API int32_t mla_num_backends(void);
MLA_C_API mla_status mla_backend(int32_t index, const char** name, const char** description,
                                 const char** reject_reason);

MLA_C_API const char* mla_status_string(int32_t status);
MLA_C_API const char* mla_last_error(void); /* "" when the thread's last call succeeded */
MLA_C_API const char* mla_version(void);

#ifdef __cplusplus
}
#endif

#endif /* MLA_MLA_H_ */
