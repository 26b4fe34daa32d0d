// Batch files: what write_batch wrote comes back, hand-made files mean what the format says, and
// everything else is refused by name.
#include <sys/resource.h>

#include <cmath>
#include <functional>
#include <map>

#include "io/batch_file.hpp"
#include "io_test_support.hpp"

namespace mla::io::test {
namespace {

/// A small batch that owns its arrays: 2 requests, 3 tokens, 2 heads, L = 4, R = 2, pages of 2.
struct Sample {
  static constexpr std::int64_t kTokens = 3, kHeads = 2, kLatent = 4, kRope = 2, kWidth = 6;
  static constexpr std::int64_t kPages = 4, kPageSize = 2;

  std::vector<std::uint16_t> q = numbers(kTokens * kHeads * kWidth, 1);
  std::vector<std::uint16_t> q_nope = numbers(kTokens * kHeads * kLatent, 2);
  std::vector<std::uint16_t> q_pe = numbers(kTokens * kHeads * kRope, 3);
  std::vector<std::uint16_t> kv = numbers(kPages * kPageSize * kWidth, 4);
  std::vector<std::int32_t> block_table = {3, 1, 0, 77};  // the last column of row 1 is not read
  std::vector<std::int32_t> seq_lens = {4, 1};
  std::vector<std::int32_t> query_start_loc = {0, 2, 3};
  std::vector<std::int32_t> global = {9, 5};
  std::vector<std::int32_t> indices = {0, 7, -1, 2147483647, 1, 1};
  std::vector<float> sinks = {0.5F, -INFINITY};
  std::vector<float> slopes = {0.25F, 1.0F};

  DecodeProblem problem;
  DecodeTensors tensors;

  static std::vector<std::uint16_t> numbers(std::int64_t count, unsigned seed) {
    std::vector<std::uint16_t> result;
    for (std::int64_t i = 0; i < count; ++i) {
      result.push_back(static_cast<std::uint16_t>(seed * 4099U + static_cast<unsigned>(i) * 31U));
    }
    return result;
  }

  Sample() {
    problem.num_requests = 2;
    problem.num_tokens = kTokens;
    problem.num_heads = kHeads;
    problem.kv_lora_rank = kLatent;
    problem.qk_rope_head_dim = kRope;
    problem.page_size = kPageSize;
    problem.max_seq_len = 4;
    problem.max_query_len = 2;
    tensors.q = TensorView::contiguous(q.data(), DType::kBF16, {kTokens, kHeads, kWidth});
    tensors.kv_cache = TensorView::contiguous(kv.data(), DType::kBF16, {kPages, kPageSize, kWidth});
    tensors.block_table = TensorView::contiguous(block_table.data(), DType::kI32, {2, 2});
    tensors.seq_lens = TensorView::contiguous(seq_lens.data(), DType::kI32, {2});
    tensors.query_start_loc = TensorView::contiguous(query_start_loc.data(), DType::kI32, {3});
    tensors.bmm1_scale = 0.1352337788F;
  }

  Metadata metadata() const {
    return {{"format", "mla-batch-1"},
            {"kv_lora_rank", "4"},
            {"qk_rope_head_dim", "2"},
            {"bmm1_scale", "0.125"}};
  }
  std::map<std::string, TensorView> named() const {
    return {{"q", tensors.q},
            {"kv_cache", tensors.kv_cache},
            {"block_table", tensors.block_table},
            {"seq_lens", tensors.seq_lens},
            {"query_start_loc", tensors.query_start_loc}};
  }
};

bool same_values(const TensorView& a, const TensorView& b) {
  if (a.dtype != b.dtype || a.rank != b.rank) return false;
  std::int64_t count = 1;
  for (int axis = 0; axis < a.rank; ++axis) {
    if (a.shape[axis] != b.shape[axis]) return false;
    count *= a.shape[axis];
  }
  const std::size_t width = dtype_bytes(a.dtype);
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t rest = i, at_a = 0, at_b = 0;
    for (int axis = a.rank - 1; axis >= 0; --axis) {
      at_a += rest % a.shape[axis] * a.stride[axis];
      at_b += rest % a.shape[axis] * b.stride[axis];
      rest /= a.shape[axis];
    }
    if (std::memcmp(static_cast<const std::byte*>(a.data) + at_a * static_cast<std::int64_t>(width),
                    static_cast<const std::byte*>(b.data) + at_b * static_cast<std::int64_t>(width),
                    width) != 0) {
      return false;
    }
  }
  return true;
}

class BatchFile : public FolderTest {
 protected:
  using Edit = std::function<void(std::map<std::string, TensorView>&, Metadata&)>;

  /// Writes the sample with an edit and reads it back.
  Result<Batch> edited(const Edit& edit) {
    std::map<std::string, TensorView> named = sample.named();
    Metadata metadata = sample.metadata();
    edit(named, metadata);
    std::vector<NamedTensor> tensors;
    for (const auto& [name, view] : named) tensors.push_back({name, view});
    throw_if_error(write_safetensors(path("batch"), tensors, metadata));
    return read_batch(path("batch"));
  }

