// The bf16 kernels (AVX512_BF16, AMX, and AMX with emulated tiles) against a double oracle.
//
// Tolerances: P is rounded to bf16 (2^-9 relative, independent per key), everything else is f32.
// The result before output rounding must keep half of the library's bf16 promise: 2.5e-3 of the
// whole tensor, 8e-3 of the worst row.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/lse.hpp"
#include "core/numeric.hpp"
#include "cpu/amx_kernel.hpp"
#include "cpu/bf16_features.hpp"
#include "cpu/kernel.hpp"
#include "emulated_tiles.hpp"

namespace mla::cpu {
namespace {

constexpr double kTensorTolerance = 2.5e-3;
constexpr double kRowTolerance = 8e-3;
const float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

/// A kernel under test, or the reason why it cannot run here.
struct Kernel {
  void (*run)(const CallView&, const SplitJob&, std::byte*) = nullptr;
  std::size_t (*scratch_bytes)(std::int64_t, std::int64_t) = nullptr;
  std::int64_t key_tile = 0;
  std::string skip_reason;
};

Kernel from_table(const KernelTable* table, const char* reason) {
  Kernel kernel;
  if (table == nullptr) {
    kernel.skip_reason = reason;
    return kernel;
  }
  kernel.run = table->run_split;
  kernel.scratch_bytes = table->scratch_bytes;
  kernel.key_tile = table->key_tile;
  return kernel;
}

#if defined(MLA_CPU_BF16)
void run_emulated(const CallView& call, const SplitJob& job, std::byte* scratch) {
  bf16::run_amx_split<testing::EmulatedTiles>(call, job, scratch);
}
#endif

Kernel find_kernel(const std::string& name) {
  if (name == "avx512bf16") {
    return from_table(avx512bf16_kernels(), "this build or processor lacks AVX512_BF16");
  }
  if (name == "amx") {
    return from_table(amx_kernels(), "this build, processor or system lacks AMX-BF16");
  }
  Kernel kernel;
  kernel.skip_reason = "only the tiles are emulated; the softmax needs AVX512_BF16";
#if defined(MLA_CPU_BF16)
  if (bf16::cpu_has_avx512_bf16()) {
    kernel = {run_emulated, bf16::scratch_size, bf16::kKeyTile, ""};
  }
#endif
  return kernel;
}

struct Options {
  std::int64_t rows = 16;
  std::int64_t rank = 512;
  std::int64_t rope = 64;
  std::int64_t keys = 150;
  std::int64_t page_size = 7;
  DType q_dtype = DType::kBF16;
  KvFormat kv_format = KvFormat::kBF16;
  bool sparse = false;
  float scale = 0.0F;  ///< 0: 1 / sqrt(D)
  float soft_cap = 0.0F;
  bool alibi = false;
  CpLayout cp;
  unsigned seed = 1;
};

/// Inputs of one split as values, and their storage: poisoned pages in shuffled order, odd strides.
class Fixture {
 public:
  explicit Fixture(const Options& options) : o(options), random_(options.seed) {
    dim = o.rank + o.rope;
    q.resize(static_cast<std::size_t>(o.rows * dim));
    cache.resize(static_cast<std::size_t>(o.keys * dim));
    for (float& value : q) value = round_to(o.q_dtype, normal());
    for (float& value : cache) value = round_to(kv_dtype_of(), normal());
    exists.assign(static_cast<std::size_t>(o.keys), true);
    rows.resize(static_cast<std::size_t>(o.rows));
    for (std::int64_t i = 0; i < o.rows; ++i) {
      SplitRow& row = rows[static_cast<std::size_t>(i)];
      row.key_begin = 0;
      row.key_end = o.keys;
      row.position = o.keys - 1 - i % 3;
      row.alibi_slope = o.alibi ? std::ldexp(1.0F, static_cast<int>(-1 - i % 8)) : 0.0F;
    }
  }

  float normal() { return distribution_(random_); }
  std::int64_t uniform(std::int64_t bound) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(bound));
  }
  DType kv_dtype_of() const { return o.kv_format == KvFormat::kE4M3 ? DType::kE4M3 : DType::kBF16; }

