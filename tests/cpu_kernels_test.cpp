// Every CPU kernel table that can run here, lanes and few-row kernel, against plain double loops.
//
// All memory that a kernel may not read or may not let count is NaN bytes: pages and slots nobody
// names, the gap between tokens, keys outside the split and, where a test says so, keys that only
// some rows see.
#include "cpu/kernel.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/numeric.hpp"
#include "core/visibility.hpp"

namespace mla::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Kernel {
  const KernelTable* table;
  bool few_rows;
};

std::vector<Kernel> kernels() {
  std::vector<Kernel> result;
  for (const KernelTable* table : {portable_kernels(), avx2_kernels(), avx512_kernels()}) {
    if (table == nullptr) continue;
    result.push_back({table, false});
    result.push_back({table, true});
  }
  return result;
}

std::string kernel_name(const testing::TestParamInfo<Kernel>& info) {
  return std::string(info.param.table->name) + (info.param.few_rows ? "_few_rows" : "_lanes");
}

void encode(DType dtype, float value, std::byte* out) {
  if (dtype == DType::kE4M3) {
    *out = static_cast<std::byte>(numeric::float_to_e4m3(value));
    return;
  }
  const std::uint16_t bits =
      dtype == DType::kF16 ? numeric::float_to_f16(value) : numeric::float_to_bf16(value);
  std::memcpy(out, &bits, sizeof(bits));
}

double decode(DType dtype, const std::byte* in) {
  if (dtype == DType::kE4M3) return numeric::e4m3_to_float(static_cast<std::uint8_t>(*in));
  std::uint16_t bits;
  std::memcpy(&bits, in, sizeof(bits));
  return dtype == DType::kF16 ? numeric::f16_to_float(bits) : numeric::bf16_to_float(bits);
}

struct Shape {
  std::int64_t rank = 512;
  std::int64_t rope = 64;
  std::int64_t num_rows = 1;
  std::int64_t num_keys = 100;
  DType q_dtype = DType::kBF16;
  KvFormat format = KvFormat::kBF16;
};

/// One request with its memory. Keys are written by write_key; everything else stays NaN bytes.
class Problem {
 public:
  static constexpr std::int64_t kPageSize = 7;

