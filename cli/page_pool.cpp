#include "page_pool.hpp"

#include <algorithm>
#include <numeric>

#include "core/diagnostics.hpp"
#include "testkit/rng.hpp"

namespace mla::cli {
namespace {

constexpr std::size_t kPoolBytes = 9'000'000'000;  // as the peers had; TLB misses depend on it
constexpr double kShareOfFree = 0.7;  // on a smaller card; queries and outputs need the rest
constexpr std::int64_t kBlockBytes = 64 << 20;  // generated on the host
constexpr std::uint64_t kOrderStream = 21;      // problem_gen.cpp and compare.cpp have those to 8

/// One request that fills a block of pages with keys.
testkit::Case block_case(const testkit::Case& problem) {
  testkit::Case block;
  block.h = 1;
  block.l = problem.l;
  block.r = problem.r;
  block.page = problem.page;
  block.kv = problem.kv;
  block.strides = problem.strides;
  block.seed = problem.seed;
  block.pool = 0;
  block.causal = false;
  return block;
}

}  // namespace

Status PagePool::prepare(const testkit::Case& problem, cudaStream_t stream) {
  testkit::Case block = block_case(problem);
  const std::string key = testkit::to_string(block);
  if (key == made_for_) return {};
  made_for_.clear();
  const std::int64_t token_bytes =
      kv_page_bytes(testkit::decode_problem(block, testkit::case_lengths(block))) / block.page;
  // An odd number of pages, so that the same keys are rarely at the same place of two requests.
  const std::int64_t pages =
      std::max<std::int64_t>(2, kBlockBytes / (token_bytes * block.page)) | 1;
  block.len.values = {pages * block.page};
  Result<std::unique_ptr<testkit::Batch>> made = testkit::make_batch(block);
  if (!made.ok()) return made.status();
  block_ = std::move(*made);

  // Page 0 of a batch is poison; the others are full.
  host_cache_ = block_->tensors.kv_cache;
  page_bytes_ = static_cast<std::size_t>(host_cache_.stride[0]) * dtype_bytes(host_cache_.dtype);
  host_cache_.data = static_cast<std::byte*>(host_cache_.data) + page_bytes_;
  host_cache_.shape[0] = pages;
  MLA_RETURN_IF_ERROR(fill(stream));

  order_.resize(static_cast<std::size_t>(num_pages()));
  std::iota(order_.begin(), order_.end(), 0);
  testkit::Rng rng(problem.seed, kOrderStream);
  for (std::size_t i = order_.size(); i > 1; --i) {
    std::swap(order_[i - 1],
              order_[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(i)))]);
  }
  made_for_ = key;
  return {};
}

Status PagePool::fill(cudaStream_t stream) {
  if (memory_.bytes() == 0) {
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    MLA_RETURN_IF_ERROR(cuda_status("cudaMemGetInfo", cudaMemGetInfo(&free_bytes, &total_bytes)));
    const auto share = static_cast<std::size_t>(kShareOfFree * static_cast<double>(free_bytes));
    MLA_RETURN_IF_ERROR(memory_.reserve(std::min(kPoolBytes, share)));
  }
  const std::size_t pages = memory_.bytes() / page_bytes_;
  const std::size_t block_bytes = page_bytes_ * static_cast<std::size_t>(host_cache_.shape[0]);
  if (pages * page_bytes_ < block_bytes) {
    return {StatusCode::kUnsupported, text("bench: device memory: found room for ", pages,
                                           " pages, needed ", host_cache_.shape[0])};
  }
  MLA_RETURN_IF_ERROR(
      cuda_status("cudaMemcpyAsync", cudaMemcpyAsync(memory_.data(), host_cache_.data, block_bytes,
                                                     cudaMemcpyHostToDevice, stream)));
  // Doubling: what is there is copied behind itself, always from the start of a block.
  const std::size_t total = pages * page_bytes_;
  for (std::size_t done = block_bytes; done < total;) {
    const std::size_t bytes = std::min(done, total - done);
    MLA_RETURN_IF_ERROR(
        cuda_status("cudaMemcpyAsync", cudaMemcpyAsync(memory_.data() + done, memory_.data(), bytes,
                                                       cudaMemcpyDeviceToDevice, stream)));
    done += bytes;
  }
  MLA_RETURN_IF_ERROR(synchronise(stream));
  device_cache_ = host_cache_;
  device_cache_.data = memory_.data();
  device_cache_.shape[0] = static_cast<std::int64_t>(pages);
  return {};
}

}  // namespace mla::cli