  static float round_to(DType type, float value) {
    return type == DType::kE4M3 ? numeric::e4m3_to_float(numeric::float_to_e4m3(value))
                                : numeric::bf16_to_float(numeric::float_to_bf16(value));
  }
  static void encode(DType type, const float* values, std::int64_t count, std::byte* out) {
    for (std::int64_t i = 0; i < count; ++i) {
      if (type == DType::kE4M3) {
        out[i] = static_cast<std::byte>(numeric::float_to_e4m3(values[i]));
      } else {
        const std::uint16_t bits = numeric::float_to_bf16(values[i]);
        std::memcpy(out + 2 * i, &bits, 2);
      }
    }
  }

  float* key(std::int64_t j) { return cache.data() + j * dim; }
  float* query(std::int64_t i) { return q.data() + i * dim; }
  bool sees(std::int64_t i, std::int64_t j) const {
    const SplitRow& row = rows[static_cast<std::size_t>(i)];
    return j >= row.key_begin && j < row.key_end && exists[static_cast<std::size_t>(j)];
  }
  float scale() const {
    return o.scale != 0.0F ? o.scale : 1.0F / std::sqrt(static_cast<float>(dim));
  }

  Options o;
  std::int64_t dim = 0;
  std::vector<float> q;      ///< [rows, D]
  std::vector<float> cache;  ///< [keys, D]
  std::vector<bool> exists;  ///< sparse mode: false is an entry outside the pool
  std::vector<SplitRow> rows;

 private:
  std::mt19937_64 random_;
  std::normal_distribution<float> distribution_;
};

struct Output {
  std::vector<float> out;
  std::vector<float> lse;
};