  explicit Problem(const Shape& s, std::uint32_t seed = 1) : shape(s), random_(seed) {
    const std::int64_t num_pages = s.num_keys / kPageSize + 3;
    std::vector<std::int32_t> pages(static_cast<std::size_t>(num_pages));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random_);
    // Entries past the length are wild on purpose.
    table.assign(pages.begin(), pages.begin() + (s.num_keys + kPageSize - 1) / kPageSize);
    table.resize(table.size() + 2, std::numeric_limits<std::int32_t>::max());
    const std::int64_t bytes = token_bytes();
    // Not a multiple of anything but the element, so that no load may assume alignment.
    call.kv.token_stride_bytes = bytes + element_bytes();
    call.kv.page_size = kPageSize;
    call.kv.page_stride_bytes = kPageSize * call.kv.token_stride_bytes + 2 * element_bytes();
    call.kv.num_pages = num_pages;
    cache.assign(static_cast<std::size_t>(num_pages * call.kv.page_stride_bytes + 64),
                 std::byte{0xFF});
    call.kv.base = cache.data() + element_bytes();
    call.num_heads = s.num_rows;
    call.kv_lora_rank = s.rank;
    call.qk_rope_head_dim = s.rope;
    call.q_dtype = s.q_dtype;
    call.kv_format = s.format;
    call.block_table = table.data();
    call.block_table_stride = static_cast<std::int64_t>(table.size());
    call.bmm1_scale = 1.0F / std::sqrt(static_cast<float>(s.rank + s.rope));
    const std::size_t item = dtype_bytes(s.q_dtype);
    query.assign(static_cast<std::size_t>(s.num_rows * head_dim()) * item + 16, std::byte{0xFF});
    rows.resize(static_cast<std::size_t>(s.num_rows));
    for (std::int64_t r = 0; r < s.num_rows; ++r) {
      std::byte* start = query.data() + static_cast<std::size_t>(r * head_dim()) * item + item;
      for (std::int64_t d = 0; d < head_dim(); ++d) {
        encode(s.q_dtype, normal(), start + static_cast<std::size_t>(d) * item);
      }
      SplitRow& row = rows[static_cast<std::size_t>(r)];
      row.q_nope = start;
      row.q_pe = start + static_cast<std::size_t>(s.rank) * item;
      row.key_end = s.num_keys;
      row.position = s.num_keys - 1;
    }
    for (std::int64_t j = 0; j < s.num_keys; ++j) write_random_key(j);
  }

  std::int64_t head_dim() const { return shape.rank + shape.rope; }
  float normal() { return std::normal_distribution<float>()(random_); }
  std::mt19937& random() { return random_; }

  std::int64_t element_bytes() const {
    return shape.format == KvFormat::kBF16 || shape.format == KvFormat::kF16 ? 2 : 1;
  }
  std::int64_t token_bytes() const {
    return shape.format == KvFormat::kFp8DsMla ? 656 : head_dim() * element_bytes();
  }

  std::byte* key(std::int64_t j) {
    return const_cast<std::byte*>(
        call.kv.token(table[static_cast<std::size_t>(j / kPageSize)], j % kPageSize));
  }
  void poison_key(std::int64_t j) {
    std::memset(key(j), 0xFF, static_cast<std::size_t>(token_bytes()));
  }
  void write_random_key(std::int64_t j) {
    std::vector<float> values(static_cast<std::size_t>(head_dim()));
    for (float& v : values) v = normal();
    write_key(j, values);
  }
  void write_key(std::int64_t j, const std::vector<float>& values) {
    std::byte* out = key(j);
    const bool record = shape.format == KvFormat::kFp8DsMla;
    for (std::int64_t g = 0; record && g < 4; ++g) {
      const float scale = 0.37F + 0.21F * static_cast<float>(g) + 0.01F * static_cast<float>(j % 5);
      std::memcpy(out + 512 + 4 * g, &scale, sizeof(scale));
    }
    for (std::int64_t d = 0; d < head_dim(); ++d) {
      const float v = values[static_cast<std::size_t>(d)];
      if (record && d >= 512) {
        encode(DType::kBF16, v, out + 528 + 2 * (d - 512));
      } else if (record) {
        encode(DType::kE4M3, v, out + d);
      } else {
        encode(kv_dtype(), v, out + d * element_bytes());
      }
    }
  }
  double key_value(std::int64_t j, std::int64_t d) {
    const std::byte* in = address(j);
    if (shape.format != KvFormat::kFp8DsMla) return decode(kv_dtype(), in + d * element_bytes());
    if (d >= 512) return decode(DType::kBF16, in + 528 + 2 * (d - 512));
    float scale;
    std::memcpy(&scale, in + 512 + d / 128 * 4, sizeof(scale));
    return decode(DType::kE4M3, in + d) * static_cast<double>(scale);
  }
  /// Where local key j lies; null for none (sparse mode).
  const std::byte* address(std::int64_t j) {
    const std::byte* result = nullptr;
    resolve_keys(call, 0, j, 1, &result);
    return result;
  }

  Shape shape;
  CallView call;
  std::vector<std::int32_t> table;
  std::vector<std::int32_t> indices;
  std::vector<std::byte> cache;
  std::vector<std::byte> query;
  std::vector<SplitRow> rows;

 private:
  DType kv_dtype() const {
    return shape.format == KvFormat::kF16    ? DType::kF16
           : shape.format == KvFormat::kBF16 ? DType::kBF16
                                             : DType::kE4M3;
  }
  std::mt19937 random_;
};

struct Output {
  std::vector<float> out;
  std::vector<float> lse;
};

