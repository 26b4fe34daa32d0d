// Faults that users met: far pages, 32-bit products, page sizes, block tables, strides.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "support/rows.hpp"
#include "support/scene.hpp"
#include "testkit/rng.hpp"

namespace mla {
namespace {

using namespace test;

/// A pool much larger than the memory behind it: only pages that are written exist.
class FarPool {
 public:
  explicit FarPool(std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
    void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base != MAP_FAILED) base_ = static_cast<std::byte*>(base);
  }
  ~FarPool() {
    if (base_ != nullptr) munmap(base_, bytes_);
  }
  FarPool(const FarPool&) = delete;
  FarPool& operator=(const FarPool&) = delete;
  std::byte* base() const { return base_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_;
};

std::int64_t page_bytes(const Laid& laid) {
  return kv_page_bytes(laid.problem);
}

/// Moves page `from` of a laid scene to page id `to` of the far pool, in every table entry.
void move_page(Laid& laid, const FarPool& pool, std::int32_t from, std::int32_t to) {
  std::memcpy(pool.base() + to * page_bytes(laid), laid.kv.data() + from * page_bytes(laid),
              static_cast<std::size_t>(page_bytes(laid)));
  auto* table = laid.table.as<std::int32_t>();
  for (std::size_t i = 0; i < laid.table.size() / 4; ++i) {
    if (table[i] == from) table[i] = to;
  }
}

void use_pool(Laid& laid, const FarPool& pool, std::int64_t num_pages) {
  laid.tensors.kv_cache.data = pool.base();
  laid.tensors.kv_cache.shape[0] = num_pages;
}

TEST(Faults, B15_PagesBeyondTwoBillionElementsAreFound) {
  // Pages 7767 and 7768 of 480 tokens straddle 2^31 elements.
  Scene scene = random_scene(shape(2, 480), {480, 480});
  scene.requests[0].pages = {0};
  scene.requests[1].pages = {1};
  scene.extra_pages = 0;
  const FarPool pool(std::int64_t{7769} * 480 * 576 * 2);
  ASSERT_NE(pool.base(), nullptr);
  for_each_row(scene, [&](const std::string& row) {
    Laid near = lay_out(scene);
    const Output expected = run_laid(near, row);
    expect_right(scene, expected);
    Laid far = lay_out(scene);
    move_page(far, pool, 1, 7768);
    move_page(far, pool, 0, 7767);
    use_pool(far, pool, 7769);
    EXPECT_TRUE(same_bits(run_laid(far, row), expected));
  });
}

TEST(Faults, B16_AFarSlotOfAnFP8PoolEqualsANearOne) {
  constexpr std::int32_t kSlot = 7456600;
  constexpr std::int64_t kPoolTokens = 8000000;
  for (const std::int32_t page_size : {1, 8}) {
    Scene scene = random_scene(shape(3, page_size, KvFormat::kE4M3), {128});
    scene.extra_pages = 0;
    scene.requests[0].pages.resize(static_cast<std::size_t>(128 / page_size));
    std::iota(scene.requests[0].pages.begin(), scene.requests[0].pages.end(), 0);
    const FarPool pool(kPoolTokens * 576);
    ASSERT_NE(pool.base(), nullptr);
    for_each_row(scene, [&](const std::string& row) {
      Laid near = lay_out(scene);
      const Output expected = run_laid(near, row);
      expect_right(scene, expected);
      Laid far = lay_out(scene);
      for (std::int32_t p = 128 / page_size - 1; p >= 0; --p)
        move_page(far, pool, p, kSlot / page_size + p);
      use_pool(far, pool, kPoolTokens / page_size);
      EXPECT_TRUE(same_bits(run_laid(far, row), expected));
    });
  }
}

TEST(Faults, B16_AFarSlotInAnIndexListEqualsANearOne) {
  constexpr std::int32_t kSlot = 7456600;
  Scene scene = random_scene(shape(3, 8, KvFormat::kE4M3), {128});
  scene.problem.num_indices = 128;
  scene.extra_pages = 0;
  scene.requests[0].pages.resize(16);
  std::iota(scene.requests[0].pages.begin(), scene.requests[0].pages.end(), 0);
  scene.requests[0].indices.resize(1);
  for (std::int64_t j = 0; j < 128; ++j) scene.requests[0].indices[0].push_back(127 - j);
  const FarPool pool(std::int64_t{8000000} * 576);
  ASSERT_NE(pool.base(), nullptr);
  for_each_row(scene, [&](const std::string& row) {
    Laid near = lay_out(scene);
    const Output expected = run_laid(near, row);
    expect_right(scene, expected);
    Laid far = lay_out(scene);
    std::memcpy(pool.base() + std::int64_t{kSlot} * 576, far.kv.data(), 128 * 576);
    for (std::size_t i = 0; i < 128; ++i) far.indices.as<std::int32_t>()[i] += kSlot;
    use_pool(far, pool, 1000000);
    EXPECT_TRUE(same_bits(run_laid(far, row), expected));
  });
}

TEST(Faults, B18_LargePageIdsGiveTheOutputOfSmallOnes) {
  Scene scene = random_scene(shape(2), {64});
  scene.requests[0].pages = {1};
  const FarPool pool((std::int64_t{1 << 17} + 1) * 64 * 576 * 2);
  ASSERT_NE(pool.base(), nullptr);
  for_each_row(scene, [&](const std::string& row) {
    const Output expected = decode(scene, row);
    expect_right(scene, expected);
    for (const std::int32_t page : {1, 1 << 15, 1 << 16, 1 << 17}) {
      Laid laid = lay_out(scene);
      move_page(laid, pool, 1, page);
      use_pool(laid, pool, (1 << 17) + 1);
      EXPECT_TRUE(same_bits(run_laid(laid, row), expected)) << "page " << page;
    }
  });
}

/// The same logical data on pages of each size: one result, to the bit.
void expect_page_size_is_irrelevant(Scene scene, const std::vector<std::int64_t>& page_sizes) {
  const Exact right = exact(scene);
  for_each_row(scene, [&](const std::string& row) {
    Output first;
    for (const std::int64_t page_size : page_sizes) {
      scene.problem.page_size = page_size;
      const Output output = decode(scene, row);
      if (page_size == page_sizes[0]) {
        expect_right(scene, output, right);
        first = output;
      }
      EXPECT_TRUE(same_bits(output, first)) << "page size " << page_size;
    }
  });
}

TEST(Faults, B95_PageSizeIsIrrelevant) {
  expect_page_size_is_irrelevant(random_scene(shape(16), {1, 63, 64, 65, 130}),
                                 {64, 1, 2, 16, 32, 128});
  expect_page_size_is_irrelevant(
      random_scene(shape(3, 64, KvFormat::kFp8DsMla), {1, 63, 64, 65, 130}),
      {64, 1, 2, 16, 32, 128});
}

TEST(Faults, B96_PagesOfOneTokenAreRight) {
  for (const KvFormat kv : {KvFormat::kBF16, KvFormat::kE4M3}) {
    expect_page_size_is_irrelevant(random_scene(shape(16, 1, kv), {1, 2, 3}), {1, 2, 4});
  }
}

TEST(Faults, B97_ManagerBlocksExpandToPages) {
  Scene scene = random_scene(shape(4, 16), {160});
  scene.extra_pages = 12;
  const Output flat = decode(scene, "cpu_reference");
  scene.requests[0].pages = {15, 16, 17, 18, 19, 0, 1, 2, 3, 4};  // blocks 3 and 0 of 5 pages
  for_each_row(scene, [&](const std::string& row) {
    const Output output = decode(scene, row);
    expect_right(scene, output);
    if (row == "cpu_reference") {
      EXPECT_TRUE(same_bits(output, flat));
    }
  });
}

TEST(Faults, B98_LargePagesEqualSmallOnes) {
  expect_page_size_is_irrelevant(random_scene(shape(2), {100, 129, 257, 1000}),
                                 {64, 128, 192, 256, 512});
}

TEST(Faults, B99_OddTableWidthsAreAccepted) {
  Scene scene = random_scene(shape(1, 32), {9416});
  scene.extra_columns = 0;
  ASSERT_EQ(lay_out(scene).tensors.block_table.shape[1], 295);
  for_each_row(scene, [&](const std::string& row) { expect_right(scene, decode(scene, row)); });
}

TEST(Faults, B100_TheLastTableColumnIsReadAndItsAbsenceRefused) {
  DecodeProblem problem = shape(1, 4);
  problem.kv_lora_rank = 64;
  problem.qk_rope_head_dim = 16;
  Scene scene = random_scene(problem, {1876 * 4}, {7});
  scene.extra_columns = 0;
  for_each_row(scene, [&](const std::string& row) {
    Laid laid = lay_out(scene);
    ASSERT_EQ(laid.tensors.block_table.shape[1], 1876);
    expect_right(scene, run_laid(laid, row));
    laid.tensors.block_table.shape[1] = 1875;
    const Result<DecodePlan> made = plan(laid.problem, forced(row));
    ASSERT_TRUE(made.ok());
    std::vector<double> workspace(made->workspace_bytes() / 8 + 1);
    EXPECT_TRUE(refused(
        run(*made, laid.tensors, workspace.data(), workspace.size() * 8),
        StatusCode::kInvalidArgument,
        "run: block_table width: found 1875, needed at least 1876 pages for seq_lens[0] = 7504"));
  });
}

TEST(Faults, B101_ATableNarrowerThanThePool) {
  Scene scene = random_scene(shape(4), {150});
  scene.requests[0].pages = {999, 0, 500};
  scene.extra_columns = 0;
  for_each_row(scene, [&](const std::string& row) {
    Laid laid = lay_out(scene);
    ASSERT_EQ(laid.tensors.kv_cache.shape[0], 1000);
    ASSERT_EQ(laid.tensors.block_table.shape[1], 3);
    expect_right(scene, run_laid(laid, row));
  });
}

TEST(Faults, B102_ScatteredPagesEqualContiguousOnes) {
  Scene scene = random_scene(shape(16, 16), {70, 5, 130});
  std::vector<std::int32_t> permutation(4096);
  std::iota(permutation.begin(), permutation.end(), 0);
  testkit::Rng rng(3);
  for (std::size_t i = 4095; i > 0; --i) {
    std::swap(permutation[i],
              permutation[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(i)))]);
  }
  for_each_row(scene, [&](const std::string& row) {
    Output outputs[2];
    for (int scattered = 0; scattered < 2; ++scattered) {
      std::int32_t next = 0;
      for (Request& request : scene.requests) {
        request.pages.clear();
        const std::int64_t pages = (static_cast<std::int64_t>(request.keys.size()) / 576 + 15) / 16;
        for (std::int64_t p = 0; p < pages; ++p, ++next) {
          request.pages.push_back(scattered != 0 ? permutation[static_cast<std::size_t>(next)]
                                                 : next);
        }
      }
      outputs[scattered] = decode(scene, row);
    }
    expect_right(scene, outputs[0]);
    EXPECT_TRUE(same_bits(outputs[0], outputs[1]));
  });
}