/// Runs rows [first, first + count) of the fixture as one split, over the union of their keys cut
/// to [key_begin, key_end).
Output run_rows(const Kernel& kernel, Fixture& f, std::int64_t first, std::int64_t count,
                std::int64_t key_begin, std::int64_t key_end) {
  const DType kv_type = f.kv_dtype_of();
  const std::int64_t kv_size = kv_type == DType::kE4M3 ? 1 : 2;
  const std::int64_t q_size = f.o.q_dtype == DType::kE4M3 ? 1 : 2;
  const std::int64_t num_pages = (f.o.keys + f.o.page_size - 1) / f.o.page_size + 2;
  const std::int64_t token_stride = (f.dim + 3) * kv_size;
  const std::int64_t page_stride = token_stride * f.o.page_size + 5 * kv_size;
  std::vector<std::byte> pool(static_cast<std::size_t>(num_pages * page_stride + 64),
                              std::byte{0xFF});  // NaN in both types
  std::vector<std::int32_t> table(static_cast<std::size_t>(num_pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(5));

  CallView call;
  call.num_heads = f.o.rows;
  call.kv_lora_rank = f.o.rank;
  call.qk_rope_head_dim = f.o.rope;
  call.q_dtype = f.o.q_dtype;
  call.kv_format = f.o.kv_format;
  call.kv = {pool.data(), num_pages, f.o.page_size, page_stride, token_stride};
  call.bmm1_scale = f.scale();
  call.logits_soft_cap = f.o.soft_cap;
  call.cp = f.o.cp;
  call.uses_alibi_slopes = f.o.alibi;

  std::vector<std::int32_t> indices(static_cast<std::size_t>(f.o.keys));
  for (std::int64_t j = 0; j < f.o.keys; ++j) {
    const std::int64_t page = table[static_cast<std::size_t>(j / f.o.page_size)];
    const std::int64_t offset = j % f.o.page_size;
    std::byte* at = pool.data() + page * page_stride + offset * token_stride;
    if (f.exists[static_cast<std::size_t>(j)]) Fixture::encode(kv_type, f.key(j), f.dim, at);
    indices[static_cast<std::size_t>(j)] =
        f.exists[static_cast<std::size_t>(j)]
            ? static_cast<std::int32_t>(page * f.o.page_size + offset)
            : (j % 2 == 0 ? -1 : static_cast<std::int32_t>(num_pages * f.o.page_size + j));
  }
  // No entry behind the keys in use exists: a sanitizer sees each read of one.
  table.resize(static_cast<std::size_t>((key_end + f.o.page_size - 1) / f.o.page_size));
  table.shrink_to_fit();
  if (f.o.sparse) {
    call.indices = indices.data();
    call.indices_stride = f.o.keys;
  } else {
    call.block_table = table.data();
    call.block_table_stride = num_pages;
  }

  std::vector<std::byte> nope(static_cast<std::size_t>(count * f.o.rank * q_size));
  std::vector<std::byte> rope(static_cast<std::size_t>(count * f.o.rope * q_size) + 1);
  std::vector<SplitRow> rows;
  for (std::int64_t i = 0; i < count; ++i) {
    std::byte* q_nope = nope.data() + i * f.o.rank * q_size;
    std::byte* q_pe = rope.data() + i * f.o.rope * q_size;
    Fixture::encode(f.o.q_dtype, f.query(first + i), f.o.rank, q_nope);
    Fixture::encode(f.o.q_dtype, f.query(first + i) + f.o.rank, f.o.rope, q_pe);
    SplitRow row = f.rows[static_cast<std::size_t>(first + i)];
    row.q_nope = q_nope;
    row.q_pe = q_pe;
    row.key_begin = std::max(row.key_begin, key_begin);
    row.key_end = std::min(row.key_end, key_end);
    if (row.key_begin >= row.key_end) row.key_begin = row.key_end = 0;
    rows.push_back(row);
  }
  SplitJob job;
  job.rows = rows.data();
  job.num_rows = count;
  job.key_begin = std::numeric_limits<std::int64_t>::max();
  for (const SplitRow& row : rows) {
    if (row.key_begin >= row.key_end) continue;
    job.key_begin = std::min(job.key_begin, row.key_begin);
    job.key_end = std::max(job.key_end, row.key_end);
  }
  Output output;
  constexpr std::size_t kGuard = 32;
  output.out.assign(static_cast<std::size_t>(count * f.o.rank) + kGuard, -77.0F);
  output.lse.assign(static_cast<std::size_t>(count) + kGuard, -77.0F);
  job.out = output.out.data();
  job.lse = output.lse.data();
  const std::size_t bytes = kernel.scratch_bytes(f.o.rank, f.o.rope);
  std::vector<std::byte> memory(bytes + 128, std::byte{0xFF});
  void* aligned = memory.data();
  std::size_t space = memory.size();
  aligned = std::align(64, bytes, aligned, space);
  auto* scratch = static_cast<std::byte*>(aligned);
  kernel.run(call, job, scratch);
  for (std::size_t n = 0; n < kGuard; ++n) {
    EXPECT_EQ(output.out[output.out.size() - 1 - n], -77.0F) << "out written past its end";
    EXPECT_EQ(output.lse[output.lse.size() - 1 - n], -77.0F) << "lse written past its end";
  }
  for (std::byte* at = scratch + bytes; at < memory.data() + memory.size(); ++at) {
    EXPECT_EQ(*at, std::byte{0xFF}) << "scratch written past its end";
  }
  output.out.resize(output.out.size() - kGuard);
  output.lse.resize(output.lse.size() - kGuard);
  return output;
}

Output run_all(const Kernel& kernel, Fixture& f) {
  return run_rows(kernel, f, 0, f.o.rows, 0, f.o.keys);
}

/// The formula in double, row by row.
struct Reference {
  std::vector<double> out;
  std::vector<double> lse;
};

Reference reference(Fixture& f) {
  Reference r;
  r.out.assign(static_cast<std::size_t>(f.o.rows * f.o.rank), 0.0);
  r.lse.assign(static_cast<std::size_t>(f.o.rows), -std::numeric_limits<double>::infinity());
  for (std::int64_t i = 0; i < f.o.rows; ++i) {
    const SplitRow& row = f.rows[static_cast<std::size_t>(i)];
    std::vector<double> scores(static_cast<std::size_t>(f.o.keys));
    double largest = -std::numeric_limits<double>::infinity();
    for (std::int64_t j = 0; j < f.o.keys; ++j) {
      if (!f.sees(i, j)) continue;
      double x = 0.0;
      for (std::int64_t d = 0; d < f.dim; ++d) {
        x += static_cast<double>(f.query(i)[d]) * static_cast<double>(f.key(j)[d]);
      }
      x *= static_cast<double>(f.scale());
      const auto cap = static_cast<double>(f.o.soft_cap);
      if (cap > 0.0) x = cap * std::tanh(x / cap);
      const std::int64_t chunk = j / f.o.cp.interleave;
      const std::int64_t global =
          (chunk * f.o.cp.world + f.o.cp.rank) * f.o.cp.interleave + j % f.o.cp.interleave;
      x += static_cast<double>(row.alibi_slope) * static_cast<double>(global - row.position);
      scores[static_cast<std::size_t>(j)] = x;
      largest = std::max(largest, x);
    }
    double sum = 0.0;
    double* out = r.out.data() + i * f.o.rank;
    for (std::int64_t j = 0; j < f.o.keys; ++j) {
      if (!f.sees(i, j)) continue;
      const double p = std::exp(scores[static_cast<std::size_t>(j)] - largest);
      sum += p;
      for (std::int64_t d = 0; d < f.o.rank; ++d) out[d] += p * static_cast<double>(f.key(j)[d]);
    }
    if (sum == 0.0) continue;
    for (std::int64_t d = 0; d < f.o.rank; ++d) out[d] /= sum;
    r.lse[static_cast<std::size_t>(i)] = largest + std::log(sum);
  }
  return r;
}

void expect_close(const Output& actual, const Reference& expected) {
  const std::size_t rows = expected.lse.size();
  const std::size_t rank = expected.out.size() / rows;
  double error = 0.0;
  double norm = 0.0;
  double worst = 0.0;
  for (std::size_t i = 0; i < rows; ++i) {
    double row_error = 0.0;
    double row_norm = 0.0;
    for (std::size_t d = 0; d < rank; ++d) {
      const double want = expected.out[i * rank + d];
      const double diff = static_cast<double>(actual.out[i * rank + d]) - want;
      row_error += diff * diff;
      row_norm += want * want;
    }
    if (std::isinf(expected.lse[i])) {
      EXPECT_EQ(row_error, 0.0) << "row " << i << " without keys";
      EXPECT_EQ(actual.lse[i], -kInf) << "row " << i << " without keys";
      continue;
    }
    EXPECT_NEAR(static_cast<double>(actual.lse[i]), expected.lse[i],
                1e-4 + 1e-6 * std::abs(expected.lse[i]))
        << "row " << i;
    EXPECT_FALSE(std::isnan(row_error)) << "row " << i;
    error += row_error;
    norm += row_norm;
    worst = std::max(worst, std::sqrt(row_error / row_norm));
  }
  if (norm == 0.0) return;
  EXPECT_LE(std::sqrt(error / norm), kTensorTolerance);
  EXPECT_LE(worst, kRowTolerance);
}

/// The same values, a -0 being a 0 (store_row makes it one).
void expect_same_row(const Output& a, std::int64_t row_a, const Output& b, std::int64_t row_b,
                     std::int64_t rank) {
  EXPECT_EQ(a.lse[static_cast<std::size_t>(row_a)], b.lse[static_cast<std::size_t>(row_b)])
      << "row " << row_a;
  std::int64_t different = 0;
  for (std::int64_t d = 0; d < rank; ++d) {
    if (a.out[static_cast<std::size_t>(row_a * rank + d)] !=
        b.out[static_cast<std::size_t>(row_b * rank + d)]) {
      ++different;
    }
  }
  EXPECT_EQ(different, 0) << "row " << row_a;
}

class Bf16Kernels : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    kernel = find_kernel(GetParam());
    if (!kernel.skip_reason.empty()) GTEST_SKIP() << kernel.skip_reason;
  }
  void check(Fixture& f) { expect_close(run_all(kernel, f), reference(f)); }

  Kernel kernel;
};

