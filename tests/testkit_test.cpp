// The test kit itself: the grammar, where poison lies, and that the comparer sees planted errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/kv_layout.hpp"
#include "testkit/check.hpp"
#include "testkit/suites.hpp"

namespace mla::testkit {
namespace {

Case make_case(const std::string& problem) {
  Result<Case> parsed = parse_case(problem);
  EXPECT_TRUE(parsed.ok()) << parsed.status().message();
  return parsed.ok() ? *parsed : Case{};
}

std::unique_ptr<Batch> batch_of(const std::string& problem) {
  Result<std::unique_ptr<Batch>> batch = make_batch(make_case(problem));
  EXPECT_TRUE(batch.ok()) << batch.status().message();
  return batch.ok() ? std::move(*batch) : nullptr;
}

std::vector<Case> many_cases() {
  std::vector<Case> cases = suite_cases("full").value();
  Rng rng(11);
  for (int i = 0; i < 500; ++i) cases.push_back(random_case(rng));
  return cases;
}

TEST(Grammar, EveryCaseRoundTrips) {
  for (const Case& problem : many_cases()) {
    const std::string printed = to_string(problem);
    const Result<Case> again = parse_case(printed);
    ASSERT_TRUE(again.ok()) << printed << ": " << again.status().message();
    EXPECT_EQ(to_string(*again), printed);
    EXPECT_EQ(case_lengths(*again).seq_lens, case_lengths(problem).seq_lens) << printed;
  }
}

TEST(Grammar, PrintsOnlyWhatDiffersFromTheDefaults) {
  EXPECT_EQ(to_string(Case{}), "b=1,h=16,len=64");
  EXPECT_EQ(to_string(make_case("seed=7,causal=1,page=64,kv=e4m3,len=1:65,b=2,h=128,sq=1:2,cp=4:1:16")),
            "b=2,sq=1:2,h=128,len=1:65,kv=e4m3,cp=4:1:16,seed=7");
}

TEST(Grammar, EveryLengthFormGivesOneLengthPerRequest) {
  EXPECT_EQ(case_lengths(make_case("b=3,len=9")).seq_lens, (std::vector<std::int64_t>{9, 9, 9}));
  EXPECT_EQ(case_lengths(make_case("b=2,len=0:65")).seq_lens, (std::vector<std::int64_t>{0, 65}));
  double total = 0.0;
  for (std::int64_t length : case_lengths(make_case("b=4000,len=lognormal~1000")).seq_lens) {
    EXPECT_GE(length, 1);
    total += static_cast<double>(length);
  }
  EXPECT_NEAR(total / 4000, 1000.0, 100.0);
  std::set<std::int64_t> seen;
  for (std::int64_t length : case_lengths(make_case("b=200,len=3..5")).seq_lens) seen.insert(length);
  EXPECT_EQ(seen, (std::set<std::int64_t>{3, 4, 5}));
}

TEST(Grammar, LocalLengthsCountTheTokensDealtToTheRank) {
  for (int world : {1, 2, 3, 5}) {
    for (int rank = 0; rank < world; ++rank) {
      for (int interleave : {1, 4, 7}) {
        for (int global = 0; global <= 70; ++global) {
          std::int64_t dealt = 0;
          for (int g = 0; g < global; ++g) dealt += g / interleave % world == rank ? 1 : 0;
          Case problem;
          problem.len.values = {global};
          problem.cp_world = world;
          problem.cp_rank = rank;
          problem.cp_interleave = interleave;
          ASSERT_EQ(case_lengths(problem).seq_lens[0], dealt) << to_string(problem);
        }
      }
    }
  }
}

TEST(Grammar, ReadsWhatTheLibraryPrints) {
  const Case source = make_case("b=3,sq=2,h=20,len=100,page=16,q=e4m3,kv=fp8_ds_mla,window=9,cap=2.5,lse=2");
  const DecodeProblem problem = decode_problem(source, case_lengths(source));
  const Case again = make_case(to_string(problem));
  EXPECT_EQ(to_string(decode_problem(again, case_lengths(again))), to_string(problem));
  EXPECT_EQ(make_case("b=4,t=9,h=1,maxlen=50").pad, 1);
  EXPECT_EQ(make_case("b=4,t=9,h=1,maxlen=50").sq, (std::vector<std::int64_t>{2}));
  EXPECT_EQ(make_case("b=4,h=1,maxlen=50").len.values, (std::vector<std::int64_t>{50}));
}

TEST(Grammar, RefusalsNameTheKeyWhatWasFoundAndWhatIsNeeded) {
  const char* const cases[][3] = {
      {"b=2,heads=4", "'heads'", "unknown key"},  {"b=2,b=3", "b:", "twice"},
      {"b", "'b'", "no '='"},                     {"h=0", "h:", "'0'"},
      {"h=12x", "h:", "'12x'"},                   {"b=2,len=1:2:3", "len:", "3 numbers"},
      {"b=3,sq=1:2", "sq:", "2 numbers"},         {"len=5..2", "len:", "'5..2'"},
      {"cp=2:2:1", "cp:", "rank < world"},        {"kv=bf8", "kv:", "fp8_ds_mla"},
      {"causal=yes", "causal:", "0 or 1"},        {"cap=nan", "cap:", "finite"},
      {"b=99999999999999999999", "b:", "integer"}, {"scale=", "scale:", "finite"},
      {"b=1,t=4,sq=2", "t:", "sq"},               {"len=lognormal~0", "len:", "lognormal~"}};
  for (const auto& [problem, key, reason] : cases) {
    const Result<Case> parsed = parse_case(problem);
    ASSERT_FALSE(parsed.ok()) << problem;
    EXPECT_EQ(parsed.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(parsed.status().message().find(key), std::string::npos) << parsed.status().message();
    EXPECT_NE(parsed.status().message().find(reason), std::string::npos) << parsed.status().message();
  }
}

TEST(Grammar, SafeNamesHaveOnlyLettersDigitsAndUnderscores) {
  EXPECT_EQ(safe_name(make_case("b=4,sq=2,h=128,len=4097,kv=e4m3")), "b4_sq2_h128_len4097_kve4m3");
  std::set<std::string> names;
  const std::vector<Case> cases = suite_cases("full").value();
  for (const Case& problem : cases) {
    const std::string name = safe_name(problem);
    for (char c : name) EXPECT_TRUE(std::isalnum(static_cast<unsigned char>(c)) || c == '_') << name;
    names.insert(name);
  }
  EXPECT_EQ(names.size(), cases.size());
}

TEST(Random, StreamsAreTheSameEverywhere) {
  // xoshiro256** after splitmix64; pinned so that a seed in an old report still means its data.
  Rng rng(1);
  EXPECT_EQ(rng.next(), 12966619160104079557ULL);
  EXPECT_EQ(rng.next(), 9600361134598540522ULL);
  EXPECT_NE(Rng(1, 2).next(), Rng(1, 3).next());
  double sum = 0.0, square = 0.0;
  for (int i = 0; i < 100'000; ++i) {
    const double x = rng.normal();
    sum += x;
    square += x * x;
  }
  EXPECT_NEAR(sum / 1e5, 0.0, 0.02);
  EXPECT_NEAR(square / 1e5, 1.0, 0.02);
}

TEST(Random, TheSameSeedGivesTheSameBytes) {
  const std::string problem = "b=2,sq=1:2,h=4,len=5:70,sinks=1,strides=1,seed=";
  EXPECT_EQ(batch_of(problem + "3")->input_fingerprint(), batch_of(problem + "3")->input_fingerprint());
  EXPECT_NE(batch_of(problem + "3")->input_fingerprint(), batch_of(problem + "4")->input_fingerprint());
}

/// NaN, infinite or as large as the type goes.
bool is_poison(DType dtype, const std::byte* bytes) {
  if (dtype == DType::kU8) return bytes[0] == std::byte{0xFF};
  const double value = decode(dtype, bytes);
  return !std::isfinite(value) || std::abs(value) >= (dtype == DType::kF16 ? 65504.0 : 1e38);
}

class Poison : public testing::TestWithParam<const char*> {};

TEST_P(Poison, FillsEveryCacheByteThatNoTokenOwns) {
  const std::string problem = std::string("b=4,sq=2,h=2,len=0:1:16:37,page=16,pool=3") + GetParam();
  const std::unique_ptr<Batch> batch = batch_of(problem);
  const TensorView& cache = batch->tensors.kv_cache;
  const auto element = static_cast<std::int64_t>(dtype_bytes(cache.dtype));
  std::vector<bool> owned(batch->kv_cache.size() / static_cast<std::size_t>(element));
  std::set<std::int32_t> pages;
  for (std::size_t b = 0; b < batch->pages.size(); ++b) {
    for (std::int32_t page : batch->pages[b]) {
      EXPECT_TRUE(page > 0 && page < cache.shape[0]);
      EXPECT_TRUE(pages.insert(page).second) << "page " << page << " has two owners";
    }
    for (std::int64_t j = 0; j < batch->lengths.seq_lens[b]; ++j) {
      const std::int64_t first = batch->pages[b][static_cast<std::size_t>(j / 16)] * cache.stride[0] +
                                 j % 16 * cache.stride[1];
      for (std::int64_t d = 0; d < cache.shape[2]; ++d) owned[static_cast<std::size_t>(first + d)] = true;
    }
  }
  EXPECT_EQ(cache.shape[0], 1 + 3 + static_cast<std::int64_t>(pages.size()));
  std::int64_t num_wrong = 0;
  for (std::size_t i = 0; i < owned.size(); ++i) {
    const std::byte* bytes = batch->kv_cache.data() + static_cast<std::int64_t>(i) * element;
    if (owned[i] && cache.dtype == DType::kU8) continue;  // a record's bytes may have any value
    if (owned[i] == is_poison(cache.dtype, bytes)) ++num_wrong;
  }
  EXPECT_EQ(num_wrong, 0);
}

TEST_P(Poison, FillsTableColumnsPastTheLengthAndGapsOfTheQuery) {
  const std::string problem = std::string("b=3,sq=2,h=3,len=0:17:50,page=16,pad=2") + GetParam();
  const std::unique_ptr<Batch> batch = batch_of(problem);
  const TensorView& table = batch->tensors.block_table;
  const auto* ids = static_cast<const std::int32_t*>(table.data);
  for (std::int64_t b = 0; b < table.shape[0]; ++b) {
    const auto& pages = batch->pages[static_cast<std::size_t>(b)];
    EXPECT_GT(table.shape[1], static_cast<std::int64_t>(pages.size()));
    for (std::int64_t p = 0; p < table.stride[0]; ++p) {
      const std::int32_t id = ids[b * table.stride[0] + p];
      if (p < static_cast<std::int64_t>(pages.size())) EXPECT_EQ(id, pages[static_cast<std::size_t>(p)]);
      else EXPECT_TRUE(id < 0 || id >= batch->tensors.kv_cache.shape[0]) << id;
    }
  }
  const TensorView& q = batch->tensors.q;
  const auto element = static_cast<std::int64_t>(dtype_bytes(q.dtype));
  std::vector<bool> used(batch->q.size() / static_cast<std::size_t>(element));
  for (std::int64_t t = 0; t < 6; ++t) {  // tokens 6 and 7 are padding
    for (std::int64_t h = 0; h < 3; ++h) {
      for (std::int64_t d = 0; d < q.shape[2]; ++d) {
        used[static_cast<std::size_t>(t * q.stride[0] + h * q.stride[1] + d)] = true;
      }
    }
  }
  for (std::size_t i = 0; i < used.size(); ++i) {
    const double value = decode(q.dtype, batch->q.data() + static_cast<std::int64_t>(i) * element);
    ASSERT_EQ(used[i], !std::isnan(value)) << "element " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Poison,
                         testing::Values("", ",kv=f16,q=f16", ",kv=e4m3,q=e4m3", ",kv=fp8_ds_mla", ",strides=1",
                                         ",kv=f16,strides=1", ",kv=e4m3,strides=1",
                                         ",kv=fp8_ds_mla,strides=1"));

TEST(Generator, SparseRowsNameOwnSlotsOrNothing) {
  const std::unique_ptr<Batch> batch = batch_of("b=3,sq=4,h=2,len=0:20:90,k=33,page=8,pad=1");
  const TensorView& indices = batch->tensors.indices;
  const std::int64_t num_slots = batch->tensors.kv_cache.shape[0] * 8;
  std::int64_t num_keys = 0;
  for (std::int64_t t = 0; t < 12; ++t) {
    std::set<std::int64_t> slots;
    const auto b = static_cast<std::size_t>(t / 4);
    for (std::int64_t j = 0; j < batch->lengths.seq_lens[b]; ++j) {
      slots.insert(batch->pages[b][static_cast<std::size_t>(j / 8)] * 8 + j % 8);
    }
    for (std::int64_t k = 0; k < indices.shape[1]; ++k) {
      const std::int64_t slot = static_cast<const std::int32_t*>(indices.data)[t * indices.stride[0] + k];
      if (slot < 0 || slot >= num_slots) continue;
      ++num_keys;
      EXPECT_EQ(slots.count(slot), 1U) << "token " << t << " entry " << k;
    }
  }
  EXPECT_GT(num_keys, 100);
}

/// Logits of head 0 of the last token of request 0, a contiguous bf16 batch.
std::vector<double> logits_of(const Batch& batch) {
  const TensorView& q = batch.tensors.q;
  const TensorView& cache = batch.tensors.kv_cache;
  std::vector<double> logits;
  for (std::int64_t j = 0; j < batch.lengths.seq_lens[0]; ++j) {
    const std::int64_t page = batch.pages[0][static_cast<std::size_t>(j / batch.source.page)];
    const std::int64_t slot = page * cache.stride[0] + j % batch.source.page * cache.stride[1];
    double sum = 0.0;
    for (std::int64_t d = 0; d < q.shape[2]; ++d) {
      sum += decode(q.dtype, batch.q.data() + d * 2) * decode(DType::kBF16, batch.kv_cache.data() + (slot + d) * 2);
    }
    logits.push_back(sum * static_cast<double>(batch.tensors.bmm1_scale.value));
  }
  return logits;
}

TEST(Generator, ScoresAreWhatTheirNameSays) {
  std::vector<double> big = logits_of(*batch_of("b=1,h=1,len=300,scores=big"));
  std::sort(big.begin(), big.end());
  EXPECT_LT(big.front(), -5e3);
  EXPECT_GT(big.back(), 5e3);
  EXPECT_LT(big.back(), 5e4);
  for (double x : logits_of(*batch_of("b=1,h=1,len=30,scores=equal"))) EXPECT_EQ(x, 0.0);
  std::set<std::ptrdiff_t> places;
  for (int seed = 1; seed <= 20; ++seed) {
    std::vector<double> x = logits_of(*batch_of("b=1,h=1,len=100,scores=dominant,seed=" + std::to_string(seed)));
    const auto top = std::max_element(x.begin(), x.end());
    places.insert(top - x.begin());
    const double largest = *top;
    *top = -1e9;
    EXPECT_GT(largest, *std::max_element(x.begin(), x.end()) + 20.0);
  }
  EXPECT_GT(places.size(), 10U);
}

TEST(Generator, RefusesWhatDoesNotFit) {
  EXPECT_EQ(make_batch(make_case("b=1,h=1,len=3000000000")).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(make_batch(make_case("b=4000,h=1,len=2000000000")).status().code(), StatusCode::kOutOfMemory);
}

/// A small batch with the oracle's result in it.
struct Solved {
  std::unique_ptr<Batch> batch;
  Oracle oracle;

  explicit Solved(const std::string& problem) : batch(batch_of(problem)) {
    PlanOptions options;
    options.backend = "cpu_reference";
    const DecodePlan made = plan(batch->problem, options).value();
    EXPECT_TRUE(run(made, batch->tensors, nullptr, 0).ok());
    oracle = full_oracle(batch->problem, batch->tensors).value();
  }
  Comparison compared() const { return compare(batch->problem, batch->tensors, oracle); }
  float* lse(std::int64_t row) const { return batch->lse.as<float>() + row; }
  float* out(std::int64_t row, std::int64_t d) const { return batch->out.as<float>() + row * batch->source.l + d; }
};

// Rows: request 0 has no key, request 1 has two tokens.
constexpr const char* kSmall = "b=2,sq=1:2,h=3,l=32,r=16,len=0:40,out=f32";

TEST(Compare, AcceptsTheOracleItself) {
  const Solved solved(kSmall);
  const Comparison comparison = solved.compared();
  EXPECT_TRUE(comparison.passed()) << comparison.problem;
  EXPECT_LT(comparison.error, 1e-6);
  EXPECT_TRUE(guard_damage(solved.batch->out, solved.batch->lse).empty());
}

TEST(Compare, NamesTheFirstWrongElement) {
  const Solved solved(kSmall);
  *solved.out(7, 9) += 1.0F;  // token 2, head 1
  const Comparison comparison = solved.compared();
  EXPECT_FALSE(comparison.passed());
  EXPECT_EQ(comparison.bad_token, 2);
  EXPECT_EQ(comparison.bad_head, 1);
  EXPECT_EQ(comparison.bad_column, 9);
  EXPECT_NE(comparison.problem.find("out[2,1,9]"), std::string::npos) << comparison.problem;
}

TEST(Compare, NaNAndInfinityNeverPass) {
  for (float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const Solved in_out(kSmall);
    *in_out.out(4, 3) = value;
    EXPECT_EQ(in_out.compared().bad_column, 3);
    EXPECT_TRUE(std::isinf(in_out.compared().error));
    const Solved in_lse(kSmall);
    *in_lse.lse(4) = value;
    EXPECT_FALSE(in_lse.compared().passed());
    EXPECT_EQ(in_lse.compared().bad_column, -1);
  }
}

TEST(Compare, EmptyRowsAreExact) {
  const Solved in_out(kSmall);
  *in_out.out(0, 5) = 1e-30F;
  EXPECT_EQ(in_out.compared().bad_token, 0);
  for (float lse : {-1e30F, 0.0F, std::numeric_limits<float>::infinity()}) {
    const Solved in_lse(kSmall);
    *in_lse.lse(1) = lse;
    EXPECT_EQ(in_lse.compared().bad_head, 1);
  }
  const Solved sinks(std::string(kSmall) + ",sinks=1");
  EXPECT_TRUE(sinks.compared().passed());
  *sinks.lse(0) = std::nextafter(*sinks.lse(0), 10.0F);
  EXPECT_FALSE(sinks.compared().passed());
}

TEST(Compare, TolerancesAreThoseOfTheCoarsestType) {
  const auto whole = [](const std::string& types) {
    const Case problem = make_case("b=1" + types);
    return tolerance_for(decode_problem(problem, case_lengths(problem))).whole;
  };
  EXPECT_EQ(whole(""), 4e-3);
  EXPECT_EQ(whole(",q=f16,kv=f16"), 2e-3);
  EXPECT_EQ(whole(",q=f16,kv=f16,out=bf16"), 4e-3);
  EXPECT_EQ(whole(",q=f16,kv=bf16"), 4e-3);
  EXPECT_EQ(whole(",kv=e4m3"), 2e-2);
  EXPECT_EQ(whole(",kv=fp8_ds_mla"), 2e-2);
  EXPECT_EQ(whole(",q=e4m3,kv=f16"), 2e-2);
}

TEST(Compare, SeesADriftThatNoSingleRowShows) {
  const Solved solved(kSmall);
  for (std::int64_t row = 3; row < 9; ++row) {
    for (std::int64_t d = 0; d < 32; ++d) *solved.out(row, d) *= 1.006F;  // rows may err 1.2e-2, all 4e-3
  }
  const Comparison comparison = solved.compared();
  EXPECT_FALSE(comparison.passed());
  EXPECT_EQ(comparison.bad_token, -1);
  EXPECT_NEAR(comparison.error, 6e-3, 1e-4);
}

TEST(Compare, LseIsComparedInNaturalUnits) {
  for (const char* base : {"", ",lse=2"}) {
    const Solved solved(std::string(kSmall) + base);
    *solved.lse(5) += 0.0005F;
    EXPECT_TRUE(solved.compared().passed());
    *solved.lse(5) += 0.005F;
    EXPECT_FALSE(solved.compared().passed());
  }
}

TEST(Compare, ASampleStillSeesUnwrittenRows) {
  const Solved solved("b=3,sq=2,h=4,l=32,r=16,len=50,out=f32,pad=1");
  const Oracle sample = sampled_oracle(*solved.batch, 200.0).value();
  EXPECT_FALSE(sample.complete);
  EXPECT_LT(sample.rows.size(), 10U);
  const auto& [problem, tensors] = std::tie(solved.batch->problem, solved.batch->tensors);
  EXPECT_TRUE(compare(problem, tensors, sample).passed());
  for (std::int64_t row = 0; row < 28; ++row) {
    const float kept = *solved.out(row, 31);
    *solved.out(row, 31) = std::numeric_limits<float>::quiet_NaN();
    EXPECT_FALSE(compare(problem, tensors, sample).passed()) << "row " << row;
    *solved.out(row, 31) = kept;
  }
}

TEST(Compare, GuardBandsShowWritesOnBothSides) {
  for (std::ptrdiff_t where : {std::ptrdiff_t{-1}, std::ptrdiff_t{-4096}}) {
    Buffer buffer(100, 0xFF);
    const Buffer untouched(100, 0xFF);
    buffer.data()[where] = std::byte{0};
    EXPECT_NE(guard_damage(buffer, untouched).find("out"), std::string::npos);
    EXPECT_NE(guard_damage(untouched, buffer).find("lse"), std::string::npos);
  }
  Buffer buffer(100, 0xFF);
  buffer.data()[100] = std::byte{0};
  EXPECT_FALSE(buffer.intact());
}

TEST(Check, AFailureEndsWithALineThatRepeatsIt) {
  const Case problem = make_case("b=2,h=4,len=3:9,kv=e4m3,seed=12");
  const std::string line = repro_line(problem, "cpu_avx2", 2);
  EXPECT_EQ(line, "repro: mla check --problem \"b=2,h=4,len=3:9,kv=e4m3,seed=12\" --backend cpu_avx2 --threads 2");
}

TEST(Check, TheReferencePassesEverySmokeCase) {
  PlanOptions options;
  options.backend = "cpu_reference";
  const std::vector<Case> cases = suite_cases("smoke").value();
  for (const Case& problem : cases) {
    const Result<CheckResult> result = check_case(problem, options);
    ASSERT_TRUE(result.ok()) << to_string(problem) << ": " << result.status().message();
    EXPECT_TRUE(result->passed()) << result->problem << '\n' << result->repro;
    EXPECT_EQ(result->backend, "cpu_reference");
  }
}

TEST(Check, AnUnknownBackendAndAnInvalidProblemHaveNoVerdict) {
  PlanOptions options;
  options.backend = "cpu_none";
  EXPECT_EQ(check_case(Case{}, options).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(check_case(make_case("l=17")).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(check_case(make_case("len=100,maxlen=50")).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace mla::testkit