  ::testing::AssertionResult refused(const std::vector<std::string>& parts, const Edit& edit) {
    std::vector<std::string> all = parts;
    all.insert(all.end(), {"read_batch: ", ": found ", ", needed "});
    return mentions(edited(edit).status(), StatusCode::kInvalidArgument, all);
  }

  Sample sample;
};

TEST_F(BatchFile, EveryFieldSurvivesARoundTrip) {
  DecodeProblem& problem = sample.problem;
  DecodeTensors& tensors = sample.tensors;
  problem.causal = false;
  problem.logits_soft_cap = 30.1F;
  problem.sliding_window = 128;
  problem.cp_world = 4;
  problem.cp_rank = 3;
  problem.cp_interleave = 16;
  problem.lse_base = LseBase::kTwo;
  problem.out_dtype = DType::kF32;
  tensors.causal_seqlens_kv_global = TensorView::contiguous(sample.global.data(), DType::kI32, {2});
  tensors.sinks = TensorView::contiguous(sample.sinks.data(), DType::kF32, {2});
  tensors.alibi_slopes = TensorView::contiguous(sample.slopes.data(), DType::kF32, {2});
  const float bmm2 = 1e-7F;
  tensors.bmm2_scale = Scale(&bmm2);
  ASSERT_TRUE(write_batch(path("x"), problem, tensors).ok());
  const Result<Batch> batch = read_batch(path("x"));
  ASSERT_TRUE(batch.ok()) << batch.status().message();
  EXPECT_TRUE(batch->ignored.empty());

  const DecodeProblem& got = batch->problem;
  EXPECT_EQ(got.num_requests, 2);
  EXPECT_EQ(got.num_tokens, 3);
  EXPECT_EQ(got.num_heads, 2);
  EXPECT_EQ(got.kv_lora_rank, 4);
  EXPECT_EQ(got.qk_rope_head_dim, 2);
  EXPECT_EQ(got.page_size, 2);
  EXPECT_EQ(got.max_seq_len, 4);
  EXPECT_EQ(got.max_query_len, 2);
  EXPECT_EQ(got.num_indices, 0);
  EXPECT_EQ(got.q_dtype, DType::kBF16);
  EXPECT_EQ(got.kv_format, KvFormat::kBF16);
  EXPECT_EQ(got.out_dtype, DType::kF32);
  EXPECT_FALSE(got.causal);
  EXPECT_EQ(got.logits_soft_cap, 30.1F);
  EXPECT_EQ(got.sliding_window, 128);
  EXPECT_TRUE(got.uses_sinks);
  EXPECT_TRUE(got.uses_alibi_slopes);
  EXPECT_EQ(got.cp_world, 4);
  EXPECT_EQ(got.cp_rank, 3);
  EXPECT_EQ(got.cp_interleave, 16);
  EXPECT_EQ(got.lse_base, LseBase::kTwo);
  EXPECT_EQ(batch->tensors.bmm1_scale.value, 0.1352337788F);
  EXPECT_EQ(batch->tensors.bmm2_scale.value, 1e-7F);
  EXPECT_TRUE(same_values(batch->tensors.q, tensors.q));
  EXPECT_TRUE(same_values(batch->tensors.kv_cache, tensors.kv_cache));
  EXPECT_TRUE(same_values(batch->tensors.block_table, tensors.block_table));
  EXPECT_TRUE(same_values(batch->tensors.seq_lens, tensors.seq_lens));
  EXPECT_TRUE(same_values(batch->tensors.query_start_loc, tensors.query_start_loc));
  EXPECT_TRUE(
      same_values(batch->tensors.causal_seqlens_kv_global, tensors.causal_seqlens_kv_global));
  EXPECT_TRUE(same_values(batch->tensors.sinks, tensors.sinks));
  EXPECT_TRUE(same_values(batch->tensors.alibi_slopes, tensors.alibi_slopes));
  EXPECT_FALSE(batch->tensors.out.given());
  EXPECT_FALSE(batch->tensors.lse.given());

  // Writing what was read gives the same bytes.
  ASSERT_TRUE(write_batch(path("y"), batch->problem, batch->tensors).ok());
  EXPECT_EQ(read_bytes(path("x")), read_bytes(path("y")));
}

TEST_F(BatchFile, ScalesSurviveToTheLastBit) {
  for (float scale :
       {0.1F, 1.0F / 3.0F, 1.17549435e-38F, 1e-45F, 3.40282347e38F, -0.0F, 16777217.0F}) {
    sample.tensors.bmm1_scale = scale;
    ASSERT_TRUE(write_batch(path("x"), sample.problem, sample.tensors).ok());
    const Result<Batch> batch = read_batch(path("x"));
    ASSERT_TRUE(batch.ok()) << batch.status().message();
    EXPECT_EQ(std::memcmp(&batch->tensors.bmm1_scale.value, &scale, 4), 0) << scale;
  }
}

TEST_F(BatchFile, AbsentOptionsTakeTheirDefaults) {
  const Result<Batch> batch =
      edited([](auto& tensors, auto&) { tensors.erase("query_start_loc"); });
  ASSERT_TRUE(batch.ok()) << batch.status().message();
  EXPECT_TRUE(batch->problem.causal);
  EXPECT_EQ(batch->problem.cp_world, 1);
  EXPECT_EQ(batch->problem.lse_base, LseBase::kE);
  EXPECT_EQ(batch->problem.out_dtype, DType::kNone);
  EXPECT_EQ(batch->tensors.bmm1_scale.value, 0.125F);
  EXPECT_EQ(batch->tensors.bmm2_scale.value, 1.0F);
  EXPECT_EQ(batch->problem.max_query_len, 2);  // 3 tokens of 2 requests, rounded up
  EXPECT_FALSE(batch->problem.uses_sinks);
}

TEST_F(BatchFile, AQueryInTwoPartsIsRead) {
  sample.tensors.q = {};
  sample.tensors.q_nope = TensorView::contiguous(sample.q_nope.data(), DType::kF16, {3, 2, 4});
  sample.tensors.q_pe = TensorView::contiguous(sample.q_pe.data(), DType::kF16, {3, 2, 2});
  ASSERT_TRUE(write_batch(path("x"), sample.problem, sample.tensors).ok());
  const Result<Batch> batch = read_batch(path("x"));
  ASSERT_TRUE(batch.ok()) << batch.status().message();
  EXPECT_FALSE(batch->tensors.q.given());
  EXPECT_EQ(batch->problem.q_dtype, DType::kF16);
  EXPECT_EQ(batch->problem.num_heads, 2);
  EXPECT_TRUE(same_values(batch->tensors.q_nope, sample.tensors.q_nope));
  EXPECT_TRUE(same_values(batch->tensors.q_pe, sample.tensors.q_pe));

  const Result<Batch> no_rope = edited([&](auto& tensors, auto& metadata) {
    tensors.erase("q");
    tensors["q_nope"] = sample.tensors.q_nope;
    metadata["qk_rope_head_dim"] = std::string("0");
  });
  EXPECT_TRUE(no_rope.ok()) << no_rope.status().message();
}

TEST_F(BatchFile, SparseBatchesNeedNoLengths) {
  const Result<Batch> batch = edited([&](auto& tensors, auto&) {
    tensors.erase("block_table");
    tensors.erase("seq_lens");
    tensors.erase("query_start_loc");
    tensors["indices"] = TensorView::contiguous(sample.indices.data(), DType::kI32, {3, 2});
  });
  ASSERT_TRUE(batch.ok()) << batch.status().message();
  EXPECT_EQ(batch->problem.num_indices, 2);
  EXPECT_EQ(batch->problem.num_requests, 3);
  EXPECT_EQ(batch->problem.max_seq_len, 0);
  EXPECT_TRUE(refused({"tensor 'indices'", "I32 [3,0]", "K from 1"}, [&](auto& tensors, auto&) {
    tensors["indices"] = TensorView::contiguous(sample.indices.data(), DType::kI32, {3, 0});
  }));
}

TEST_F(BatchFile, EachCacheFormatIsRecognised) {
  const std::vector<std::byte> bytes(2 * 2 * 656, std::byte{1});
  const auto format = [&](DType dtype, std::int64_t width) {
    return edited([&](auto& tensors, auto&) {
             tensors["kv_cache"] = TensorView::contiguous(bytes.data(), dtype, {2, 2, width});
           })
        ->problem.kv_format;
  };
  EXPECT_EQ(format(DType::kBF16, 6), KvFormat::kBF16);
  EXPECT_EQ(format(DType::kF16, 6), KvFormat::kF16);
  EXPECT_EQ(format(DType::kE4M3, 6), KvFormat::kE4M3);
  EXPECT_EQ(format(DType::kU8, 656), KvFormat::kFp8DsMla);
}

TEST_F(BatchFile, ALayerOfACrossLayerCacheIsAStridedView) {
  // [pages 2, layers 3, page_size 2, D 6] of the sample's kind of numbers.
  const std::vector<std::uint16_t> kv = Sample::numbers(2 * 3 * 2 * 6, 9);
  for (std::int64_t layer = 0; layer < 3; ++layer) {
    const Result<Batch> batch = edited([&](auto& tensors, auto& metadata) {
      tensors["kv_cache"] = TensorView::contiguous(kv.data(), DType::kBF16, {2, 3, 2, 6});
      metadata["kv_layer"] = std::to_string(layer);
    });
    ASSERT_TRUE(batch.ok()) << batch.status().message();
    const TensorView& cache = batch->tensors.kv_cache;
    ASSERT_EQ(cache.rank, 3);
    EXPECT_EQ(cache.shape[0], 2);
    EXPECT_EQ(cache.shape[1], 2);
    EXPECT_EQ(cache.shape[2], 6);
    EXPECT_EQ(cache.stride[0], 36);
    EXPECT_EQ(cache.stride[1], 6);
    EXPECT_EQ(cache.stride[2], 1);
    TensorView expected = TensorView::contiguous(kv.data() + layer * 12, DType::kBF16, {2, 2, 6});
    expected.stride[0] = 36;
    EXPECT_TRUE(same_values(cache, expected));
    // A strided cache is written contiguous.
    ASSERT_TRUE(write_batch(path("y"), batch->problem, batch->tensors).ok());
    EXPECT_TRUE(same_values(read_batch(path("y"))->tensors.kv_cache, expected));
  }
  const auto with = [&](const char* layer) {
    return [&kv, layer](auto& tensors, auto& metadata) {
      tensors["kv_cache"] = TensorView::contiguous(kv.data(), DType::kBF16, {2, 3, 2, 6});
      if (layer != nullptr) metadata["kv_layer"] = layer;
    };
  };
  EXPECT_TRUE(refused({"'kv_layer'", "found no such key"}, with(nullptr)));
  EXPECT_TRUE(refused({"'kv_layer'", "found '3'", "from 0 to 2"}, with("3")));
  EXPECT_TRUE(refused({"'kv_layer'", "found '-1'", "from 0 to 2"}, with("-1")));
  EXPECT_TRUE(refused({"'kv_layer'", "a kv_cache of 3 axes"},
                      [](auto&, auto& metadata) { metadata["kv_layer"] = std::string("0"); }));
}

TEST_F(BatchFile, PagesArePlacedInAPoolOfNaN) {
  const std::vector<std::int32_t> ids = {5, 0, 9, 2};
  const Result<Batch> batch = edited([&](auto& tensors, auto& metadata) {
    tensors["kv_page_ids"] = TensorView::contiguous(ids.data(), DType::kI32, {4});
    metadata["kv_pool_pages"] = "11";
  });
  ASSERT_TRUE(batch.ok()) << batch.status().message();
  const TensorView& cache = batch->tensors.kv_cache;
  EXPECT_EQ(cache.shape[0], 11);
  for (std::int64_t page = 0; page < 11; ++page) {
    const auto* got = static_cast<const std::uint16_t*>(cache.data) + page * cache.stride[0];
    const auto file_page = std::find(ids.begin(), ids.end(), page) - ids.begin();
    for (std::int64_t i = 0; i < 12; ++i) {
      const bool owned = file_page < 4;
      const std::size_t at = static_cast<std::size_t>(file_page * 12 + i);
      EXPECT_EQ(got[i], owned ? sample.kv[at] : 0xFFFF) << page;
    }
  }
}

TEST_F(BatchFile, APageSevenMillionPagesAwayCostsAlmostNoMemory) {
  // [2 pages, 1 token, 576] bf16 in a pool of 8.6 GB.
  const std::vector<std::uint16_t> kv = Sample::numbers(2 * 576, 7);
  const std::vector<std::int32_t> ids = {7456600, 12};
  rusage before{}, after{};
  ::getrusage(RUSAGE_SELF, &before);
  const Result<Batch> batch = edited([&](auto& tensors, auto& metadata) {
    tensors["kv_cache"] = TensorView::contiguous(kv.data(), DType::kBF16, {2, 1, 576});
    tensors["kv_page_ids"] = TensorView::contiguous(ids.data(), DType::kI32, {2});
    metadata["kv_pool_pages"] = "7456601";
  });
  ASSERT_TRUE(batch.ok()) << batch.status().message();
  const auto* pool = static_cast<const std::uint16_t*>(batch->tensors.kv_cache.data);
  const std::int64_t far = std::int64_t{7456600} * 576;
  EXPECT_EQ(std::memcmp(pool + far, kv.data(), 1152), 0);
  EXPECT_EQ(std::memcmp(pool + 12 * 576, kv.data() + 576, 1152), 0);
  EXPECT_EQ(pool[far - 1], 0xFFFF);
  EXPECT_EQ(pool[11 * 576 + 575], 0xFFFF);
  EXPECT_EQ(pool[13 * 576], 0xFFFF);
  EXPECT_EQ(pool[0], 0xFFFF);
  EXPECT_EQ(pool[far / 2], 0xFFFF);
  ::getrusage(RUSAGE_SELF, &after);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 256 * 1024);  // KiB