TEST_P(Bf16Kernels, EveryShapeTypeAndRowCountMatches) {
  const std::int64_t shapes[][2] = {{512, 64}, {256, 64}, {512, 0}, {16, 16}, {48, 32}, {16, 0}};
  const std::int64_t row_counts[] = {1, 6, 8, 16, 17, 20, 33, 64, 128};
  unsigned n = 0;
  for (const auto& shape : shapes) {
    for (const std::int64_t rows : row_counts) {
      Options o;
      o.rank = shape[0];
      o.rope = shape[1];
      o.rows = rows;
      o.q_dtype = n % 2 == 0 ? DType::kBF16 : DType::kE4M3;
      o.kv_format = n / 2 % 2 == 0 ? KvFormat::kBF16 : KvFormat::kE4M3;
      const std::int64_t key_counts[] = {150, 1, 2, 40, 129, 300};
      o.keys = key_counts[n % 6];
      const std::int64_t page_sizes[] = {7, 64, 1, 16, 128};
      o.page_size = page_sizes[n % 5];
      o.seed = ++n;
      SCOPED_TRACE("rank " + std::to_string(o.rank) + " rope " + std::to_string(o.rope) + " rows " +
                   std::to_string(rows) + " keys " + std::to_string(o.keys) + " page " +
                   std::to_string(o.page_size));
      Fixture f(o);
      check(f);
    }
  }
}