Output run(const Kernel& kernel, const Problem& p, std::int64_t first_row, std::int64_t num_rows,
           std::int64_t key_begin = -1) {
  SplitJob job;
  job.rows = p.rows.data() + first_row;
  job.num_rows = num_rows;
  job.few_rows = kernel.few_rows;
  job.key_begin = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t r = 0; r < num_rows; ++r) {
    if (job.rows[r].key_begin >= job.rows[r].key_end) continue;
    job.key_begin = std::min(job.key_begin, job.rows[r].key_begin);
    job.key_end = std::max(job.key_end, job.rows[r].key_end);
  }
  if (key_begin >= 0) job.key_begin = key_begin;
  const std::size_t bytes = kernel.table->scratch_bytes(p.shape.rank, p.shape.rope);
  EXPECT_EQ(bytes % 64, 0U);
  std::vector<std::byte> memory(bytes + 128, std::byte{0xFF});  // scratch holds NaN
  std::byte* scratch =
      memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
  Output result;
  result.out.assign(static_cast<std::size_t>(num_rows * p.shape.rank + 1), kNaN);
  result.lse.assign(static_cast<std::size_t>(num_rows + 1), kNaN);
  job.out = result.out.data();
  job.lse = result.lse.data();
  kernel.table->run_split(p.call, job, scratch);
  for (std::size_t i = bytes; i < bytes + 64; ++i) EXPECT_EQ(scratch[i], std::byte{0xFF});
  EXPECT_TRUE(std::isnan(result.out.back()));
  EXPECT_TRUE(std::isnan(result.lse.back()));
  result.out.pop_back();
  result.lse.pop_back();
  return result;
}

Output run(const Kernel& kernel, const Problem& p) {
  return run(kernel, p, 0, p.shape.num_rows);
}

struct RowReference {
  std::vector<double> out;
  double lse = -std::numeric_limits<double>::infinity();
  double largest_score = 0.0;
};

RowReference reference(Problem& p, std::int64_t row_idx) {
  const SplitRow& row = p.rows[static_cast<std::size_t>(row_idx)];
  const std::size_t item = dtype_bytes(p.shape.q_dtype);
  std::vector<std::int64_t> keys;
  std::vector<double> scores;
  double top = -std::numeric_limits<double>::infinity();
  RowReference result;
  for (std::int64_t j = row.key_begin; j < row.key_end; ++j) {
    if (p.address(j) == nullptr) continue;
    double s = 0.0;
    for (std::int64_t d = 0; d < p.head_dim(); ++d) {
      s += decode(p.shape.q_dtype, row.q_nope + static_cast<std::size_t>(d) * item) *
           p.key_value(j, d);
    }
    s *= static_cast<double>(p.call.bmm1_scale);
    const double cap = static_cast<double>(p.call.logits_soft_cap);
    if (cap > 0.0) s = cap * std::tanh(s / cap);
    if (p.call.uses_alibi_slopes) {
      s += static_cast<double>(row.alibi_slope) *
           static_cast<double>(global_position(p.call.cp, j) - row.position);
    }
    keys.push_back(j);
    scores.push_back(s);
    top = std::max(top, s);
    result.largest_score = std::max(result.largest_score, std::abs(s));
  }
  result.out.assign(static_cast<std::size_t>(p.shape.rank), 0.0);
  double sum = 0.0;
  for (std::size_t k = 0; k < keys.size(); ++k) {
    const double weight = std::exp(scores[k] - top);
    sum += weight;
    for (std::int64_t d = 0; weight > 0.0 && d < p.shape.rank; ++d) {
      result.out[static_cast<std::size_t>(d)] += weight * p.key_value(keys[k], d);
    }
  }
  for (double& v : result.out) v = keys.empty() ? 0.0 : v / sum;
  if (!keys.empty()) result.lse = top + std::log(sum);
  return result;
}