  // The owned pages alone can be written back.
  sample.block_table = {7456600, 0, 12, 0};
  sample.seq_lens = {1, 1};
  DecodeTensors tensors = batch->tensors;
  tensors.block_table = sample.tensors.block_table;
  tensors.seq_lens = sample.tensors.seq_lens;
  ASSERT_TRUE(write_batch(path("y"), batch->problem, tensors, {.only_owned_pages = true}).ok());
  EXPECT_LT(std::filesystem::file_size(path("y")), 8192U);
  const Result<Batch> again = read_batch(path("y"));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->tensors.kv_cache.shape[0], 7456601);
  EXPECT_EQ(std::memcmp(static_cast<const std::uint16_t*>(again->tensors.kv_cache.data) + far,
                        kv.data(), 1152),
            0);
}

TEST_F(BatchFile, PagesOfACrossLayerCacheArePlacedWhole) {
  const std::vector<std::uint16_t> kv = Sample::numbers(1 * 3 * 2 * 6, 9);
  const std::vector<std::int32_t> ids = {2};
  const Result<Batch> batch = edited([&](auto& tensors, auto& metadata) {
    tensors["kv_cache"] = TensorView::contiguous(kv.data(), DType::kBF16, {1, 3, 2, 6});
    tensors["kv_page_ids"] = TensorView::contiguous(ids.data(), DType::kI32, {1});
    metadata["kv_pool_pages"] = std::string("4");
    metadata["kv_layer"] = std::string("1");
  });
  ASSERT_TRUE(batch.ok()) << batch.status().message();
  const TensorView& cache = batch->tensors.kv_cache;
  EXPECT_EQ(cache.shape[0], 4);
  const auto* data = static_cast<const std::uint16_t*>(cache.data);
  EXPECT_EQ(std::memcmp(data + 2 * cache.stride[0], kv.data() + 12, 24), 0);
  EXPECT_EQ(data[cache.stride[0]], 0xFFFF);
}