TEST_P(Bf16Kernels, EveryE4M3CodeIsDecodedExactly) {
  Options o;
  o.rank = 256;
  o.rope = 16;
  o.rows = 3;
  o.keys = 1;
  o.kv_format = KvFormat::kE4M3;
  Fixture f(o);
  for (int code = 0; code < 256; ++code) {
    f.key(0)[code] =
        (code & 0x7F) == 0x7F ? 0.0F : numeric::e4m3_to_float(static_cast<std::uint8_t>(code));
  }
  const Output output = run_all(kernel, f);
  for (std::int64_t i = 0; i < o.rows; ++i) {
    for (std::int64_t d = 0; d < o.rank; ++d) {
      EXPECT_EQ(output.out[static_cast<std::size_t>(i * o.rank + d)], f.key(0)[d]) << d;
    }
  }
}

TEST_P(Bf16Kernels, EachRowSeesItsOwnRange) {
  for (const std::int64_t rows : {1, 20, 64}) {
    for (const bool causal : {true, false}) {
      Options o;
      o.rank = 48;
      o.rope = 16;
      o.rows = rows;
      o.keys = 400;
      o.seed = static_cast<unsigned>(rows);
      Fixture f(o);
      for (std::int64_t i = 0; i < rows; ++i) {
        SplitRow& row = f.rows[static_cast<std::size_t>(i)];
        row.key_begin = causal ? 0 : f.uniform(o.keys);
        row.key_end = causal ? o.keys - i / 4 : row.key_begin + f.uniform(o.keys - row.key_begin);
        if (row.key_begin == row.key_end) row.key_begin = row.key_end = 0;
      }
      if (!causal) f.rows[0].key_end = f.rows[0].key_begin + 1;  // at least one row sees a key
      check(f);
    }
  }
}

TEST_P(Bf16Kernels, IndicesOutsideThePoolAreNoKeys) {
  for (const std::int64_t rows : {16, 40}) {
    Options o;
    o.rank = 256;
    o.rope = 64;
    o.rows = rows;
    o.keys = 300;
    o.sparse = true;
    Fixture f(o);
    for (std::int64_t j = 0; j < o.keys; ++j) {
      if (f.uniform(3) == 0 || (j >= 128 && j < 256)) f.exists[static_cast<std::size_t>(j)] = false;
    }
    check(f);
    f.exists.assign(f.exists.size(), false);
    check(f);
  }
}

TEST_P(Bf16Kernels, RowsWithoutKeysAreEmpty) {
  Options o;
  o.rows = 37;
  o.rank = 48;
  o.rope = 32;
  o.keys = 140;
  Fixture f(o);
  for (std::int64_t i = 0; i < o.rows; ++i) {
    if (i % 3 == 0 || i >= 32) f.rows[static_cast<std::size_t>(i)].key_end = 0;
  }
  check(f);
}

TEST_P(Bf16Kernels, InvisiblePoisonChangesNoBit) {
  for (const KvFormat format : {KvFormat::kBF16, KvFormat::kE4M3}) {
    Options o;
    o.rows = 20;
    o.rank = 48;
    o.rope = 16;
    o.keys = 200;
    o.kv_format = format;
    Fixture f(o);
    // Rows 0, 2, .. see everything but the last keys, rows 1, 3, .. the poisoned ones too.
    for (std::int64_t i = 0; i < o.rows; i += 2) f.rows[static_cast<std::size_t>(i)].key_end = 150;
    const Output clean = run_all(kernel, f);
    expect_close(clean, reference(f));
    for (const float poison : {kNan, kInf, -kInf}) {
      if (format == KvFormat::kE4M3 && !std::isnan(poison)) continue;  // e4m3 has no infinity
      for (const std::int64_t where : {std::int64_t{0}, o.rank - 1, f.dim - 1}) {
        Fixture dirty = f;
        for (const std::int64_t j : {150, 151, 163, 199}) dirty.key(j)[where] = poison;
        const Output output = run_all(kernel, dirty);
        for (std::int64_t i = 0; i < o.rows; ++i) {
          if (i % 2 == 0) {
            expect_same_row(output, i, clean, i, o.rank);
          } else if (std::isnan(poison)) {
            EXPECT_TRUE(std::isnan(output.out[static_cast<std::size_t>(i * o.rank)]));
          }
        }
      }
    }
  }
}