/// Rows `stride` apart against the reference. A score of magnitude s is known to about s * 2^-23 in
/// f32, which is also the relative error that it puts on a weight.
void expect_correct(const Kernel& kernel, Problem& p, std::int64_t stride = 1) {
  const Output got = run(kernel, p);
  for (std::int64_t r = 0; r < p.shape.num_rows; r += stride) {
    SCOPED_TRACE("row " + std::to_string(r) + " of " + std::to_string(p.shape.num_rows) + ", L " +
                 std::to_string(p.shape.rank) + ", R " + std::to_string(p.shape.rope) + ", keys " +
                 std::to_string(p.shape.num_keys));
    const RowReference want = reference(p, r);
    double error = 0.0;
    double norm = 0.0;
    for (std::int64_t d = 0; d < p.shape.rank; ++d) {
      const double w = want.out[static_cast<std::size_t>(d)];
      const double g = static_cast<double>(got.out[static_cast<std::size_t>(r * p.shape.rank + d)]);
      error += (g - w) * (g - w);
      norm += w * w;
    }
    const double score_error = want.largest_score * std::ldexp(1.0, -23);
    ASSERT_LE(std::sqrt(error), (1e-5 + score_error) * std::sqrt(norm));
    const double lse = static_cast<double>(got.lse[static_cast<std::size_t>(r)]);
    if (std::isinf(want.lse)) {
      ASSERT_EQ(lse, want.lse);
    } else {
      ASSERT_NEAR(lse, want.lse, 1e-5 + 2.0 * score_error);
    }
  }
}

/// The bits of rows [first, first + count) when they run without the others.
void expect_same_bits_alone(const Kernel& kernel, const Problem& p, const Output& together,
                            std::int64_t first, std::int64_t count) {
  const Output alone = run(kernel, p, first, count);
  EXPECT_EQ(0, std::memcmp(alone.out.data(), together.out.data() + first * p.shape.rank,
                           alone.out.size() * sizeof(float)))
      << "rows from " << first << ", " << count;
  EXPECT_EQ(0, std::memcmp(alone.lse.data(), together.lse.data() + first,
                           alone.lse.size() * sizeof(float)));
}

class CpuKernels : public testing::TestWithParam<Kernel> {};

TEST_P(CpuKernels, RowCountsAndShapesMatchTheReference) {
  const std::int64_t shapes[][2] = {{512, 64}, {256, 64}, {512, 0}, {16, 16}, {48, 32}};
  int i = 0;
  for (const std::int64_t num_rows : {1, 3, 5, 6, 8, 12, 16, 17, 20, 22, 32, 33, 64, 100, 128}) {
    for (const int step : {0, 1}) {
      Shape shape;
      const auto& dims = shapes[(i + step * 2) % 5];
      shape.rank = dims[0];
      shape.rope = dims[1];
      shape.num_rows = num_rows;
      shape.num_keys = step == 0 ? 49 + i : 1 + 3 * i;
      Problem p(shape, static_cast<std::uint32_t>(i));
      expect_correct(GetParam(), p, 1 + num_rows / 16);
    }
    ++i;
  }
}

TEST_P(CpuKernels, EveryTypeCombinationMatchesTheReference) {
  for (const DType q : {DType::kBF16, DType::kF16, DType::kE4M3}) {
    for (const KvFormat format :
         {KvFormat::kBF16, KvFormat::kF16, KvFormat::kE4M3, KvFormat::kFp8DsMla}) {
      for (const std::int64_t num_rows : {2, 9, 24}) {
        Problem p({512, 64, num_rows, 60, q, format});
        expect_correct(GetParam(), p, 1 + num_rows / 4);
      }
    }
  }
}

TEST_P(CpuKernels, EveryCodeOfAStorageTypeDecodesExactly) {
  // One key: out is the key itself.
  for (const KvFormat format : {KvFormat::kBF16, KvFormat::kF16, KvFormat::kE4M3}) {
    const int num_codes = format == KvFormat::kE4M3 ? 256 : 65536;
    const std::int64_t per_key = 1024;
    Problem p({per_key, 0, 1, (num_codes + per_key - 1) / per_key, DType::kBF16, format});
    std::memset(p.query.data(), 0, p.query.size());
    for (std::int64_t j = 0; j < p.shape.num_keys; ++j) {
      for (std::int64_t d = 0; d < per_key; ++d) {
        const std::int64_t code = (j * per_key + d) % num_codes;
        std::byte* out = p.key(j) + d * p.element_bytes();
        const auto bits = static_cast<std::uint16_t>(code);
        std::memcpy(out, &bits, static_cast<std::size_t>(p.element_bytes()));
        // A NaN or infinity would reach every dimension through the score; those have a key apart.
        if (!std::isfinite(p.key_value(j, d)))
          std::memset(out, 0, static_cast<std::size_t>(p.element_bytes()));
      }
      p.rows[0].key_begin = j;
      p.rows[0].key_end = j + 1;
      const Output got = run(GetParam(), p);
      for (std::int64_t d = 0; d < per_key; ++d) {
        ASSERT_EQ(static_cast<double>(got.out[static_cast<std::size_t>(d)]), p.key_value(j, d))
            << "key " << j << " dim " << d;
      }
    }
  }
}