TEST_F(BatchFile, OnlyOwnedPagesFollowLengthsAndIndices) {
  const auto ids_of = [&] {
    throw_if_error(
        write_batch(path("x"), sample.problem, sample.tensors, {.only_owned_pages = true}));
    const SafetensorsFile file = value_or_throw(SafetensorsFile::open(path("x")));
    const TensorView view = *file.view("kv_page_ids");
    const auto* data = static_cast<const std::int32_t*>(view.data);
    return std::vector<std::int32_t>(data, data + view.shape[0]);
  };
  EXPECT_EQ(ids_of(), (std::vector<std::int32_t>{0, 1, 3}));  // 77 lies past the length
  sample.problem.num_indices = 2;
  sample.tensors.indices = TensorView::contiguous(sample.indices.data(), DType::kI32, {3, 2});
  EXPECT_EQ(ids_of(), (std::vector<std::int32_t>{0, 3}));  // slots 0, 7, 1; -1 and the huge one not
  sample.problem.num_indices = 0;
  sample.tensors.indices = {};
  sample.seq_lens[1] = 3;
  EXPECT_TRUE(
      mentions(write_batch(path("z"), sample.problem, sample.tensors, {.only_owned_pages = true}),
               StatusCode::kInvalidArgument, {"block_table[1,1]", "found 77", "from 0 to 3"}));
  sample.seq_lens[1] = 5;
  EXPECT_TRUE(
      mentions(write_batch(path("z"), sample.problem, sample.tensors, {.only_owned_pages = true}),
               StatusCode::kInvalidArgument, {"block_table row 1", "2 columns", "3 columns"}));
}

