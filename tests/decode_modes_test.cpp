// Conformance over masks, tokens per request, context parallelism and sparse lists, and random
// problems.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/conformance.hpp"
#include "support/rows.hpp"
#include "testkit/case.hpp"
#include "testkit/rng.hpp"
#include "testkit/suites.hpp"

namespace mla {
namespace {

using test::expect_conformance;

const char* const kTokens[] = {"b=3,sq=1,len=1:64:90",        "b=3,sq=2,len=2:65:100",
                               "b=3,sq=8,len=9:64:70",        "b=3,sq=1:4:2,len=3:64:81",
                               "b=4,sq=0:1:5:0,len=10:0:3:7", "b=3,sq=3,len=1:2:3,pad=2"};

TEST(DecodeModes, EveryMaskWithEveryKindOfTokens) {
  const char* masks[] = {"",
                         ",causal=0",
                         ",window=1",
                         ",window=48",
                         ",window=500",
                         ",window=40,causal=0",
                         ",cap=30",
                         ",cap=5,window=64",
                         ",alibi=1",
                         ",alibi=1,causal=0",
                         ",sinks=1",
                         ",sinks=1,lse=2,window=20",
                         ",alibi=1,sinks=1,cap=30,window=70,lse=2"};
  for (const std::string tokens : kTokens) {
    for (const char* mask : masks) {
      expect_conformance(tokens + ",h=8,l=128,r=32" + mask);
      expect_conformance(tokens + ",h=3,page=16,kv=e4m3,l=64,r=16" + mask);
    }
  }
}

TEST(DecodeModes, ContextParallelRanksSeeTheirOwnKeys) {
  for (int world : {2, 3, 8}) {
    for (int rank = 0; rank < world; rank += world / 2) {
      for (int interleave : {1, 5, 64}) {
        const std::string cp = ",cp=" + std::to_string(world) + ":" + std::to_string(rank) + ":" +
                               std::to_string(interleave);
        expect_conformance("b=4,h=8,l=128,r=64,len=0:1:64:333" + cp);
        expect_conformance("b=3,sq=1:4:3,h=8,l=64,r=32,len=2:130:400,page=16,lse=2" + cp);
        expect_conformance("b=2,sq=2,h=20,l=64,r=16,len=90:150,window=50" + cp);
        expect_conformance("b=2,sq=3,h=4,len=90:120,causal=0,kv=fp8_ds_mla" + cp);
        expect_conformance("b=2,sq=2,h=6,l=64,r=16,len=90:120,alibi=1,sinks=1" + cp);
      }
    }
  }
}

TEST(DecodeModes, SparseRowsSeeExactlyTheirIndices) {
  for (int k : {1, 7, 48, 64, 130}) {
    const std::string entries = ",k=" + std::to_string(k);
    for (const char* type : {"", ",kv=fp8_ds_mla", ",kv=e4m3", ",q=f16,kv=f16"}) {
      expect_conformance("b=3,sq=2,h=8,len=0:20:200" + entries + type);
      expect_conformance("b=2,sq=1:3,h=20,len=90:64,pad=1" + entries + type);
      expect_conformance("b=2,h=3,len=200:70,sinks=1,cap=20,page=1,lse=2" + entries + type);
      expect_conformance("b=2,h=3,len=200:70,causal=0,strides=1,splits=3" + entries + type);
    }
  }
}

TEST(DecodeModes, StridesAndSplitQueriesAreRight) {
  for (const char* type : {"", ",kv=e4m3", ",kv=fp8_ds_mla", ",q=f16,kv=f16", ",q=e4m3,kv=e4m3"}) {
    for (const char* layout : {",strides=1", ",qsplit=1", ",strides=1,qsplit=1"}) {
      expect_conformance("b=2,sq=1:2,h=20,len=64:70" + std::string(layout) + type);
      expect_conformance("b=2,h=1,len=64:70,page=5" + std::string(layout) + type);
    }
  }
}

TEST(DecodeModes, ScalesAreApplied) {
  for (const char* type : {"", ",kv=e4m3", ",kv=fp8_ds_mla", ",q=f16,kv=f16"}) {
    for (const char* scale :
         {",scale=0.01,vscale=0.5", ",scale=0.5,vscale=16", ",scale=-0.05,vscale=-2"}) {
      expect_conformance("b=2,sq=2,h=8,len=64:70" + std::string(scale) + type);
      expect_conformance("b=2,h=2,len=64:70,splits=2,sinks=1" + std::string(scale) + type);
    }
  }
}

TEST(DecodeModes, LongContextsStayWithinTolerance) {
  expect_conformance({"b=1,h=1,len=131072,l=64,r=0",
                      "b=1,h=2,len=40000,kv=e4m3,l=64,r=16,scores=equal",
                      "b=1,h=8,len=9000,l=64,r=16,scores=big,splits=8",
                      "b=1,h=16,len=5000,l=64,r=16,scores=dominant,splits=8"});
}

TEST(DecodeModes, TheSmokeSuiteIsRight) {
  const Result<std::vector<testkit::Case>> cases = testkit::suite_cases("smoke");
  ASSERT_TRUE(cases.ok());
  for (const testkit::Case& problem : *cases) expect_conformance(testkit::to_string(problem));
}

TEST(DecodeModes, RandomProblemsAreRight) {
  testkit::Rng rng(20240901);
  for (int i = 0; i < 100; ++i) {
    testkit::Case problem = testkit::random_case(rng);
    // Smaller than the command's own random checks: the reference row runs too.
    if (problem.kv != KvFormat::kFp8DsMla && problem.l > 128) problem.l = 128;
    expect_conformance(testkit::to_string(problem));
  }
}

}  // namespace
}  // namespace mla
