/* The C interface as a C99 program sees it, linked against the shared library. Every claim is one
 * CHECK; the exit status counts those that fail. */
#include "mla/mla.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      printf("%s:%d: failed: %s (last error: %s)\n", __FILE__, __LINE__, #condition, \
             mla_last_error());                                                      \
      ++failures;                                                                    \
    }                                                                                \
  } while (0)

#define CHECK_REFUSED(call, status, sentence)         \
  do {                                                \
    CHECK((call) == (status));                        \
    CHECK(strcmp(mla_last_error(), (sentence)) == 0); \
  } while (0)

enum {
  kTokens = 2,
  kHeads = 2,
  kRank = 16,
  kRope = 16,
  kWidth = kRank + kRope,
  kPage = 4,
  kPages = 2
};

/* One request per token, 3 and 4 keys, ones everywhere: out is 1 and lse 0.25 * 32 + ln(keys). */
static uint16_t q[kTokens * kHeads * kWidth];
static uint16_t kv[kPages * kPage * kWidth];
static int32_t table[kTokens] = {1, 0};
static int32_t seq_lens[kTokens] = {3, 4};
static uint16_t out[kTokens * kHeads * kRank];
static float lse[kTokens * kHeads];

static mla_problem make_problem(void) {
  mla_problem problem = MLA_PROBLEM_INIT;
  problem.num_requests = kTokens;
  problem.num_tokens = kTokens;
  problem.num_heads = kHeads;
  problem.kv_lora_rank = kRank;
  problem.qk_rope_head_dim = kRope;
  problem.page_size = kPage;
  problem.max_seq_len = 4;
  return problem;
}

static mla_tensors make_tensors(void) {
  const int64_t q_shape[] = {kTokens, kHeads, kWidth};
  const int64_t kv_shape[] = {kPages, kPage, kWidth};
  const int64_t table_shape[] = {kTokens, 1};
  const int64_t out_shape[] = {kTokens, kHeads, kRank};
  mla_tensors tensors;
  size_t i;
  for (i = 0; i < sizeof(q) / sizeof(q[0]); ++i) q[i] = 0x3F80;
  for (i = 0; i < sizeof(kv) / sizeof(kv[0]); ++i) kv[i] = 0x3F80;
  memset(out, 0xFF, sizeof(out));
  memset(lse, 0xFF, sizeof(lse));
  mla_tensors_init(&tensors);
  tensors.q = mla_contiguous(q, MLA_BF16, 3, q_shape);
  tensors.kv_cache = mla_contiguous(kv, MLA_BF16, 3, kv_shape);
  tensors.block_table = mla_contiguous(table, MLA_I32, 2, table_shape);
  tensors.seq_lens = mla_contiguous(seq_lens, MLA_I32, 1, table_shape);
  tensors.out = mla_contiguous(out, MLA_BF16, 3, out_shape);
  tensors.lse = mla_contiguous(lse, MLA_F32, 2, out_shape);
  tensors.bmm1_scale.value = 0.25f;
  return tensors;
}

static void check_result(void) {
  int i;
  for (i = 0; i < kTokens * kHeads * kRank; ++i) CHECK(out[i] == 0x3F80);
  for (i = 0; i < kTokens * kHeads; ++i) {
    CHECK(fabs((double)lse[i] - (8.0 + log((double)seq_lens[i / kHeads]))) < 1e-4);
  }
}