TEST_F(BatchFile, PoolsThatCannotBeAreRefused) {
  std::vector<std::int32_t> ids = {5, 0, 9, 2};
  const auto pool = [&](const char* pages, std::int64_t count = 4) {
    return [&ids, pages, count](auto& tensors, auto& metadata) {
      tensors["kv_page_ids"] = TensorView::contiguous(ids.data(), DType::kI32, {count});
      if (pages != nullptr) metadata["kv_pool_pages"] = pages;
    };
  };
  EXPECT_TRUE(refused({"'kv_pool_pages'", "found no such key"}, pool(nullptr)));
  EXPECT_TRUE(refused({"'kv_page_ids'", "found 9", "kv_pool_pages - 1 = 8"}, pool("9")));
  EXPECT_TRUE(refused({"'kv_page_ids'", "found 9", "- 1 = -1"}, pool("0")));
  EXPECT_TRUE(refused({"'kv_pool_pages'", "found '-1'", "from 0 to 2147483647"}, pool("-1")));
  EXPECT_TRUE(refused({"'kv_pool_pages'", "found '2147483648'"}, pool("2147483648")));
  EXPECT_TRUE(refused({"'kv_page_ids'", "found I32 [3]", "needed [4] I32"}, pool("11", 3)));
  EXPECT_TRUE(refused({"'kv_page_ids'", "found no such tensor", "beside kv_pool_pages"},
                      [](auto&, auto& metadata) { metadata["kv_pool_pages"] = "11"; }));
  ids[2] = -3;
  EXPECT_TRUE(refused({"'kv_page_ids'", "found -3", "ids from 0"}, pool("11")));
  ids[2] = 5;
  EXPECT_TRUE(refused({"'kv_page_ids'", "found 5 twice", "each id once"}, pool("11")));
  // 2147483647 pages of 24 bytes fit the address space; pages of 1 MiB do not.
  ids[2] = 9;
  const std::vector<std::uint16_t> wide(std::size_t{1} << 19);
  EXPECT_TRUE(refused(
      {"'kv_pool_pages'", "2147483647 pages of 1048576 bytes", "at most 1099511627776"},
      [&](auto& tensors, auto& metadata) {
        tensors["kv_cache"] = TensorView::contiguous(wide.data(), DType::kBF16, {1, 2, 1 << 18});
        pool("2147483647", 1)(tensors, metadata);
      }));
  EXPECT_TRUE(edited(pool("2147483647")).ok());
}