TEST_P(CpuKernels, NotANumberCodesReachTheRowsThatSeeThem) {
  for (const KvFormat format :
       {KvFormat::kBF16, KvFormat::kF16, KvFormat::kE4M3, KvFormat::kFp8DsMla}) {
    for (const int sign : {0, 1}) {
      Problem p({512, 64, 6, 20, DType::kBF16, format});
      const bool byte_codes = p.element_bytes() == 1;
      const std::uint16_t nan = static_cast<std::uint16_t>((sign != 0 ? 0x8000 : 0) | 0x7FFF);
      std::byte* at = p.key(11) + 37 * p.element_bytes();
      if (byte_codes) {
        *at = static_cast<std::byte>(nan >> 8 | 0x7F);
      } else {
        std::memcpy(at, &nan, sizeof(nan));
      }
      p.rows[2].key_end = 11;  // does not see it
      const Output got = run(GetParam(), p);
      for (std::int64_t r = 0; r < 6; ++r) {
        const bool sees = r != 2;
        EXPECT_EQ(std::isnan(got.out[static_cast<std::size_t>(r * 512 + 37)]), sees);
        EXPECT_EQ(std::isnan(got.lse[static_cast<std::size_t>(r)]), sees);
      }
    }
  }
}

TEST_P(CpuKernels, CausalTokensAndWindowsMaskByRow) {
  for (const KvFormat format : {KvFormat::kBF16, KvFormat::kE4M3}) {
    for (const std::int64_t heads : {1, 6, 16, 20}) {
      const std::int64_t tokens = 4;
      Problem p({48, 32, tokens * heads, 131, DType::kBF16, format});
      for (const std::int64_t window : {0, 5, 60}) {
        for (std::int64_t r = 0; r < tokens * heads; ++r) {
          SplitRow& row = p.rows[static_cast<std::size_t>(r)];
          row.position = p.shape.num_keys - tokens + r / heads;
          const KeyRange seen =
              visible_keys(p.call.cp, p.shape.num_keys, row.position, true, window);
          row.key_begin = seen.begin;
          row.key_end = seen.end;
        }
        expect_correct(GetParam(), p, 1 + heads / 4);
      }
    }
  }
}

TEST_P(CpuKernels, KeysThatARowDoesNotSeeNeverTouchIt) {
  // Rows see staggered ranges; keys beyond all ranges, and keys that one row sees, hold NaN.
  Problem p({48, 32, 40, 150});
  for (std::int64_t r = 0; r < 40; ++r) {
    SplitRow& row = p.rows[static_cast<std::size_t>(r)];
    row.key_begin = r % 7;
    row.key_end = 150 - 3 * (r % 11);
  }
  p.rows[5].key_begin = p.rows[5].key_end = 77;  // sees none
  const Output clean = run(GetParam(), p);
  expect_correct(GetParam(), p, 3);
  EXPECT_EQ(clean.lse[5], -kInf);
  for (std::int64_t d = 0; d < 48; ++d)
    EXPECT_EQ(clean.out[5 * 48 + static_cast<std::size_t>(d)], 0.0F);

  for (const std::int64_t poisoned : {0, 3, 149, 148, 121}) p.poison_key(poisoned);
  const Output dirty = run(GetParam(), p);
  int rows_apart = 0;
  for (std::int64_t r = 0; r < 40; ++r) {
    const SplitRow& row = p.rows[static_cast<std::size_t>(r)];
    const bool sees = (row.key_begin <= 3 && row.key_begin < row.key_end) || row.key_end > 148 ||
                      (row.key_end > 121 && row.key_begin < row.key_end);
    for (std::int64_t d = 0; d < 48; ++d) {
      const auto i = static_cast<std::size_t>(r * 48 + d);
      if (sees) {
        EXPECT_TRUE(std::isnan(dirty.out[i]));
      } else {
        EXPECT_EQ(dirty.out[i], clean.out[i]);
      }
    }
    rows_apart += sees ? 0 : 1;
  }
  EXPECT_GT(rows_apart, 1);
}

