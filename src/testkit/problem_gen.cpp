#include "testkit/problem_gen.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/diagnostics.hpp"
#include "core/kv_layout.hpp"
#include "core/numeric.hpp"
#include "testkit/rng.hpp"

namespace mla::testkit {
namespace {

// One stream per use, so that a change to one kind of data leaves the others alone. Stream 1 is the
// lengths' (case.cpp).
enum Stream : std::uint64_t { kPages = 2, kKeys = 3, kQuery = 4, kHeads = 5, kIndices = 6, kTarget = 7 };

constexpr std::int64_t kCacheTokenGap = 24;  // elements between cache rows of a strided case
constexpr std::int64_t kCachePageGap = 40;
constexpr std::int64_t kQueryHeadGap = 16;
constexpr std::int64_t kQueryTokenGap = 48;
constexpr std::int64_t kTableGap = 3;        // columns past the longest request
constexpr float kBigLogit = 3.5e3F;          // deviation of the logits of scores=big
constexpr float kDominantLogit = 60.0F;
constexpr std::int32_t kPoisonIds[] = {std::numeric_limits<std::int32_t>::max(), -1, 2147480000,
                                       std::numeric_limits<std::int32_t>::min(), -7};

std::int64_t pages_of(std::int64_t seq_len, std::int64_t page_size) {
  return seq_len / page_size + (seq_len % page_size != 0 ? 1 : 0);
}

double softmax_scale(const Case& problem) {
  return problem.scale != 0.0 ? problem.scale : 1.0 / std::sqrt(192.0);
}

/// How scores=big and scores=dominant get their size: q is made larger where its type allows, the
/// softmax scale takes the rest.
struct ScorePlan {
  float q_factor = 1.0F;      ///< on the normal part of q
  float q_target = 0.0F;      ///< times the request's direction, added to q
  double scale = 1.0;         ///< bmm1_scale
};

ScorePlan score_plan(const Case& problem) {
  ScorePlan plan;
  plan.scale = softmax_scale(problem);
  const auto width = static_cast<double>(problem.l + problem.r);
  const double largest = problem.q == DType::kE4M3 ? 64.0 : 4096.0;
  const double magnitude = std::abs(plan.scale);
  if (problem.scores == Scores::kEqual) plan.q_factor = 0.0F;
  if (problem.scores == Scores::kBig) {
    const double wanted = static_cast<double>(kBigLogit) / (std::sqrt(width) * magnitude);
    plan.q_factor = static_cast<float>(std::min(wanted, largest));
    plan.scale *= std::max(1.0, wanted / largest);
  }
  if (problem.scores == Scores::kDominant) {
    const double wanted = static_cast<double>(kDominantLogit) / (width * magnitude);
    plan.q_target = static_cast<float>(std::min(wanted, largest));
    plan.scale *= std::max(1.0, wanted / largest);
  }
  return plan;
}

void fill_poison(DType dtype, std::byte* bytes, std::int64_t count, std::int64_t flavour) {
  // All-ones bytes are NaN in every type. Infinities and huge values follow in turn where the type
  // has them.
  std::memset(bytes, 0xFF, static_cast<std::size_t>(count) * dtype_bytes(dtype));
  if (dtype == DType::kE4M3 && flavour % 2 == 1) {
    std::memset(bytes, 0x7F, static_cast<std::size_t>(count));
  }
  if ((dtype != DType::kBF16 && dtype != DType::kF16) || flavour % 4 == 0) return;
  const bool is_bf16 = dtype == DType::kBF16;
  const std::uint16_t values[] = {0xFFFF, static_cast<std::uint16_t>(is_bf16 ? 0x7F80 : 0x7C00),
                                  static_cast<std::uint16_t>(is_bf16 ? 0xFF80 : 0xFC00),
                                  static_cast<std::uint16_t>(is_bf16 ? 0x7F7F : 0x7BFF)};
  auto* words = reinterpret_cast<std::uint16_t*>(bytes);
  std::fill(words, words + count, values[flavour % 4]);
}

/// The direction (+-1 in every dimension) of the key that scores=dominant lets win.
void draw_direction(const Case& problem, std::int64_t request, std::vector<float>& direction) {
  Rng rng(problem.seed, (kTarget << 32) + static_cast<std::uint64_t>(request));
  for (float& value : direction) value = rng.one_in(2) ? 1.0F : -1.0F;
}

std::int64_t draw_target(const Case& problem, std::int64_t request, std::int64_t seq_len) {
  if (problem.scores != Scores::kDominant || seq_len == 0) return -1;
  Rng rng(problem.seed, (kTarget << 40) + static_cast<std::uint64_t>(request));
  return rng.below(seq_len);
}

/// A 656-byte record: one scale per 128 latent values, so that their largest becomes 448.
void encode_fp8_ds_mla(const float* values, std::byte* record) {
  using namespace fp8_ds_mla;
  for (std::int64_t group = 0; group < kNumScales; ++group) {
    const float* latent = values + group * kScaleGroup;
    float largest = 0.0F;
    for (std::int64_t i = 0; i < kScaleGroup; ++i) largest = std::max(largest, std::abs(latent[i]));
    const float scale = largest > 0.0F ? largest / 448.0F : 1.0F;
    std::memcpy(record + kScaleOffset + group * 4, &scale, sizeof(scale));
    for (std::int64_t i = 0; i < kScaleGroup; ++i) {
      record[group * kScaleGroup + i] = std::byte{numeric::float_to_e4m3(latent[i] / scale)};
    }
  }
  encode(DType::kBF16, values + kRank, kRope, record + kRopeOffset);
}

void make_pages(Batch& batch) {
  const Case& problem = batch.source;
  std::int64_t owned = 0;
  for (std::int64_t seq_len : batch.lengths.seq_lens) owned += pages_of(seq_len, problem.page);
  // Page 0 stays without an owner; the others are dealt in random order.
  std::vector<std::int32_t> ids(static_cast<std::size_t>(owned + problem.pool));
  std::iota(ids.begin(), ids.end(), 1);
  Rng rng(problem.seed, kPages);
  for (std::size_t i = ids.size(); i > 1; --i) {
    std::swap(ids[i - 1], ids[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(i)))]);
  }
  auto next = ids.begin();
  for (std::int64_t seq_len : batch.lengths.seq_lens) {
    const auto count = pages_of(seq_len, problem.page);
    batch.pages.emplace_back(next, next + count);
    next += count;
  }
}