static void every_row_runs(void) {
  const int32_t count = mla_num_backends();
  int32_t index;
  int ran = 0;
  CHECK(count >= 1);
  for (index = 0; index < count; ++index) {
    const char* name = NULL;
    const char* description = NULL;
    const char* reason = NULL;
    mla_problem problem = make_problem();
    mla_plan_options options = MLA_PLAN_OPTIONS_INIT;
    mla_tensors tensors = make_tensors();
    mla_plan* plan = NULL;
    char row[64];
    CHECK(mla_backend(index, NULL, NULL, NULL) == MLA_OK);
    /* The strings live until the next call. */
    CHECK(mla_backend(index, &name, &description, &reason) == MLA_OK);
    CHECK(name != NULL && description != NULL && reason != NULL);
    if (reason[0] != '\0' || strncmp(name, "cpu_", 4) != 0) continue;
    strncpy(row, name, sizeof(row) - 1);
    row[sizeof(row) - 1] = '\0';
    options.backend = row;
    options.num_threads = 2;
    CHECK(mla_plan_create(&problem, &options, &plan) == MLA_OK);
    if (plan == NULL) continue;
    CHECK(strcmp(mla_plan_backend(plan), row) == 0);
    {
      const size_t bytes = mla_plan_workspace_bytes(plan);
      size_t same = 1;
      void* workspace = calloc(1, bytes + 1);
      CHECK(mla_workspace_size(&problem, &options, &same) == MLA_OK);
      CHECK(same == bytes);
      CHECK(mla_run(plan, &tensors, workspace, bytes, NULL) == MLA_OK);
      CHECK(strcmp(mla_last_error(), "") == 0);
      check_result();
      free(workspace);
    }
    mla_plan_destroy(plan);
    ++ran;
  }
  CHECK(ran >= 1);
}

static void wrong_arguments_are_refused(void) {
  mla_problem problem = make_problem();
  mla_plan_options options = MLA_PLAN_OPTIONS_INIT;
  mla_plan* plan = NULL;
  size_t bytes = 7;
  problem.num_heads = 0;
  CHECK_REFUSED(mla_plan_create(&problem, NULL, &plan), MLA_INVALID_ARGUMENT,
                "plan: num_heads: found 0, needed 1 to 2147483647");
  CHECK(plan == NULL);
  CHECK_REFUSED(mla_workspace_size(&problem, NULL, &bytes), MLA_INVALID_ARGUMENT,
                "plan: num_heads: found 0, needed 1 to 2147483647");
  CHECK(bytes == 7);
  problem = make_problem();
  problem.kv_format = 77;
  CHECK_REFUSED(mla_plan_create(&problem, NULL, &plan), MLA_INVALID_ARGUMENT,
                "plan: kv_format: found 77, needed bf16, f16, e4m3 or fp8_ds_mla");
  problem = make_problem();
  options.backend = "cpu_none";
  CHECK(mla_plan_create(&problem, &options, &plan) == MLA_INVALID_ARGUMENT);
  CHECK(strstr(mla_last_error(), "cpu_reference") != NULL);
  options.backend = NULL;
  options.device = 9;
  CHECK_REFUSED(mla_plan_create(&problem, &options, &plan), MLA_INVALID_ARGUMENT,
                "plan: device: found 9, needed cpu or cuda");
  CHECK(mla_backend(-1, NULL, NULL, NULL) == MLA_INVALID_ARGUMENT);
  CHECK(mla_backend(mla_num_backends(), NULL, NULL, NULL) == MLA_INVALID_ARGUMENT);
  CHECK(plan == NULL);
}