TEST_P(CpuKernels, KeysOutsideTheRangeAreNeverRead) {
  Problem p({48, 32, 20, 200});
  for (SplitRow& row : p.rows) {
    row.key_begin = 61;
    row.key_end = 100;
  }
  const Output clean = run(GetParam(), p);
  for (std::int64_t j = 0; j < 200; ++j) {
    if (j < 61 || j >= 100) p.poison_key(j);
  }
  for (std::size_t page = 0; page < p.table.size(); ++page) {
    const auto first = static_cast<std::int64_t>(page) * Problem::kPageSize;
    if (first + Problem::kPageSize <= 61 || first >= 100) {
      p.table[page] = std::numeric_limits<std::int32_t>::min();
    }
  }
  const Output dirty = run(GetParam(), p);
  EXPECT_EQ(clean.out, dirty.out);
  EXPECT_EQ(clean.lse, dirty.lse);
}

TEST_P(CpuKernels, SparseEntriesOutsideThePoolAreNoKeys) {
  for (const std::int64_t num_rows : {3, 20}) {
    Problem p({48, 32, num_rows, 100});
    p.indices.resize(130);
    for (std::size_t k = 0; k < p.indices.size(); ++k) {
      const auto j = static_cast<std::int64_t>(p.random()() % 100);
      p.indices[k] = static_cast<std::int32_t>(
          p.table[static_cast<std::size_t>(j / Problem::kPageSize)] * Problem::kPageSize +
          j % Problem::kPageSize);
      if (k % 3 == 1 || (k >= 48 && k < 96)) {
        const std::int32_t wild[] = {-1, std::numeric_limits<std::int32_t>::min(),
                                     static_cast<std::int32_t>(p.call.kv.num_slots()),
                                     std::numeric_limits<std::int32_t>::max()};
        p.indices[k] = wild[k % 4];
      }
    }
    p.call.indices = p.indices.data();
    p.call.indices_stride = static_cast<std::int64_t>(p.indices.size());
    p.call.block_table = nullptr;
    for (SplitRow& row : p.rows) row.key_end = static_cast<std::int64_t>(p.indices.size());
    expect_correct(GetParam(), p, 2);

    std::fill(p.indices.begin(), p.indices.end(), -1);
    const Output none = run(GetParam(), p);
    for (const float lse : none.lse) EXPECT_EQ(lse, -kInf);
    for (const float v : none.out) EXPECT_EQ(v, 0.0F);
  }
}

TEST_P(CpuKernels, SoftCapAndAlibiMatchTheReference) {
  for (const std::int64_t num_rows : {1, 5, 12, 33}) {
    for (const int mode : {1, 2, 3}) {
      Problem p({256, 64, num_rows, 110});
      p.call.bmm1_scale = 0.3F;
      if ((mode & 1) != 0) p.call.logits_soft_cap = 4.0F;
      p.call.uses_alibi_slopes = (mode & 2) != 0;
      p.call.cp = CpLayout{4, 3, 2};
      for (std::int64_t r = 0; r < num_rows; ++r) {
        SplitRow& row = p.rows[static_cast<std::size_t>(r)];
        row.alibi_slope = std::ldexp(1.0F, -static_cast<int>(r % 9));
        row.position = global_position(p.call.cp, 109) + 2 - r % 3;
        row.key_end = 110 - r % 3;
      }
      expect_correct(GetParam(), p, 1 + num_rows / 8);
    }
  }
}

