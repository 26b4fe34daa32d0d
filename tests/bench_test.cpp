// `mla bench` without a machine to time: the shapes and recorded times that are part of it, the
// work of a batch, and the statistics.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "bench_options.hpp"
#include "bench_result.hpp"
#include "peers.hpp"
#include "statistics.hpp"

namespace mla::cli {
namespace {

constexpr double kExact = 1e-12;

const PeerTable& h200() {
  static const PeerTable table = h200_peers().value();
  return table;
}

BenchWork work_of(const std::string& problem) {
  return bench_work(*testkit::make_batch(testkit::parse_case(problem).value()).value());
}

const RatioClass& class_of(const RatioSummary& summary, const std::string& name) {
  static const RatioClass none;
  for (const RatioClass& found : summary.classes) {
    if (found.name == name) return found;
  }
  ADD_FAILURE() << "no class " << name;
  return none;
}

TEST(BenchPeers, HaveAllShapesUnderDistinctNames) {
  EXPECT_EQ(h200().shapes.size(), 122U);
  std::set<std::string> names, problems;
  for (const PeerShape& shape : h200().shapes) {
    const Result<testkit::Case> parsed = testkit::parse_case(shape.problem);
    ASSERT_TRUE(parsed.ok()) << shape.name << ": " << parsed.status().message();
    EXPECT_EQ(parsed->page, 64) << shape.name;
    int on_hopper = 0, on_any_card = 0;
    for (const Peer& peer : shape.peers) {
      if (peer.e4m3) continue;
      EXPECT_GT(peer.us, shape.limit_us) << shape.name;
      ++(peer.cards == PeerCards::kHopper ? on_hopper : on_any_card);
    }
    EXPECT_EQ(on_hopper, 3) << shape.name;
    EXPECT_EQ(on_any_card, 1) << shape.name;
    EXPECT_NE(shape.best_peer(KvFormat::kE4M3, PeerCards::kHopper).name, "") << shape.name;
    names.insert(shape.name);
    problems.insert(shape.problem);
  }
  EXPECT_EQ(names.size(), 122U);
  EXPECT_EQ(problems.size(), 122U);
}

TEST(BenchPeers, ALimitFollowsFromBytesAndFlops) {
  // Recorded with two decimals.
  for (const PeerShape& shape : h200().shapes) {
    const testkit::Case problem = testkit::parse_case(shape.problem).value();
    const auto batch = testkit::make_batch_without_cache(problem).value();
    const BenchWork work = bench_work(*batch);
    EXPECT_NEAR(h200().limit_us(work.bytes, work.flops, false), shape.limit_us, 0.0051)
        << shape.name;
  }
}

TEST(BenchPeers, ALimitIsTheLargerOfReadingAndArithmetic) {
  const PeerTable table = parse_peers(R"({"device": "card", "tflops_16bit": 100, "tflops_8bit": 200,
      "read_megabytes": [1, 4, 16], "read_us": [2, 4, 16], "shapes": []})")
                              .value();
  EXPECT_NEAR(table.limit_us(1e6, 0, false), 2.0, kExact);
  EXPECT_NEAR(table.limit_us(2e6, 0, false), 2.0 * std::sqrt(2.0), kExact);  // in the logarithms
  EXPECT_NEAR(table.limit_us(8e6, 0, false), 8.0, kExact);
  EXPECT_NEAR(table.limit_us(1e3, 0, false), 2.0, kExact);    // never below the smallest read
  EXPECT_NEAR(table.limit_us(32e6, 0, false), 32.0, kExact);  // past the end: in proportion
  EXPECT_NEAR(table.limit_us(1e6, 500e6, false), 5.0, kExact);
  EXPECT_NEAR(table.limit_us(1e6, 500e6, true), 2.5, kExact);
}

TEST(BenchPeers, TheBestPeerIsOfTheSameCacheTypeAndCards) {
  const PeerTable table = parse_peers(R"({"device": "card", "tflops_16bit": 1, "tflops_8bit": 1,
      "read_megabytes": [1], "read_us": [1],
      "shapes": [["a", "b=1", 1.0, 9.0, 7.0, 8.0, 5.0, 6.0, 3.0, 2.0],
                 ["b", "b=2", 1.0, 4.0, 7.0, 8.0, null, 6.0, 9.0, null],
                 ["c", "b=3", 1.0, null, null, null, null, null, null, null]]})")
                              .value();
  ASSERT_EQ(table.shapes.size(), 3U);
  const auto best = [&](std::size_t shape, KvFormat format, PeerCards cards = PeerCards::kHopper) {
    const Peer peer = table.shapes[shape].best_peer(format, cards);
    return peer.name + " " + std::to_string(static_cast<int>(peer.us));
  };
  EXPECT_EQ(best(0, KvFormat::kBF16), "flashinfer 7");
  EXPECT_EQ(best(0, KvFormat::kF16), "flashinfer 7");
  EXPECT_EQ(best(0, KvFormat::kE4M3), "flashmla 5");
  EXPECT_EQ(best(0, KvFormat::kFp8DsMla), " 0");
  EXPECT_EQ(best(1, KvFormat::kBF16), "flashmla 4");
  EXPECT_EQ(best(1, KvFormat::kE4M3), "flashinfer 6");
  EXPECT_EQ(best(2, KvFormat::kBF16), " 0");
  EXPECT_EQ(best(0, KvFormat::kBF16, PeerCards::kAny), "fa2 3");
  EXPECT_EQ(best(0, KvFormat::kE4M3, PeerCards::kAny), "fa2 2");
  EXPECT_EQ(best(1, KvFormat::kE4M3, PeerCards::kAny), " 0");
}