TEST(Faults, B104_SlicesOfLargerTensorsAreRight) {
  const Scene scene = random_scene(shape(5, 16), {70, 33}, {2});
  for_each_row(scene, [&](const std::string& row) {
    Laid plain = lay_out(scene);
    const Output expected = run_laid(plain, row);
    expect_right(scene, expected);
    Laid laid = lay_out(scene);
    // q_nope and q_pe are slices of one [T,H,576] tensor.
    laid.tensors.q_nope = laid.tensors.q_pe = laid.tensors.q;
    laid.tensors.q = {};
    laid.tensors.q_nope.shape[2] = 512;
    laid.tensors.q_pe.shape[2] = 64;
    laid.tensors.q_pe.data = laid.q.data() + 512 * 2;
    EXPECT_TRUE(same_bits(run_laid(laid, row), expected));
    // The cache is layer 2 of 3 of a pool [pages, 3, 16, 576], with rows 600 apart.
    const std::int64_t pages = laid.tensors.kv_cache.shape[0];
    Buffer pool(static_cast<std::size_t>(pages * 3 * 16 * 600 * 2), 0xFF);
    for (std::int64_t page = 0; page < pages; ++page) {
      for (std::int64_t slot = 0; slot < 16; ++slot) {
        std::memcpy(pool.data() + ((page * 3 + 2) * 16 + slot) * 1200,
                    laid.kv.data() + (page * 16 + slot) * 1152, 1152);
      }
    }
    laid.tensors.kv_cache.data = pool.data() + std::int64_t{2} * 16 * 1200;
    laid.tensors.kv_cache.stride[0] = 3 * 16 * 600;
    laid.tensors.kv_cache.stride[1] = 600;
    EXPECT_TRUE(same_bits(run_laid(laid, row), expected));
  });
}

TEST(Faults, B144_EveryPageSizeGivesTheSameOutput) {
  expect_page_size_is_irrelevant(random_scene(shape(16, 64, KvFormat::kE4M3), {77, 200}),
                                 {64, 1, 4, 16});
}

}  // namespace
}  // namespace mla