TEST_P(CpuKernels, OneDominantKeyAnywhere) {
  for (const std::int64_t at : {0, 1, 7, 8, 47, 48, 70, 95, 96, 99}) {
    Problem p({48, 32, 9, 100});
    p.call.bmm1_scale = 1.0F;
    std::vector<float> aligned(80);
    for (std::int64_t d = 0; d < 80; ++d) {
      aligned[static_cast<std::size_t>(d)] =
          2.0F * static_cast<float>(decode(DType::kBF16, p.rows[4].q_nope + 2 * d));
    }
    p.write_key(at, aligned);
    expect_correct(GetParam(), p);
  }
}

TEST_P(CpuKernels, EqualScoresAverageTheValues) {
  Problem p({48, 0, 9, 301});
  std::memset(p.query.data(), 0, p.query.size());
  expect_correct(GetParam(), p);
}

TEST_P(CpuKernels, ScoresOfTenThousandStayExactToF32) {
  for (const float target : {1e4F, -1e4F}) {
    for (const std::int64_t num_rows : {2, 20}) {
      Problem p({256, 64, num_rows, 100});
      // Half of the scores have one sign, their magnitudes reach the target.
      p.call.bmm1_scale = target / (3.0F * std::sqrt(320.0F));
      expect_correct(GetParam(), p, 1 + num_rows / 4);
      // All scores near the target, a few units apart.
      for (std::int64_t j = 0; j < 100; ++j) {
        std::vector<float> near(320, 0.0F);
        for (std::int64_t d = 0; d < 320; ++d) {
          near[static_cast<std::size_t>(d)] =
              1.0F + static_cast<float>((j * 7 + d * 3) % 5 == 0) / 128;
        }
        p.write_key(j, near);
      }
      for (std::int64_t r = 0; r < num_rows; ++r) {
        for (std::int64_t d = 0; d < 320; ++d) {
          encode(DType::kBF16, 1.0F + static_cast<float>((r + d) % 3) / 64,
                 const_cast<std::byte*>(p.rows[static_cast<std::size_t>(r)].q_nope) + 2 * d);
        }
      }
      p.call.bmm1_scale = target / 325.0F;
      expect_correct(GetParam(), p, 1 + num_rows / 4);
    }
  }
}

TEST_P(CpuKernels, LongContextsKeepTheirAccuracy) {
  Problem p({16, 0, 8, 131072});
  p.call.bmm1_scale = 0.01F;
  expect_correct(GetParam(), p, 7);
}

TEST_P(CpuKernels, BitsDoNotDependOnTheOtherRows) {
  for (const KvFormat format : {KvFormat::kBF16, KvFormat::kFp8DsMla}) {
    Problem p({512, 64, 61, 140, DType::kBF16, format});
    for (std::int64_t r = 0; r < 61; ++r) {
      p.rows[static_cast<std::size_t>(r)].key_begin = 3 * (r % 4);
      p.rows[static_cast<std::size_t>(r)].key_end = 140 - r / 8;
    }
    const Output together = run(GetParam(), p);
    for (const std::int64_t first : {0, 2, 9, 31, 32, 50, 60}) {
      for (const std::int64_t count : {1, 3, 8, 11}) {
        if (first + count <= 61) expect_same_bits_alone(GetParam(), p, together, first, count);
      }
    }
  }
}