static void null_pointers_are_refused(void) {
  mla_problem problem = make_problem();
  mla_tensors tensors = make_tensors();
  mla_plan* plan = NULL;
  size_t bytes = 0;
  int64_t shape[1] = {1};
  CHECK_REFUSED(mla_plan_create(NULL, NULL, &plan), MLA_INVALID_ARGUMENT,
                "plan: problem: found a null pointer, needed a struct");
  CHECK_REFUSED(mla_plan_create(&problem, NULL, NULL), MLA_INVALID_ARGUMENT,
                "plan: plan: found a null pointer, needed where to put the plan");
  CHECK_REFUSED(mla_workspace_size(NULL, NULL, &bytes), MLA_INVALID_ARGUMENT,
                "plan: problem: found a null pointer, needed a struct");
  CHECK_REFUSED(mla_workspace_size(&problem, NULL, NULL), MLA_INVALID_ARGUMENT,
                "plan: bytes: found a null pointer, needed where to put the size");
  CHECK_REFUSED(mla_run(NULL, &tensors, NULL, 0, NULL), MLA_INVALID_ARGUMENT,
                "run: plan: found a null pointer, needed a plan");
  CHECK(mla_plan_create(&problem, NULL, &plan) == MLA_OK);
  CHECK_REFUSED(mla_run(plan, NULL, NULL, 0, NULL), MLA_INVALID_ARGUMENT,
                "run: tensors: found a null pointer, needed a struct");
  if (mla_plan_workspace_bytes(plan) > 0) {
    CHECK(mla_run(plan, &tensors, NULL, mla_plan_workspace_bytes(plan), NULL) ==
          MLA_INVALID_ARGUMENT);
    CHECK(mla_run(plan, &tensors, &bytes, sizeof(bytes), NULL) == MLA_INVALID_ARGUMENT);
  }
  tensors.q.data = NULL;
  CHECK_REFUSED(mla_run(plan, &tensors, NULL, 0, NULL), MLA_INVALID_ARGUMENT,
                "run: q: found a null pointer, needed memory");
  mla_plan_destroy(plan);
  mla_plan_destroy(NULL);
  mla_tensors_init(NULL);
  CHECK(mla_plan_workspace_bytes(NULL) == 0);
  CHECK(strcmp(mla_plan_backend(NULL), "") == 0);
  CHECK(mla_merge(NULL, NULL, 1, NULL, NULL, MLA_LSE_BASE_E) == MLA_INVALID_ARGUMENT);
  CHECK(mla_contiguous(NULL, MLA_F32, 1, NULL).rank == 0);
  CHECK(mla_contiguous(NULL, MLA_F32, 5, shape).rank == 0);
  CHECK(mla_contiguous(NULL, MLA_F32, -1, shape).rank == 0);
}

static void structs_of_other_versions(void) {
  mla_problem problem = make_problem();
  mla_plan_options options = MLA_PLAN_OPTIONS_INIT;
  mla_tensors tensors = make_tensors();
  mla_plan* plan = NULL;
  char sentence[200];
  /* Newer than the library: it may mean something that the library does not know. */
  problem.struct_size += 8;
  snprintf(sentence, sizeof(sentence),
           "plan: problem: found struct_size %lu, needed %lu or an older version's, from its "
           "initialiser",
           (unsigned long)problem.struct_size, (unsigned long)sizeof(problem));
  CHECK_REFUSED(mla_plan_create(&problem, NULL, &plan), MLA_INVALID_ARGUMENT, sentence);
  /* Never initialised. */
  problem.struct_size = 0;
  CHECK(mla_plan_create(&problem, NULL, &plan) == MLA_INVALID_ARGUMENT);
  problem = make_problem();
  options.struct_size = 3;
  CHECK(mla_plan_create(&problem, &options, &plan) == MLA_INVALID_ARGUMENT);
  options.struct_size = sizeof(options) + 1;
  CHECK(mla_plan_create(&problem, &options, &plan) == MLA_INVALID_ARGUMENT);
  CHECK(plan == NULL);
  /* Older: what lies behind its end keeps the defaults, whatever the memory holds. */
  problem.cp_world = 0;
  problem.cp_rank = 99;
  problem.cp_interleave = -5;
  problem.struct_size = offsetof(mla_problem, cp_world);
  CHECK(mla_plan_create(&problem, NULL, &plan) == MLA_OK);
  CHECK(plan != NULL);
  tensors.struct_size = sizeof(tensors) + 16;
  CHECK(mla_run(plan, &tensors, NULL, 0, NULL) == MLA_INVALID_ARGUMENT);
  tensors = make_tensors();
  tensors.struct_size = offsetof(mla_tensors, bmm2_scale);
  tensors.bmm2_scale.value = 1e30f;
  {
    void* workspace = calloc(1, mla_plan_workspace_bytes(plan) + 1);
    CHECK(mla_run(plan, &tensors, workspace, mla_plan_workspace_bytes(plan), NULL) == MLA_OK);
    check_result();
    free(workspace);
  }
  mla_plan_destroy(plan);
}