TEST_F(BatchFile, MetadataIsParsedStrictly) {
  struct Case {
    const char* key;
    const char* value;
    const char* needed;
  };
  const Case cases[] = {
      {"format", "mla-batch-2", "mla-batch-1"},
      {"format", "", "mla-batch-1"},
      {"kv_lora_rank", "0", "from 1"},
      {"kv_lora_rank", "4.0", "an integer"},
      {"kv_lora_rank", " 4", "an integer"},
      {"kv_lora_rank", "4 ", "an integer"},
      {"kv_lora_rank", "+4", "an integer"},
      {"kv_lora_rank", "0x4", "an integer"},
      {"kv_lora_rank", "", "an integer"},
      {"kv_lora_rank", "99999999999999999999", "an integer"},
      {"qk_rope_head_dim", "-1", "from 0"},
      {"bmm1_scale", "nan", "finite"},
      {"bmm1_scale", "inf", "finite"},
      {"bmm1_scale", "-Infinity", "finite"},
      {"bmm1_scale", "1e39", "finite"},
      {"bmm1_scale", "0.1x", "finite"},
      {"bmm1_scale", "0,1", "finite"},
      {"bmm1_scale", "", "finite"},
      {"bmm2_scale", "1.0f", "finite"},
      {"logits_soft_cap", "NaN", "finite"},
      {"causal", "yes", "true or false"},
      {"causal", "TRUE", "true or false"},
      {"causal", "", "true or false"},
      {"cp_world", "0", "from 1"},
      {"cp_rank", "1", "from 0 to 0"},
      {"cp_interleave", "0", "from 1"},
      {"sliding_window", "-1", "from 0"},
      {"sliding_window", "1e3", "an integer"},
      {"lse_base", "10", "e or 2"},
      {"lse_base", "E", "e or 2"},
      {"out_dtype", "F64", "BF16, F16 or F32"},
      {"out_dtype", "F8_E4M3", "BF16, F16 or F32"},
  };
  for (const Case& c : cases) {
    EXPECT_TRUE(refused(
        {std::string("metadata '") + c.key + "'", std::string("found '") + c.value + "'", c.needed},
        [&](auto&, auto& metadata) { metadata[c.key] = c.value; }))
        << c.key << "=" << c.value;
  }
  for (const char* key : {"format", "kv_lora_rank", "qk_rope_head_dim", "bmm1_scale"}) {
    EXPECT_TRUE(refused({std::string("metadata '") + key + "'", "found no such key"},
                        [&](auto&, auto& metadata) { metadata.erase(key); }));
  }
  for (const auto& [value, causal] : {std::pair("true", true), std::pair("False", false),
                                      std::pair("1", true), std::pair("0", false)}) {
    EXPECT_EQ(edited([&, text = value](auto&, auto& m) { m["causal"] = text; })->problem.causal,
              causal);
  }
  EXPECT_EQ(edited([](auto&, auto& m) { m["out_dtype"] = "F32"; })->problem.out_dtype, DType::kF32);
  EXPECT_EQ(edited([](auto&, auto& m) { m["out_dtype"] = "f16"; })->problem.out_dtype, DType::kF16);
}