/// Pages without an address, numbered in the order of the requests.
void number_pages(Batch& batch) {
  const Case& problem = batch.source;
  std::int32_t next = 0;
  for (std::int64_t seq_len : batch.lengths.seq_lens) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(pages_of(seq_len, problem.page)));
    std::iota(ids.begin(), ids.end(), next);
    next += static_cast<std::int32_t>(ids.size());
    batch.pages.push_back(std::move(ids));
  }
  batch.tensors.kv_cache = TensorView::contiguous(
      nullptr, kv_dtype(problem.kv), {next, problem.page, kv_row_elements(batch.problem)});
}

void make_cache(Batch& batch) {
  const Case& problem = batch.source;
  const DType dtype = kv_dtype(problem.kv);
  const auto element = static_cast<std::int64_t>(dtype_bytes(dtype));
  const std::int64_t row = kv_row_elements(batch.problem);
  // The f32 scales of fp8_ds_mla keep the alignment that a record needs.
  const std::int64_t token_gap = problem.kv == KvFormat::kFp8DsMla ? 16 : kCacheTokenGap;
  const std::int64_t token_stride = row + (problem.strides ? token_gap : 0);
  const std::int64_t page_stride = token_stride * problem.page + (problem.strides ? kCachePageGap : 0);
  std::int64_t num_pages = 1 + problem.pool;
  for (const auto& pages : batch.pages) num_pages += static_cast<std::int64_t>(pages.size());

  batch.kv_cache = Buffer(static_cast<std::size_t>(num_pages * page_stride * element), 0xFF);
  for (std::int64_t page = 0; page < num_pages; ++page) {
    fill_poison(dtype, batch.kv_cache.data() + page * page_stride * element, page_stride, page);
  }
  TensorView& view = batch.tensors.kv_cache;
  view = TensorView::contiguous(batch.kv_cache.data(), dtype, {num_pages, problem.page, row});
  view.stride[0] = page_stride;
  view.stride[1] = token_stride;

  Rng rng(problem.seed, kKeys);
  std::vector<float> values(static_cast<std::size_t>(batch.problem.head_dim()));
  for (std::int64_t request = 0; request < problem.b; ++request) {
    const auto b = static_cast<std::size_t>(request);
    const std::int64_t seq_len = batch.lengths.seq_lens[b];
    const std::int64_t target = draw_target(problem, request, seq_len);
    for (std::int64_t j = 0; j < seq_len; ++j) {
      for (float& value : values) value = rng.normal();
      if (j == target) draw_direction(problem, request, values);
      const std::int64_t page = batch.pages[b][static_cast<std::size_t>(j / problem.page)];
      std::byte* token = batch.kv_cache.data() +
                         (page * page_stride + j % problem.page * token_stride) * element;
      if (problem.kv == KvFormat::kFp8DsMla) encode_fp8_ds_mla(values.data(), token);
      else encode(dtype, values.data(), batch.problem.head_dim(), token);
    }
  }
}

