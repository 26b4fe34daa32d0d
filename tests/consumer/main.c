/* The C interface from a C99 program outside the tree. */
#include <mla/mla.h>
#include <stdio.h>

int main(void) {
  mla_problem problem = MLA_PROBLEM_INIT;
  mla_plan* plan = NULL;
  problem.num_requests = problem.num_tokens = 1;
  problem.num_heads = 16;
  problem.max_seq_len = 4096;
  if (mla_plan_create(&problem, NULL, &plan) != MLA_OK) {
    printf("%s\n", mla_last_error());
    return 1;
  }
  printf("%s %s %lu\n", mla_version(), mla_plan_backend(plan),
         (unsigned long)mla_plan_workspace_bytes(plan));
  mla_plan_destroy(plan);
  return 0;
}