TEST_F(BatchFile, TensorsOfAnotherTypeOrRankAreRefused) {
  const std::vector<std::byte> zeros(64);
  struct Case {
    const char* name;
    DType dtype;
    std::initializer_list<std::int64_t> shape;
    const char* found;
    const char* needed;
  };
  const Case cases[] = {
      {"q", DType::kF32, {1, 1, 6}, "F32 [1,1,6]", "[T,H,D] BF16"},
      {"q", DType::kBF16, {3, 6}, "BF16 [3,6]", "[T,H,D]"},
      {"kv_cache", DType::kF32, {1, 1, 6}, "F32 [1,1,6]", "[pages,page_size,D]"},
      {"kv_cache", DType::kBF16, {2, 6}, "BF16 [2,6]", "[pages,page_size,D]"},
      {"block_table", DType::kF32, {2, 2}, "F32 [2,2]", "[B,width] I32"},
      {"block_table", DType::kI32, {4}, "I32 [4]", "[B,width] I32"},
      {"seq_lens", DType::kI32, {2, 1}, "I32 [2,1]", "[B] I32"},
      {"query_start_loc", DType::kI32, {}, "I32 []", "[B+1] I32"},
      {"query_start_loc", DType::kI32, {0}, "I32 [0]", "[B+1] I32"},
      {"causal_seqlens_kv_global", DType::kU8, {2}, "U8 [2]", "[B] I32"},
      {"sinks", DType::kBF16, {2}, "BF16 [2]", "[H] F32"},
      {"alibi_slopes", DType::kF32, {2, 1}, "F32 [2,1]", "[H] F32"},
      {"indices", DType::kI32, {3}, "I32 [3]", "[T,K] I32"},
      {"kv_page_ids", DType::kI32, {2, 2}, "I32 [2,2]", "[pages] I32"},
  };
  for (const Case& c : cases) {
    EXPECT_TRUE(refused({std::string("tensor '") + c.name + "'", c.found, c.needed},
                        [&](auto& tensors, auto&) {
                          tensors[c.name] = TensorView::contiguous(zeros.data(), c.dtype, c.shape);
                        }))
        << c.name;
  }
  for (const char* name : {"q", "kv_cache", "block_table", "seq_lens"}) {
    EXPECT_TRUE(refused({std::string("tensor '") + name + "'", "found no such tensor"},
                        [&](auto& tensors, auto&) { tensors.erase(name); }));
  }
  const TensorView nope = TensorView::contiguous(sample.q_nope.data(), DType::kBF16, {3, 2, 4});
  const TensorView pe = TensorView::contiguous(sample.q_pe.data(), DType::kBF16, {3, 2, 2});
  EXPECT_TRUE(refused({"'q_nope'", "it beside 'q'"},
                      [&](auto& tensors, auto&) { tensors["q_nope"] = nope; }));
  EXPECT_TRUE(
      refused({"'q_pe'", "it beside 'q'"}, [&](auto& tensors, auto&) { tensors["q_pe"] = pe; }));
  EXPECT_TRUE(refused({"'q_nope'", "no such tensor"}, [&](auto& tensors, auto&) {
    tensors.erase("q");
    tensors["q_pe"] = pe;
  }));
  EXPECT_TRUE(refused({"'q_pe'", "no such tensor"}, [&](auto& tensors, auto&) {
    tensors.erase("q");
    tensors["q_nope"] = nope;
  }));
  EXPECT_TRUE(refused({"'q_pe'", "it with qk_rope_head_dim 0"}, [&](auto& tensors, auto& metadata) {
    tensors.erase("q");
    tensors["q_nope"] = nope;
    tensors["q_pe"] = pe;
    metadata["qk_rope_head_dim"] = std::string("0");
  }));
}

TEST_F(BatchFile, SixtyFourBitIndicesFromOtherToolsAreRefusedByName) {
  const Bytes file = raw_file(
      R"({"__metadata__":{"format":"mla-batch-1","kv_lora_rank":"2","qk_rope_head_dim":"0",)"
      R"("bmm1_scale":"1"},"q":{"dtype":"BF16","shape":[1,1,2],"data_offsets":[0,4]},)"
      R"("kv_cache":{"dtype":"BF16","shape":[1,1,2],"data_offsets":[4,8]},)"
      R"("block_table":{"dtype":"I64","shape":[1,1],"data_offsets":[8,16]},)"
      R"("seq_lens":{"dtype":"I32","shape":[1],"data_offsets":[16,20]}})",
      20);
  EXPECT_TRUE(mentions(parse_batch(file).status(), StatusCode::kInvalidArgument,
                       {"tensor 'block_table'", "found I64 [1,1]", "needed [B,width] I32"}));
}

TEST_F(BatchFile, UnknownNamesAreKeptButMisspellingsAreRefused) {
  const Result<Batch> batch = edited([&](auto& tensors, auto& metadata) {
    tensors["out"] = sample.tensors.seq_lens;
    tensors["lse"] = sample.tensors.seq_lens;
    metadata["note"] = "made by hand";
    metadata["seed"] = std::string("7");
  });
  ASSERT_TRUE(batch.ok()) << batch.status().message();
  EXPECT_EQ(batch->ignored, (std::vector<std::string>{"tensor 'lse'", "tensor 'out'",
                                                      "metadata 'note'", "metadata 'seed'"}));
  for (const auto& [wrong, right] :
       {std::pair("casual", "causal"), std::pair("bmm2_scales", "bmm2_scale"),
        std::pair("sliding-window", "sliding_window"),
        std::pair("Logits_soft_cap", "logits_soft_cap"), std::pair("cp_wrld", "cp_world"),
        std::pair("lse_bse", "lse_base")}) {
    EXPECT_TRUE(
        refused({std::string("metadata '") + wrong + "'", std::string("needed '") + right + "'"},
                [key = wrong](auto&, auto& metadata) { metadata[key] = std::string("1"); }));
  }
  for (const auto& [wrong, right] :
       {std::pair("sink", "sinks"), std::pair("alibi_slope", "alibi_slopes"),
        std::pair("kv_page_id", "kv_page_ids")}) {
    EXPECT_TRUE(refused(
        {std::string("tensor '") + wrong + "'", std::string("needed '") + right + "'"},
        [&, name = wrong](auto& tensors, auto&) { tensors[name] = sample.tensors.seq_lens; }));
  }
  // Beside the right name it is a note.
  EXPECT_TRUE(edited([](auto&, auto& m) { m["bmm1_scales"] = std::string("x"); }).ok());
}