/// One query tensor of `width` values a row, all poison.
TensorView make_query_view(const Batch& batch, std::int64_t width, Buffer& buffer) {
  const Case& problem = batch.source;
  const std::int64_t tokens = batch.lengths.num_tokens;
  const std::int64_t head_stride = width + (problem.strides ? kQueryHeadGap : 0);
  const std::int64_t token_stride = head_stride * problem.h + (problem.strides ? kQueryTokenGap : 0);
  buffer = Buffer(static_cast<std::size_t>(tokens * token_stride) * dtype_bytes(problem.q), 0xFF);
  TensorView view = TensorView::contiguous(buffer.data(), problem.q, {tokens, problem.h, width});
  view.stride[0] = token_stride;
  view.stride[1] = head_stride;
  return view;
}

void put_row(const TensorView& view, std::int64_t token, std::int64_t head, const float* values) {
  std::byte* row = static_cast<std::byte*>(view.data) +
                   (token * view.stride[0] + head * view.stride[1]) *
                       static_cast<std::int64_t>(dtype_bytes(view.dtype));
  encode(view.dtype, values, view.shape[2], row);
}

void make_query(Batch& batch, const ScorePlan& scores) {
  const Case& problem = batch.source;
  DecodeTensors& tensors = batch.tensors;
  if (problem.qsplit) {
    tensors.q_nope = make_query_view(batch, problem.l, batch.q_nope);
    if (problem.r > 0) tensors.q_pe = make_query_view(batch, problem.r, batch.q_pe);
  } else {
    tensors.q = make_query_view(batch, problem.l + problem.r, batch.q);
  }
  Rng rng(problem.seed, kQuery);
  std::vector<float> values(static_cast<std::size_t>(problem.l + problem.r));
  std::vector<float> direction(values.size());
  for (std::int64_t request = 0; request < problem.b; ++request) {
    const auto b = static_cast<std::size_t>(request);
    draw_direction(problem, request, direction);
    for (std::int64_t i = 0; i < batch.lengths.query_lens[b]; ++i) {
      const std::int64_t token = batch.lengths.query_start_loc[b] + i;
      for (std::int64_t head = 0; head < problem.h; ++head) {
        for (std::size_t d = 0; d < values.size(); ++d) {
          values[d] = rng.normal() * scores.q_factor + scores.q_target * direction[d];
        }
        if (problem.qsplit) {
          put_row(tensors.q_nope, token, head, values.data());
          if (problem.r > 0) put_row(tensors.q_pe, token, head, values.data() + problem.l);
        } else {
          put_row(tensors.q, token, head, values.data());
        }
      }
    }
  }
}

TensorView put_integers(const std::vector<std::int32_t>& values, Buffer& buffer) {
  buffer = Buffer(values.size() * sizeof(std::int32_t), 0);
  if (!values.empty()) std::memcpy(buffer.data(), values.data(), buffer.size());
  return TensorView::contiguous(buffer.data(), DType::kI32, {static_cast<std::int64_t>(values.size())});
}

std::vector<std::int32_t> narrow(const std::vector<std::int64_t>& values) {
  return {values.begin(), values.end()};
}

