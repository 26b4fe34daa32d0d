// generate() on a group of ranks: each runs the whole model, and all choose the same tokens because
// attention gives all of them the same bits.
#include <algorithm>
#include <new>
#include <thread>
#include <vector>

#include "core/diagnostics.hpp"
#include "model/generate.hpp"

namespace mla::model {
namespace {

/// What a rank runs with; `end` is its own.
GenerateOptions options_of(const GenerateOptions& options, Communicator& end,
                           std::int64_t interleave) {
  GenerateOptions own = options;
  own.engine.group = {&end, interleave};
  const int hardware = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  const int threads = options.engine.num_threads > 0 ? options.engine.num_threads : hardware;
  own.engine.num_threads = std::max(1, threads / end.world());
  own.hook = nullptr;
  if (end.rank() != 0) own.progress = nullptr;
  return own;
}

}  // namespace

Result<GenerateResult> generate_sharded(const Checkpoint& checkpoint,
                                        const std::vector<Tokens>& prompts,
                                        const GenerateOptions& options, int world,
                                        std::int64_t interleave) {
  if (interleave < 1) return bad_argument("generate", "interleave", interleave, "at least 1");
  auto ends = make_thread_communicators(world);
  if (!ends.ok()) return ends.status();
  std::vector<Result<GenerateResult>> results(static_cast<std::size_t>(world), GenerateResult());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < results.size(); ++r) {
    // A rank that ends early takes its end along, so that nobody waits for it.
    threads.emplace_back([&, r, end = std::move((*ends)[r])]() mutable {
      try {
        results[r] = generate(checkpoint, prompts, options_of(options, *end, interleave));
      } catch (const std::bad_alloc&) {
        results[r] = Status(StatusCode::kOutOfMemory, "generate: out of host memory");
      }
      end.reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Whoever failed first says more than those who missed it.
  const Result<GenerateResult>* failed = nullptr;
  for (const Result<GenerateResult>& result : results) {
    if (result.ok()) continue;
    if (failed == nullptr || failed->status().code() == StatusCode::kPeer) failed = &result;
  }
  return failed == nullptr ? std::move(results[0]) : failed->status();
}

}  // namespace mla::model