static void the_initialiser_requires_the_scale(void) {
  mla_problem problem = make_problem();
  mla_tensors tensors = make_tensors();
  mla_tensors fresh;
  mla_plan* plan = NULL;
  mla_tensors_init(&fresh);
  CHECK(fresh.struct_size == sizeof(fresh));
  CHECK(isnan(fresh.bmm1_scale.value));
  CHECK(fresh.bmm2_scale.value == 1.0f);
  CHECK(fresh.q.dtype == MLA_DTYPE_NONE);
  tensors.bmm1_scale = fresh.bmm1_scale;
  CHECK(mla_plan_create(&problem, NULL, &plan) == MLA_OK);
  CHECK_REFUSED(mla_run(plan, &tensors, NULL, 0, NULL), MLA_INVALID_ARGUMENT,
                "run: bmm1_scale: found nan, needed a finite factor, or a pointer to one");
  /* The next call that succeeds clears the sentence. */
  CHECK(mla_backend(0, NULL, NULL, NULL) == MLA_OK);
  CHECK(strcmp(mla_last_error(), "") == 0);
  mla_plan_destroy(plan);
}

static void states_merge(void) {
  const int64_t shape[] = {1, 1, 2};
  float a[2] = {0.0f, 4.0f};
  float b[2] = {8.0f, 4.0f};
  float lse_a = 1.0f;
  float lse_b = 1.0f;
  float merged[2] = {0.0f, 0.0f};
  float merged_lse = 0.0f;
  mla_tensor outs[2];
  mla_tensor lses[2];
  mla_tensor target = mla_contiguous(merged, MLA_F32, 3, shape);
  mla_tensor target_lse = mla_contiguous(&merged_lse, MLA_F32, 2, shape);
  outs[0] = mla_contiguous(a, MLA_F32, 3, shape);
  outs[1] = mla_contiguous(b, MLA_F32, 3, shape);
  lses[0] = mla_contiguous(&lse_a, MLA_F32, 2, shape);
  lses[1] = mla_contiguous(&lse_b, MLA_F32, 2, shape);
  CHECK(mla_merge(outs, lses, 2, &target, &target_lse, MLA_LSE_BASE_E) == MLA_OK);
  CHECK(merged[0] == 4.0f && merged[1] == 4.0f);
  CHECK(fabs((double)merged_lse - (1.0 + log(2.0))) < 1e-6);
  CHECK(mla_merge(outs, lses, 2, &target, &target_lse, MLA_LSE_BASE_TWO) == MLA_OK);
  CHECK(fabs((double)merged_lse - 2.0) < 1e-6);
  CHECK(mla_merge(outs, lses, 0, &target, &target_lse, MLA_LSE_BASE_E) == MLA_INVALID_ARGUMENT);
  CHECK_REFUSED(mla_merge(outs, lses, 2, &target, &target_lse, (mla_lse_base)10),
                MLA_INVALID_ARGUMENT, "merge: lse_base: found 10, needed e or 2");
  outs[1].rank = 9;
  CHECK(mla_merge(outs, lses, 2, &target, &target_lse, MLA_LSE_BASE_E) == MLA_INVALID_ARGUMENT);
  outs[1].rank = -3;
  CHECK(mla_merge(outs, lses, 2, &target, &target_lse, MLA_LSE_BASE_E) == MLA_INVALID_ARGUMENT);
}

int main(void) {
  CHECK(strcmp(mla_version(), "0.1.0") == 0);
  CHECK(strcmp(mla_status_string(MLA_OK), "ok") == 0);
  CHECK(strcmp(mla_status_string((mla_status)99), "unknown status") == 0);
  every_row_runs();
  wrong_arguments_are_refused();
  null_pointers_are_refused();
  structs_of_other_versions();
  the_initialiser_requires_the_scale();
  states_merge();
  if (failures == 0) printf("capi_test: everything is right\n");
  return failures == 0 ? 0 : 1;
}