TEST_P(Bf16Kernels, ASoftCapMakesInfiniteKeysCount) {
  // An infinite key has the finite score cap; the row that sees it keeps its bits whoever else is
  // in the split, and only the infinite dim of its result is infinite.
  Options o;
  o.rows = 20;
  o.rank = 48;
  o.rope = 16;
  o.keys = kernel.key_tile;
  o.soft_cap = 3.0F;
  Fixture f(o);
  for (std::int64_t i = 0; i < o.rows; ++i) f.query(i)[33] = 1.0F;
  f.key(70)[33] = kInf;
  const Output alone = run_all(kernel, f);
  Fixture finite = f;
  finite.key(70)[33] = 1e30F;  // the same score
  const Reference expected = reference(finite);
  for (std::int64_t i = 0; i < o.rows; ++i) {
    for (std::int64_t d = 0; d < o.rank; ++d) {
      const auto at = static_cast<std::size_t>(i * o.rank + d);
      if (d == 33) {
        EXPECT_EQ(alone.out[at], kInf);
      } else {
        EXPECT_NEAR(static_cast<double>(alone.out[at]), expected.out[at], 5e-3);
      }
    }
  }
  for (std::int64_t i = 0; i < o.rows; i += 2) f.rows[static_cast<std::size_t>(i)].key_end = 70;
  const Output mixed = run_all(kernel, f);
  for (std::int64_t i = 1; i < o.rows; i += 2) expect_same_row(mixed, i, alone, i, o.rank);
}

TEST_P(Bf16Kernels, SoftCapAlibiAndAnyScaleMatch) {
  const float caps[] = {0.0F, 2.0F, 50.0F, 0.0F, 1.0F, 0.0F, 3e3F};
  const bool alibi[] = {true, false, true, false, false, false, false};
  const float scales[] = {0.05F, 0.2F, 0.5F, -0.1F, -0.3F, 1e-30F, 0.05F};
  for (int n = 0; n < 7; ++n) {
    for (const std::int64_t rows : {20, 48}) {
      Options o;
      o.rows = rows;
      o.rank = 256;
      o.rope = 64;
      o.keys = 200;
      o.soft_cap = caps[n];
      o.alibi = alibi[n];
      o.scale = scales[n];
      o.cp = {2, 1, 3};
      o.seed = static_cast<unsigned>(n);
      SCOPED_TRACE(n);
      Fixture f(o);
      for (std::int64_t i = 0; i < rows; i += 5) f.rows[static_cast<std::size_t>(i)].key_end = 130;
      check(f);
    }
  }
}

TEST_P(Bf16Kernels, RowBitsDependOnTheRowAlone) {
  for (const bool special : {false, true}) {
    Options o;
    o.rows = 70;
    o.rank = 48;
    o.rope = 32;
    o.keys = 3 * kernel.key_tile + 50;
    o.soft_cap = special ? 5.0F : 0.0F;
    o.alibi = special;
    Fixture f(o);
    for (std::int64_t i = 0; i < o.rows; ++i) {
      SplitRow& row = f.rows[static_cast<std::size_t>(i)];
      row.key_begin = i % 2 == 0 ? 0 : f.uniform(kernel.key_tile * 2);
      row.key_end = row.key_begin + 1 + f.uniform(o.keys - row.key_begin);
    }
    const Output all = run_all(kernel, f);
    expect_close(all, reference(f));
    for (std::int64_t i = 0; i < o.rows; i += 3) {
      const Output alone = run_rows(kernel, f, i, 1, 0, o.keys);
      expect_same_row(all, i, alone, 0, o.rank);
      const std::int64_t count = std::min<std::int64_t>(o.rows - i, 1 + i % 50);
      const Output some = run_rows(kernel, f, i, count, 0, o.keys);
      expect_same_row(all, i, some, 0, o.rank);
    }
    const Output again = run_all(kernel, f);
    EXPECT_EQ(0, std::memcmp(all.out.data(), again.out.data(), all.out.size() * 4));
    EXPECT_EQ(0, std::memcmp(all.lse.data(), again.lse.data(), all.lse.size() * 4));
  }
}