TEST_F(BatchFile, EmptyBatchesAndPoolsAreRead) {
  const Result<Batch> batch = edited([&](auto& tensors, auto&) {
    tensors["kv_cache"] = TensorView::contiguous(nullptr, DType::kBF16, {0, 16, 6});
    tensors["block_table"] = TensorView::contiguous(nullptr, DType::kI32, {2, 0});
    tensors["seq_lens"] = TensorView::contiguous(sample.query_start_loc.data(), DType::kI32, {2});
  });
  ASSERT_TRUE(batch.ok()) << batch.status().message();
  EXPECT_EQ(batch->tensors.kv_cache.shape[0], 0);
  EXPECT_EQ(batch->tensors.block_table.shape[1], 0);
  EXPECT_EQ(batch->problem.page_size, 16);
  const Result<Batch> none = edited([&](auto& tensors, auto&) {
    tensors["q"] = TensorView::contiguous(nullptr, DType::kBF16, {0, 2, 6});
    tensors["block_table"] = TensorView::contiguous(nullptr, DType::kI32, {0, 2});
    tensors["seq_lens"] = TensorView::contiguous(nullptr, DType::kI32, {0});
    tensors.erase("query_start_loc");
  });
  ASSERT_TRUE(none.ok()) << none.status().message();
  EXPECT_EQ(none->problem.num_requests, 0);
  EXPECT_EQ(none->problem.max_query_len, 1);
}

TEST_F(BatchFile, HostileLengthsDoNotOverflowTheBounds) {
  sample.query_start_loc = {-2147483647 - 1, 2147483647, 0};
  sample.seq_lens = {-5, 2147483647};
  const Result<Batch> batch = edited([](auto&, auto&) {});
  ASSERT_TRUE(batch.ok()) << batch.status().message();
  EXPECT_EQ(batch->problem.max_query_len, 4294967295);
  EXPECT_EQ(batch->problem.max_seq_len, 2147483647);
}

TEST_F(BatchFile, EveryTruncationIsRefusedAndEveryBitFlipAnswered) {
  const std::vector<std::int32_t> ids = {5, 0, 9, 2};
  ASSERT_TRUE(edited([&](auto& tensors, auto& metadata) {
                tensors["kv_page_ids"] = TensorView::contiguous(ids.data(), DType::kI32, {4});
                metadata["kv_pool_pages"] = "11";
              }).ok());
  const Bytes good = read_bytes(path("batch"));
  for (std::size_t size = 0; size < good.size(); ++size) {
    const Bytes cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_EQ(parse_batch(cut).status().code(), StatusCode::kInvalidArgument) << size;
  }
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    Bytes file = good;
    file[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    const Result<Batch> batch = parse_batch(file, "memory", {.max_pool_bytes = 1 << 20});
    if (!batch.ok()) {
      EXPECT_NE(batch.status().message().find(", needed "), std::string::npos);
    }
  }
}

TEST_F(BatchFile, WhatCannotBeReadBackIsNotWritten) {
  sample.tensors.bmm1_scale = Scale();
  EXPECT_TRUE(mentions(write_batch(path("x"), sample.problem, sample.tensors),
                       StatusCode::kInvalidArgument,
                       {"write_batch: bmm1_scale", "found nan", "finite"}));
  sample.tensors.bmm1_scale = 1.0F;
  EXPECT_TRUE(mentions(write_batch("/dev/full", sample.problem, sample.tensors), StatusCode::kIo,
                       {"write_batch: /dev/full", "No space left"}));
  sample.tensors.kv_cache = {};
  EXPECT_TRUE(mentions(write_batch(path("x"), sample.problem, sample.tensors),
                       StatusCode::kInvalidArgument, {"kv_cache", "no tensor"}));
  EXPECT_EQ(num_files(), 0U);
}

TEST_F(BatchFile, ResultsCarryOutAndLse) {
  const float lse[] = {1.0F, -INFINITY};
  const TensorView out = TensorView::contiguous(sample.q.data(), DType::kBF16, {1, 2, 4});
  ASSERT_TRUE(write_result(path("x"), out, TensorView::contiguous(lse, DType::kF32, {1, 2})).ok());
  const Result<SafetensorsFile> file = SafetensorsFile::open(path("x"));
  ASSERT_TRUE(file.ok());
  EXPECT_TRUE(same_values(*file->view("out"), out));
  EXPECT_EQ(std::memcmp(file->view("lse")->data, lse, 8), 0);
  ASSERT_TRUE(write_result(path("y"), out, {}).ok());
  EXPECT_EQ(SafetensorsFile::open(path("y"))->names(), (std::vector<std::string>{"out"}));
  EXPECT_TRUE(
      mentions(write_result("/dev/full", out, {}), StatusCode::kIo, {"write_result: /dev/full"}));
}

}  // namespace
}  // namespace mla::io::test