void make_lengths(Batch& batch) {
  const Case& problem = batch.source;
  DecodeTensors& tensors = batch.tensors;
  const bool sparse = problem.k > 0;
  std::int64_t width = 0;
  for (const auto& pages : batch.pages) width = std::max(width, static_cast<std::int64_t>(pages.size()));
  if (width > 0) width += kTableGap;  // a batch without any key has a table of width 0
  const std::int64_t stride = width + (problem.strides ? kTableGap : 0);

  std::vector<std::int32_t> table(static_cast<std::size_t>(problem.b * stride));
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = kPoisonIds[i % std::size(kPoisonIds)];
  for (std::size_t b = 0; b < batch.pages.size() && !sparse; ++b) {
    std::copy(batch.pages[b].begin(), batch.pages[b].end(),
              table.begin() + static_cast<std::ptrdiff_t>(b) * stride);
  }
  tensors.block_table = put_integers(table, batch.block_table);
  tensors.block_table.rank = 2;
  tensors.block_table.shape[0] = problem.b;
  tensors.block_table.shape[1] = width;
  tensors.block_table.stride[0] = stride;
  tensors.block_table.stride[1] = 1;

  std::vector<std::int32_t> seq_lens = narrow(batch.lengths.seq_lens);
  if (sparse) std::fill(seq_lens.begin(), seq_lens.end(), kPoisonIds[0]);
  tensors.seq_lens = put_integers(seq_lens, batch.seq_lens);
  if (gives_query_start_loc(problem)) {
    tensors.query_start_loc = put_integers(batch.lengths.query_start_loc, batch.query_start_loc);
  }
  if (problem.cp_world > 1) {
    tensors.causal_seqlens_kv_global =
        put_integers(narrow(batch.lengths.global_lens), batch.causal_seqlens_kv_global);
  }
}

/// A row holds up to K distinct keys of its request at random places, now and then one key twice, and
/// everything else names no slot of the pool.
void make_indices(Batch& batch) {
  const Case& problem = batch.source;
  const std::int64_t num_slots = batch.tensors.kv_cache.shape[0] * problem.page;
  const std::int64_t tokens = batch.lengths.num_tokens;
  const std::int64_t stride = problem.k + (problem.strides ? kTableGap : 0);
  Rng rng(problem.seed, kIndices);
  std::vector<std::int32_t> rows(static_cast<std::size_t>(tokens * stride));
  for (std::int32_t& entry : rows) {
    const std::int64_t pick = rng.below(8);
    if (pick < 5) entry = kPoisonIds[pick];
    else entry = pick == 5 ? static_cast<std::int32_t>(num_slots) : -1;
  }
  // Padding rows have no keys, whatever they name: here the poison of page 0.
  const std::int64_t num_real = batch.lengths.query_start_loc.back();
  for (std::int64_t i = num_real * stride; i < tokens * stride; i += 2) {
    rows[static_cast<std::size_t>(i)] = 0;
  }
  std::vector<std::int64_t> keys;
  for (std::int64_t request = 0; request < problem.b; ++request) {
    const auto b = static_cast<std::size_t>(request);
    const std::int64_t seq_len = batch.lengths.seq_lens[b];
    keys.resize(static_cast<std::size_t>(seq_len));
    std::iota(keys.begin(), keys.end(), 0);
    for (std::int64_t i = 0; i < batch.lengths.query_lens[b]; ++i) {
      std::int32_t* row = rows.data() + (batch.lengths.query_start_loc[b] + i) * stride;
      std::int64_t count = std::min(problem.k, seq_len);
      if (rng.one_in(8)) count = rng.between(0, count);
      // Without gaps when the row is full; else every entry is a key with probability count / k.
      std::int64_t taken = 0;
      for (std::int64_t entry = 0; entry < problem.k && taken < count; ++entry) {
        if (rng.below(problem.k - entry) >= count - taken) continue;
        const std::int64_t other = rng.between(taken, seq_len - 1);
        std::swap(keys[static_cast<std::size_t>(taken)], keys[static_cast<std::size_t>(other)]);
        const std::int64_t key = keys[static_cast<std::size_t>(rng.one_in(64) ? 0 : taken)];
        const std::int64_t page = batch.pages[b][static_cast<std::size_t>(key / problem.page)];
        row[entry] = static_cast<std::int32_t>(page * problem.page + key % problem.page);
        ++taken;
      }
    }
  }
  batch.tensors.indices = put_integers(rows, batch.indices);
  batch.tensors.indices.rank = 2;
  batch.tensors.indices.shape[0] = tokens;
  batch.tensors.indices.shape[1] = problem.k;
  batch.tensors.indices.stride[0] = stride;
  batch.tensors.indices.stride[1] = 1;
}