TEST_P(Bf16Kernels, SplitsMergeToTheWhole) {
  Options o;
  o.rows = 18;
  o.rank = 48;
  o.rope = 16;
  o.keys = 3 * kernel.key_tile + 21;
  Fixture f(o);
  const std::int64_t cut = 2 * kernel.key_tile;
  const Output left = run_rows(kernel, f, 0, o.rows, 0, cut);
  const Output right = run_rows(kernel, f, 0, o.rows, cut, o.keys);
  Output merged = left;
  for (std::int64_t i = 0; i < o.rows; ++i) {
    const auto row = static_cast<std::size_t>(i);
    const auto weights = merge_weights(left.lse[row], right.lse[row]);
    merged.lse[row] = weights.lse;
    for (std::int64_t d = 0; d < o.rank; ++d) {
      const auto at = static_cast<std::size_t>(i * o.rank + d);
      merged.out[at] = weights.weight_a * left.out[at] + weights.weight_b * right.out[at];
    }
  }
  expect_close(merged, reference(f));
}

TEST_P(Bf16Kernels, HugeScoresMatch) {
  for (const float size : {1e4F, -1e4F}) {
    Options o;
    o.rows = 16;
    o.keys = 260;
    o.scale = 1.0F;
    Fixture f(o);
    // q . k = size + a small part: large common products, and differences that softmax resolves.
    for (std::int64_t i = 0; i < o.rows; ++i) {
      for (std::int64_t d = 0; d < f.dim; ++d) f.query(i)[d] = d < 64 ? 16.0F : 0.0F;
    }
    for (std::int64_t j = 0; j < o.keys; ++j) {
      for (std::int64_t d = 0; d < 64; ++d) {
        f.key(j)[d] = Fixture::round_to(DType::kBF16, size / 1024.0F);
      }
      f.key(j)[0] += static_cast<float>(j % 5) / 16.0F;
    }
    check(f);
  }
  Options wide;  // independent scores of deviation 1e4
  wide.rows = 33;
  wide.scale = 1e4F / std::sqrt(576.0F);
  Fixture f(wide);
  const Output output = run_all(kernel, f);
  for (std::int64_t i = 0; i < wide.rows; ++i) {
    EXPECT_TRUE(std::isfinite(output.lse[static_cast<std::size_t>(i)]));
  }
  expect_close(output, reference(f));
}

TEST_P(Bf16Kernels, ADominantKeyAnywhereIsReturned) {
  for (const std::int64_t position : {0, 1, 31, 32, 127, 128, 200, 255, 259}) {
    Options o;
    o.rows = 17;
    o.rank = 48;
    o.rope = 16;
    o.keys = 260;
    o.scale = 1.0F;
    Fixture f(o);
    for (std::int64_t i = 0; i < o.rows; ++i) f.query(i)[0] = 32.0F;
    for (std::int64_t j = 0; j < o.keys; ++j) f.key(j)[0] = j == position ? 16.0F : -16.0F;
    check(f);
    const Output output = run_all(kernel, f);
    EXPECT_EQ(output.out[0], 16.0F);
    EXPECT_EQ(output.out[5], f.key(position)[5]);
  }
}

TEST_P(Bf16Kernels, EqualScoresAverage) {
  Options o;
  o.rows = 32;
  o.keys = 1000;
  Fixture f(o);
  std::fill(f.q.begin(), f.q.end(), 0.0F);
  check(f);
}

TEST_P(Bf16Kernels, LongContextsKeepTheirAccuracy) {
  for (const bool equal : {true, false}) {
    Options o;
    o.rows = 6;
    o.rank = 16;
    o.rope = 16;
    o.keys = 65536;
    o.page_size = 64;
    Fixture f(o);
    if (equal) std::fill(f.q.begin(), f.q.end(), 0.0F);
    for (std::int64_t j = 0; j < o.keys; ++j) {
      for (std::int64_t d = 0; d < o.rank; ++d) {
        f.key(j)[d] = Fixture::round_to(DType::kBF16, f.key(j)[d] + 0.5F);
      }
    }
    check(f);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Bf16Kernels,
                         ::testing::Values("avx512bf16", "amx", "amx_emulated"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace mla::cpu