TEST(BenchPeers, AnotherTableIsRefused) {
  for (const char* json : {"", "[]", "{}", R"({"device": "card"})",
                           R"({"device": "card", "tflops_16bit": 1, "tflops_8bit": 1,
                               "read_megabytes": [1, 2], "read_us": [1], "shapes": []})",
                           R"({"device": "card", "tflops_16bit": 1, "tflops_8bit": 1,
                               "read_megabytes": [1], "read_us": [1], "shapes": [["a", "b=1"]]})"}) {
    EXPECT_EQ(parse_peers(json).status().code(), StatusCode::kInvalidArgument) << json;
  }
}

TEST(BenchWork, CountsKeysOnceAndEveryRow) {
  // 3 + 5 keys of 576 bf16; 2 tokens each with 4 heads: q of 576, out of 512.
  const BenchWork dense = work_of("b=2,sq=2,h=4,len=3:5");
  EXPECT_EQ(dense.bytes, 8 * 576 * 2 + 4 * 4 * (576 + 512) * 2);
  EXPECT_EQ(dense.flops, 8.0 * 4 * 2 * 2 * (576 + 512));
  // 6 indexed keys for each of two tokens.
  const BenchWork sparse = work_of("b=1,sq=2,h=4,len=40,k=6");
  EXPECT_EQ(sparse.bytes, 2 * 6 * 576 * 2 + 2 * 4 * (576 + 512) * 2);
  EXPECT_EQ(sparse.flops, 6.0 * 4 * 2 * 2 * (576 + 512));
  EXPECT_EQ(work_of("b=2,sq=2,h=4,len=3:5,kv=e4m3").bytes, 8 * 576 + 4 * 4 * (576 + 512) * 2);
}

TEST(BenchWork, IsTheSameWithoutACache) {
  for (const char* problem : {"b=3,h=2,len=70:1:130,page=16", "b=2,sq=3,h=2,len=90,k=20"}) {
    const testkit::Case parsed = testkit::parse_case(problem).value();
    const auto batch = testkit::make_batch_without_cache(parsed).value();
    EXPECT_EQ(bench_work(*batch).bytes, work_of(problem).bytes) << problem;
    EXPECT_EQ(bench_work(*batch).flops, work_of(problem).flops) << problem;
    EXPECT_EQ(batch->tensors.kv_cache.data, nullptr);
  }
}

