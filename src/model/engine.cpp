#include "model/engine.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>
#include <utility>

#include "core/diagnostics.hpp"

namespace mla::model {
namespace {

constexpr const char* kOperation = "generate";
// Splits at absolute positions: with them a row's bits depend on its own keys alone.
constexpr std::int64_t kFixedSplit = 512;
// Below this size the GEMMs of a step are too short for threads to pay.
constexpr std::int64_t kThreadedGemmParameters = 50'000'000;

Status check(const EngineOptions& options, std::int64_t num_pages) {
  constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
  const auto in_range = [](const char* name, std::int64_t value, std::int64_t high) -> Status {
    if (value >= 1 && value <= high) return {};
    return bad_argument(kOperation, name, value, text("a value in [1, ", high, "]"));
  };
  MLA_RETURN_IF_ERROR(in_range("page_size", options.page_size, 1 << 20));
  MLA_RETURN_IF_ERROR(in_range("chunk_tokens", options.chunk_tokens, 1 << 20));
  MLA_RETURN_IF_ERROR(in_range("pages", num_pages, kMaxCount));
  if (!std::isfinite(options.kv_scale) || options.kv_scale < 0.0) {
    return bad_argument(kOperation, "kv_scale", options.kv_scale, "a finite number from 0");
  }
  return {};
}

}  // namespace

float default_kv_scale(const Checkpoint& checkpoint, std::int64_t layer, KvFormat format) {
  constexpr double kLargestE4M3 = 448.0;
  if (format != KvFormat::kE4M3) return 1.0F;
  const double scale = cache_bound(checkpoint, layer) / kLargestE4M3;
  if (!(scale > 0.0) || !std::isfinite(scale)) return 1.0F;
  return static_cast<float>(std::exp2(std::ceil(std::log2(scale))));
}

Result<Engine> Engine::create(const Checkpoint& checkpoint, const EngineOptions& options,
                              std::int64_t num_pages) {
  MLA_RETURN_IF_ERROR(check(options, num_pages));
  const ModelConfig& config = checkpoint.config;
  std::vector<float> scales;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    scales.push_back(options.kv_scale > 0.0 ? static_cast<float>(options.kv_scale)
                                            : default_kv_scale(checkpoint, layer, options.cache));
  }
  PagedCacheShape shape;
  shape.num_pages = num_pages;
  shape.num_layers = config.num_layers;
  shape.page_size = options.page_size;
  shape.latent_dim = config.latent_dim();
  shape.format = options.cache;
  Result<PagedCache> cache = PagedCache::create(shape, std::move(scales));
  if (!cache.ok()) return cache.status();

  PlanOptions plan_options;
  plan_options.backend = options.backend;
  plan_options.num_threads = options.num_threads;
  plan_options.fixed_split = kFixedSplit;
  const int hardware = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  const int wanted = options.num_threads > 0 ? options.num_threads : hardware;
  const bool is_large = checkpoint.num_parameters() >= kThreadedGemmParameters;
  return Engine(checkpoint, plan_options, is_large ? wanted : 1, *std::move(cache),
                PageAllocator(num_pages, options.page_seed), options.group);
}

Status Engine::step(std::span<const StepPart> parts, std::vector<float>& logits,
                    const AttentionHook& hook) {
  const std::int64_t page_size = cache_.shape().page_size;
  StepBatch batch;
  batch.query_start_loc.push_back(0);
  for (const StepPart& part : parts) {
    CachedSequence& sequence = *part.sequence;
    const std::int64_t added = static_cast<std::int64_t>(part.tokens.size());
    const std::int64_t length = sequence.length + added;
    const Sharding sharding = group_.sharding();
    const std::int64_t local =
        local_seq_len(length, sharding.world, group_.rank(), sharding.interleave);
    MLA_RETURN_IF_ERROR(allocator_.grow(sequence.pages, pages_for(local, page_size)));
    for (std::int64_t position = sequence.length; position < length; ++position) {
      batch.positions.push_back(static_cast<std::int32_t>(position));
      batch.slots.push_back(
          shard_slot(sharding, group_.rank(), position, page_size, sequence.pages.data()));
    }
    batch.tokens.insert(batch.tokens.end(), part.tokens.begin(), part.tokens.end());
    for (std::int64_t row = batch.num_tokens() - part.num_logits; row < batch.num_tokens(); ++row) {
      batch.logit_rows.push_back(row);
    }
    batch.query_start_loc.push_back(static_cast<std::int32_t>(batch.num_tokens()));
    batch.seq_lens.push_back(static_cast<std::int32_t>(local));
    batch.global_lens.push_back(static_cast<std::int32_t>(length));
    batch.table_width =
        std::max(batch.table_width, static_cast<std::int64_t>(sequence.pages.size()));
  }
  constexpr std::int32_t kNoPage = -1;
  batch.block_table.reserve(parts.size() * static_cast<std::size_t>(batch.table_width));
  for (std::size_t b = 0; b < parts.size(); ++b) {
    const std::vector<std::int32_t>& pages = parts[b].sequence->pages;
    batch.block_table.insert(batch.block_table.end(), pages.begin(), pages.end());
    batch.block_table.resize((b + 1) * static_cast<std::size_t>(batch.table_width), kNoPage);
  }
  MLA_RETURN_IF_ERROR(transformer_.forward(batch, cache_, logits, hook));
  for (std::size_t b = 0; b < parts.size(); ++b) parts[b].sequence->length = batch.global_lens[b];
  return {};
}

void Engine::release(CachedSequence& sequence) {
  allocator_.release(sequence.pages);
  sequence.length = 0;
}

}  // namespace mla::model