TEST_P(CpuKernels, BitsDoNotDependOnWhereTheSplitBegins) {
  for (const std::int64_t num_rows : {4, 20}) {
    Problem p({48, 32, num_rows, 200});
    p.call.logits_soft_cap = num_rows == 4 ? 0.0F : 9.0F;
    for (SplitRow& row : p.rows) row.key_begin = 101;
    const Output want = run(GetParam(), p);
    for (const std::int64_t begin : {100, 97, 60, 0}) {
      const Output got = run(GetParam(), p, 0, num_rows, begin);
      EXPECT_EQ(want.out, got.out);
      EXPECT_EQ(want.lse, got.lse);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Here, CpuKernels, testing::ValuesIn(kernels()), kernel_name);

class CpuRowFunctions : public testing::TestWithParam<const KernelTable*> {};

std::vector<const KernelTable*> tables() {
  std::vector<const KernelTable*> result;
  for (const Kernel& kernel : kernels()) {
    if (!kernel.few_rows) result.push_back(kernel.table);
  }
  return result;
}

TEST_P(CpuRowFunctions, StoreRoundsToNearestEven) {
  std::vector<float> values = {0.0F,   -0.0F,   1.0F,     -1.0F,    kInf,  -kInf,  kNaN,  -kNaN,
                               1e-30F, -1e-30F, 65519.9F, 65520.0F, 1e38F, -1e38F, 3e38F, 3.4e38F};
  // Around every kind of tie: exact, one below, one above, for odd and even neighbours.
  for (const std::uint32_t base : {0x3F800000U, 0x3F810000U, 0x33800000U, 0x387FC000U, 0x477FE000U,
                                   0x7F7F0000U, 0x00010000U, 0x38800000U, 0xB3000000U}) {
    for (const std::uint32_t half : {0x8000U, 0x1000U, 0x3000U, 0x800000U}) {
      for (const std::uint32_t step : {0U, 1U, 0xFFFFFFFFU}) {
        values.push_back(numeric::bits_to_float(base + half + step));
      }
    }
  }
  std::mt19937 random(5);
  while (values.size() < 1000) {
    values.push_back(numeric::bits_to_float(static_cast<std::uint32_t>(random())));
  }
  const auto count = static_cast<std::int64_t>(values.size()) - 3;  // leaves a tail of lanes
  for (const float factor : {1.0F, 0.5F}) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      const std::size_t item = dtype_bytes(dtype);
      std::vector<std::byte> out(values.size() * item + 1, std::byte{0xAB});
      GetParam()->store_row(values.data(), factor, count, dtype, out.data() + 1);
      for (std::int64_t i = 0; i < count; ++i) {
        const float product = values[static_cast<std::size_t>(i)] * factor;
        std::uint32_t want = numeric::float_to_bits(product);
        std::uint32_t infinity = 0x7F800000U;
        if (dtype == DType::kBF16) want = numeric::float_to_bf16(product), infinity = 0x7F80U;
        if (dtype == DType::kF16) want = numeric::float_to_f16(product), infinity = 0x7C00U;
        const std::uint32_t sign = item == 4 ? 0x80000000U : 0x8000U;
        if (want == sign) want = 0;
        std::uint32_t got = 0;
        std::memcpy(&got, out.data() + 1 + static_cast<std::size_t>(i) * item, item);
        if (std::isnan(product)) {
          EXPECT_GT(got & ~sign, infinity);
        } else {
          EXPECT_EQ(got, want) << to_string(dtype) << " of " << product;
        }
      }
      EXPECT_EQ(out[1 + static_cast<std::size_t>(count) * item], std::byte{0xAB});
    }
  }
}

TEST_P(CpuRowFunctions, MergeWeighsBothSidesAndZeroKillsATerm) {
  for (const std::int64_t count : {16, 48, 21}) {
    const auto size = static_cast<std::size_t>(count);
    std::vector<float> a(size);
    std::vector<float> b(size);
    for (std::size_t i = 0; i < size; ++i) {
      a[i] = 0.25F * static_cast<float>(i) - 1.0F;
      b[i] = 3.0F - 0.5F * static_cast<float>(i);
    }
    std::vector<float> acc = a;
    GetParam()->merge_row(acc.data(), 0.75F, b.data(), 0.25F, count);
    for (std::size_t i = 0; i < size; ++i) EXPECT_EQ(acc[i], 0.75F * a[i] + 0.25F * b[i]);

    const std::vector<float> bad(size, kNaN);
    acc = a;
    GetParam()->merge_row(acc.data(), 1.0F, bad.data(), 0.0F, count);
    EXPECT_EQ(acc, a);
    acc = bad;
    GetParam()->merge_row(acc.data(), 0.0F, b.data(), 1.0F, count);
    EXPECT_EQ(acc, b);
    acc = bad;
    GetParam()->merge_row(acc.data(), 0.0F, bad.data(), 0.0F, count);
    EXPECT_EQ(acc, std::vector<float>(size, 0.0F));
  }
}

INSTANTIATE_TEST_SUITE_P(Here, CpuRowFunctions, testing::ValuesIn(tables()),
                         [](const auto& param) { return std::string(param.param->name); });

}  // namespace
}  // namespace mla::cpu