void make_heads(Batch& batch) {
  const Case& problem = batch.source;
  const auto bytes = static_cast<std::size_t>(problem.h) * sizeof(float);
  Rng rng(problem.seed, kHeads);
  if (problem.sinks) {
    batch.sinks = Buffer(bytes, 0);
    for (std::int64_t head = 0; head < problem.h; ++head) {
      batch.sinks.as<float>()[head] = 2.0F * rng.normal();
    }
    batch.tensors.sinks = TensorView::contiguous(batch.sinks.data(), DType::kF32, {problem.h});
  }
  if (problem.alibi) {
    batch.alibi_slopes = Buffer(bytes, 0);
    for (std::int64_t head = 0; head < problem.h; ++head) {
      // From 1/2 down to 1/256, as trained models have them.
      const double exponent = -8.0 * static_cast<double>(head + 1) / static_cast<double>(problem.h);
      batch.alibi_slopes.as<float>()[head] = static_cast<float>(std::exp2(exponent));
    }
    batch.tensors.alibi_slopes =
        TensorView::contiguous(batch.alibi_slopes.data(), DType::kF32, {problem.h});
  }
}

void make_outputs(Batch& batch) {
  Outputs outputs(batch.problem);
  batch.tensors.out = outputs.out_view;
  batch.tensors.lse = outputs.lse_view;
  batch.out = std::move(outputs.out);
  batch.lse = std::move(outputs.lse);
}

Status check_counts(const Case& problem, const CaseLengths& lengths) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int32_t>::max();
  const std::string needed = text("at most ", kLargest);
  const auto refuse = [&needed](const char* what, double found) {
    return bad_argument("problem", what, found, needed);
  };
  if (problem.b > kLargest) return refuse("b", static_cast<double>(problem.b));
  double tokens = static_cast<double>(problem.pad);
  for (std::int64_t n : lengths.query_lens) tokens += static_cast<double>(n);
  if (tokens > static_cast<double>(kLargest)) return refuse("query tokens", tokens);
  double slots = static_cast<double>(problem.page) * static_cast<double>(problem.pool + 1);
  for (std::int64_t g : lengths.global_lens) {
    if (g > kLargest) return refuse("len", static_cast<double>(g));
    slots += static_cast<double>(g + problem.page);
  }
  if (problem.k > 0 && slots > static_cast<double>(kLargest)) return refuse("token slots", slots);
  return {};
}

// Linux hands out more memory than it has and kills who uses it, so bad_alloc alone is no answer.
Status check_memory(const Case& problem, const CaseLengths& lengths) {
  const double needed = batch_bytes(problem, lengths);
  const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) *
                        static_cast<double>(sysconf(_SC_PAGESIZE));
  if (needed < 0.8 * memory) return {};
  return {StatusCode::kOutOfMemory, text("problem: its tensors need ", needed * 1e-9,
                                         " GB, this machine has ", memory * 1e-9, " GB")};
}

enum class Cache { kMade, kElsewhere };

Result<std::unique_ptr<Batch>> make(const Case& problem, Cache cache) {
  try {
    auto batch = std::make_unique<Batch>();
    batch->source = problem;
    batch->lengths = case_lengths(problem);
    MLA_RETURN_IF_ERROR(check_counts(problem, batch->lengths));
    if (cache == Cache::kMade) MLA_RETURN_IF_ERROR(check_memory(problem, batch->lengths));
    batch->problem = decode_problem(problem, batch->lengths);
    const ScorePlan scores = score_plan(problem);
    batch->tensors.bmm1_scale = static_cast<float>(scores.scale);
    batch->tensors.bmm2_scale = static_cast<float>(problem.vscale);
    if (cache == Cache::kMade) {
      make_pages(*batch);
      make_cache(*batch);
    } else {
      number_pages(*batch);
    }
    make_query(*batch, scores);
    make_lengths(*batch);
    if (problem.k > 0) make_indices(*batch);
    make_heads(*batch);
    make_outputs(*batch);
    return batch;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory,
                  text("problem: no memory for the tensors of ", to_string(problem)));
  }
}

}  // namespace

