// The README's decode step as a C++17 program outside the tree.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "mla/mla.hpp"

int main() {
  mla::DecodeProblem problem;
  problem.num_requests = problem.num_tokens = 1;
  problem.num_heads = 4;
  problem.max_seq_len = 64;
  const std::vector<std::uint16_t> q(4 * 576), kv(64 * 576, 0x3F80);  // zeros; ones
  const std::int32_t table[] = {0};
  const std::int32_t seq_lens[] = {10};
  std::vector<std::uint16_t> out(4 * 512);
  mla::DecodeTensors tensors;
  tensors.q = mla::TensorView::contiguous(q.data(), mla::DType::kBF16, {1, 4, 576});
  tensors.kv_cache = mla::TensorView::contiguous(kv.data(), mla::DType::kBF16, {1, 64, 576});
  tensors.block_table = mla::TensorView::contiguous(table, mla::DType::kI32, {1, 1});
  tensors.seq_lens = mla::TensorView::contiguous(seq_lens, mla::DType::kI32, {1});
  tensors.out = mla::TensorView::contiguous(out.data(), mla::DType::kBF16, {1, 4, 512});
  tensors.bmm1_scale = 0.07F;
  try {
    const mla::DecodePlan plan = mla::value_or_throw(mla::plan(problem));
    std::vector<std::byte> workspace(plan.workspace_bytes());
    mla::throw_if_error(mla::run(plan, tensors, workspace.data(), workspace.size()));
    std::printf("%s %s\n", mla::version(), plan.backend_name());
    problem.num_heads = 0;
    mla::value_or_throw(mla::plan(problem));
  } catch (const mla::Error& error) {
    std::printf("%s\n", error.what());
    return out[0] == 0x3F80 && error.code() == mla::StatusCode::kInvalidArgument ? 0 : 1;
  }
  return 1;  // the second plan must be refused
}