TEST(BenchStatistics, Median) {
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({9, 1, 4}), 4);
  EXPECT_EQ(median({9, 1, 4, 2}), 3);
}

TEST(BenchStatistics, MeansAreGeometric) {
  const RatioSummary summary = summarise({{"a", 2.0, 1.0, 4.0, "x", 16},     // twice as fast
                                          {"b", 20.0, 5.0, 10.0, "y", 17},   // half as fast
                                          {"c", 32.0, 16.0, 0.0, "", 64}});  // no peer
  const RatioClass& all = class_of(summary, "all");
  EXPECT_EQ(all.lines, 3);
  EXPECT_EQ(all.peers, 2);
  EXPECT_NEAR(all.peer_ratio, 1.0, kExact);
  EXPECT_NEAR(all.over_limit, std::cbrt(2.0 * 4.0 * 2.0), kExact);
  EXPECT_EQ(summary.worst.name, "b");
  EXPECT_EQ(summary.worst.peer, "y");

  const RatioClass& few_rows = class_of(summary, "rows to 16");
  EXPECT_EQ(few_rows.lines, 1);
  EXPECT_NEAR(few_rows.peer_ratio, 2.0, kExact);
  const RatioClass& middle = class_of(summary, "limit 5 to 20 us");
  EXPECT_EQ(middle.lines, 2);
  EXPECT_EQ(middle.peers, 1);
  EXPECT_NEAR(middle.peer_ratio, 0.5, kExact);
  EXPECT_NEAR(middle.over_limit, std::sqrt(8.0), kExact);
  EXPECT_EQ(class_of(summary, "rows from 129").lines, 0);
  EXPECT_EQ(class_of(summary, "rows from 129").over_limit, 0.0);
  EXPECT_TRUE(summarise({}).worst.name.empty());
}

TEST(BenchStatistics, EveryShapeIsInOneClassOfEachKind) {
  std::vector<RatioLine> lines;
  for (const PeerShape& shape : h200().shapes) {
    const testkit::Case problem = testkit::parse_case(shape.problem).value();
    lines.push_back({shape.name, 1.0, shape.limit_us, 1.0, "x", problem.h * problem.sq.front()});
  }
  int by_limit = 0, by_rows = 0;
  for (const RatioClass& found : summarise(lines).classes) {
    if (found.name.rfind("limit", 0) == 0) by_limit += found.lines;
    if (found.name.rfind("rows", 0) == 0) by_rows += found.lines;
    EXPECT_GT(found.lines, 0) << found.name;
  }
  EXPECT_EQ(by_limit, 122);
  EXPECT_EQ(by_rows, 122);
}

TEST(BenchOptions, FlagsOverrideAProblemAndFilterLines) {
  BenchOptions options;
  options.page_size = 16;
  options.cache = "f16";
  const testkit::Case problem = bench_case(options, "b=2,h=3,len=9,page=64").value();
  EXPECT_EQ(testkit::to_string(problem), "b=2,h=3,len=9,page=16,q=f16,kv=f16");
  options.cache = "e4m3";
  EXPECT_EQ(testkit::to_string(bench_case(options, "b=2,h=3,len=9").value()),
            "b=2,h=3,len=9,page=16,kv=e4m3");

  const auto chosen = [&options](const char* filter) {
    options.filter = filter;
    return choose_lines(options, h200().shapes, &PeerShape::name);
  };
  EXPECT_EQ(chosen("")->size(), 122U);
  EXPECT_EQ(chosen("uniform_b1_q1_h8_len1024")->size(), 1U);
  EXPECT_EQ(chosen("zzz").status().code(), StatusCode::kInvalidArgument);
  const std::vector<PeerShape> wrong = {{"a", "b=nothing", 0, {}}};
  options.filter.clear();
  EXPECT_EQ(choose_lines(options, wrong, &PeerShape::name).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace mla::cli