Outputs::Outputs(const DecodeProblem& problem) {
  const DType dtype = problem.resolved_out_dtype();
  const std::int64_t rows = problem.num_tokens * problem.num_heads;
  out = Buffer(static_cast<std::size_t>(rows * problem.kv_lora_rank) * dtype_bytes(dtype), 0xFF);
  lse = Buffer(static_cast<std::size_t>(rows) * sizeof(float), 0xFF);
  out_view = TensorView::contiguous(out.data(), dtype,
                                    {problem.num_tokens, problem.num_heads, problem.kv_lora_rank});
  lse_view = TensorView::contiguous(lse.data(), DType::kF32, {problem.num_tokens, problem.num_heads});
}

void Batch::poison_outputs() noexcept {
  out.fill(0xFF);
  lse.fill(0xFF);
}

std::uint64_t Batch::input_fingerprint() const noexcept {
  std::uint64_t hash = 0;
  for (const Buffer* buffer : {&q, &q_nope, &q_pe, &kv_cache, &block_table, &seq_lens, &query_start_loc,
                               &causal_seqlens_kv_global, &sinks, &alibi_slopes, &indices}) {
    hash = hash * 31 + buffer->fingerprint();
  }
  return hash;
}

double batch_bytes(const Case& problem, const CaseLengths& lengths) noexcept {
  double tokens = static_cast<double>(problem.page) * static_cast<double>(problem.pool + 1);
  for (std::int64_t seq_len : lengths.seq_lens) tokens += static_cast<double>(seq_len + problem.page);
  const double width = static_cast<double>(problem.l + problem.r + kCacheTokenGap);
  const double rows = static_cast<double>(lengths.num_tokens) * static_cast<double>(problem.h);
  return tokens * width * 2 + rows * (2 * width + 4 * static_cast<double>(problem.l) + 8) +
         4 * static_cast<double>(lengths.num_tokens) * static_cast<double>(problem.k);
}

Result<std::unique_ptr<Batch>> make_batch(const Case& problem) {
  return make(problem, Cache::kMade);
}

Result<std::unique_ptr<Batch>> make_batch_without_cache(const Case& problem) {
  return make(problem, Cache::kElsewhere);
}

void encode(DType dtype, const float* values, std::int64_t count, std::byte* bytes) noexcept {
  auto* words = reinterpret_cast<std::uint16_t*>(bytes);
  switch (dtype) {
    case DType::kBF16:
      for (std::int64_t i = 0; i < count; ++i) words[i] = numeric::float_to_bf16(values[i]);
      break;
    case DType::kF16:
      for (std::int64_t i = 0; i < count; ++i) words[i] = numeric::float_to_f16(values[i]);
      break;
    case DType::kE4M3:
      for (std::int64_t i = 0; i < count; ++i) bytes[i] = std::byte{numeric::float_to_e4m3(values[i])};
      break;
    case DType::kF32: std::memcpy(bytes, values, static_cast<std::size_t>(count) * sizeof(float)); break;
    case DType::kNone:
    case DType::kU8:
    case DType::kI32: break;
  }
}

double decode(DType dtype, const std::byte* bytes) noexcept {
  std::uint16_t word = 0;
  float value = std::numeric_limits<float>::quiet_NaN();
  switch (dtype) {
    case DType::kBF16:
      std::memcpy(&word, bytes, sizeof(word));
      return static_cast<double>(numeric::bf16_to_float(word));
    case DType::kF16:
      std::memcpy(&word, bytes, sizeof(word));
      return static_cast<double>(numeric::f16_to_float(word));
    case DType::kE4M3:
      return static_cast<double>(numeric::e4m3_to_float(static_cast<std::uint8_t>(bytes[0])));
    case DType::kF32: std::memcpy(&value, bytes, sizeof(value)); return static_cast<double>(value);
    case DType::kNone:
    case DType::kU8:
    case DType::kI32: break;
  }
  return static_cast<double>(value);
}

}  // namespace mla::testkit
