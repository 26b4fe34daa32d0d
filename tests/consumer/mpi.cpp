// A group of one process, through the installed mla::mpi.
#include <cstdio>

#include "mla/distributed.hpp"
#include "mla/mpi.hpp"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int failed = 1;
  {
    auto ranks = mla::make_mpi_communicator(MPI_COMM_WORLD);
    if (ranks.ok()) {
      mla::DecodeProblem problem;
      problem.num_requests = problem.num_tokens = 1;
      problem.num_heads = 16;
      problem.max_seq_len = 100;
      const auto plan = mla::plan_context_parallel(problem, **ranks);
      failed = plan.ok() && plan->heads().count == 16 ? 0 : 1;
      if (!plan.ok()) std::fprintf(stderr, "%s\n", plan.status().message().c_str());
    }
  }
  MPI_Finalize();
  return failed;
}
