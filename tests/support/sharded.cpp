#include "support/sharded.hpp"

#include <cmath>

namespace mla::test {
namespace {

constexpr unsigned char kUnwritten = 0xFF;  // NaN in every float type

/// This rank's view of what the whole scene was laid out as.
DecodeTensors own_tensors(DecodeTensors tensors, const HeadRange& heads, bool queries_gathered,
                          const TensorView& out, const TensorView& lse) {
  if (!queries_gathered) {
    for (TensorView* view : {&tensors.q, &tensors.q_nope, &tensors.q_pe})
      *view = heads_of(*view, heads);
  }
  tensors.out = heads_of(out, heads);
  tensors.lse = heads_of(lse, heads);
  if (heads.count == 0) tensors.out = tensors.lse = TensorView();
  return tensors;
}

}  // namespace

TensorView heads_of(TensorView view, const HeadRange& heads) {
  if (!view.given()) return view;
  view.shape[1] = heads.count;
  view.data = static_cast<std::byte*>(view.data) +
              heads.begin * view.stride[1] * static_cast<std::int64_t>(dtype_bytes(view.dtype));
  return view;
}

ShardedOutput decode_sharded(const Scene& scene, const ShardedOptions& options) {
  ShardedOutput result;
  result.statuses.resize(static_cast<std::size_t>(options.world));
  Output& output = result.output;
  output.dtype = scene.problem.resolved_out_dtype();
  output.heads = scene.problem.num_heads;
  output.rank = scene.problem.kv_lora_rank;
  const std::int64_t rows = scene.num_tokens() * output.heads;
  output.out.assign(static_cast<std::size_t>(rows * output.rank) * dtype_bytes(output.dtype),
                    std::byte{kUnwritten});
  output.lse.assign(static_cast<std::size_t>(rows), std::nanf(""));
  const TensorView out = TensorView::contiguous(output.out.data(), output.dtype,
                                                {scene.num_tokens(), output.heads, output.rank});
  const TensorView lse =
      TensorView::contiguous(output.lse.data(), DType::kF32, {scene.num_tokens(), output.heads});

  on_ranks(options.world, [&](Communicator& ranks) {
    Status& status = result.statuses[static_cast<std::size_t>(ranks.rank())];
    const Laid laid = lay_out(shard(scene, options.world, ranks.rank(), options.interleave));
    const Result<ContextParallelPlan> plan =
        plan_context_parallel(laid.problem, ranks, options.plan);
    status = plan.status();
    if (!plan.ok()) return;
    DecodeTensors tensors =
        own_tensors(laid.tensors, plan->heads(), options.plan.queries_gathered, out, lse);
    if (options.spoil) options.spoil(ranks.rank(), tensors);
    const Buffer workspace(plan->workspace_bytes(), 0);
    // Twice: the second call finds the workspace used.
    for (int call = 0; call < 2 && status.ok(); ++call) {
      status = decode_context_parallel(*plan, ranks, tensors, workspace.data(), workspace.size());
    }
    EXPECT_TRUE(workspace.intact()) << "memory next to the workspace was written";
  });
  return result;
}

}  // namespace mla::test
