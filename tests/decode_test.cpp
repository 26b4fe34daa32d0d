// Conformance: every row of the backend table that runs here, over shapes, types and lengths.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/conformance.hpp"
#include "support/rows.hpp"

namespace mla {
namespace {

using test::expect_conformance;

const char* const kTypes[] = {"",
                              ",kv=e4m3",
                              ",kv=fp8_ds_mla",
                              ",q=f16,kv=f16",
                              ",q=e4m3,kv=e4m3",
                              ",q=f16,kv=bf16",
                              ",q=f16,kv=e4m3",
                              ",kv=f16",
                              ",q=e4m3",
                              ",q=e4m3,kv=f16",
                              ",q=f16,kv=fp8_ds_mla",
                              ",q=e4m3,kv=fp8_ds_mla"};

TEST(Decode, EveryHeadCountIsServed) {
  for (int heads : {1,  2,  3,  4,  5,  6,  7,  8,  12, 15,  16,  17,
                    20, 22, 24, 32, 40, 48, 64, 65, 96, 127, 128, 130}) {
    const std::string h = ",h=" + std::to_string(heads);
    expect_conformance("b=3,len=1:65:50" + h);
    expect_conformance("b=2,sq=1:3,len=33:50,page=16,kv=e4m3" + h);
  }
}

TEST(Decode, EveryPageSizeIsServed) {
  for (int page : {1, 2, 3, 7, 16, 32, 48, 64, 100, 128, 480}) {
    const std::string p = ",page=" + std::to_string(page);
    for (const char* type : {"", ",kv=e4m3", ",kv=fp8_ds_mla", ",q=f16,kv=f16"}) {
      expect_conformance("b=3,sq=2,h=4,len=47:64:130" + p + type);
      expect_conformance("b=2,h=2,len=129:31,strides=1" + p + type);
    }
    expect_conformance("b=2,h=8,len=90:33,k=40" + p);
  }
}

TEST(Decode, EveryTypeIsServed) {
  for (const std::string type : kTypes) {
    expect_conformance("b=2,sq=2,h=8,len=70:49" + type);
    expect_conformance("b=2,h=3,len=100:20,page=32" + type);
    expect_conformance("b=1,h=20,len=97,splits=2" + type);
    expect_conformance("b=2,sq=2:1,h=8,len=40:64,k=33" + type);
    for (const char* out : {",out=f32", ",out=f16", ",out=bf16"}) {
      expect_conformance("b=2,h=6,len=33:64" + type + out);
    }
  }
}

TEST(Decode, EveryKindOfScoreIsRight) {
  for (const std::string type : kTypes) {
    for (const char* scores : {"big", "equal", "dominant"}) {
      expect_conformance("b=2,sq=2,h=8,len=130:49,scores=" + std::string(scores) + type);
      expect_conformance("b=2,h=2,len=100:150,scores=" + std::string(scores) + type);
    }
  }
}

TEST(Decode, EveryLatentAndRopeWidthIsServed) {
  for (const char* shape : {"l=256,r=64", "l=256,r=0", "l=512,r=0", "l=64,r=32", "l=16,r=16",
                            "l=32,r=0", "l=48,r=80", "l=528,r=64", "l=1024,r=128"}) {
    for (const char* type : {"", ",kv=e4m3", ",q=f16,kv=f16", ",q=e4m3,kv=e4m3"}) {
      expect_conformance("b=2,sq=2,h=16,len=75:50," + std::string(shape) + type);
      expect_conformance("b=2,h=2,len=75:100,qsplit=1," + std::string(shape) + type);
    }
  }
}

TEST(Decode, EveryLengthOfALastPageIsRight) {
  for (int len = 1; len <= 34; ++len) {
    expect_conformance("b=1,h=4,page=16,len=" + std::to_string(len));
    expect_conformance("b=1,h=16,l=64,r=16,page=16,kv=e4m3,len=" + std::to_string(len));
  }
  for (int len : {47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 193}) {
    expect_conformance("b=1,h=6,page=3,len=" + std::to_string(len));
    expect_conformance("b=1,h=2,page=64,len=" + std::to_string(len));
  }
}

TEST(Decode, EmptyRequestsAndPaddingRowsAreZeroAndMinusInfinity) {
  for (const std::string type : kTypes) {
    expect_conformance("b=5,h=8,len=0:1:0:33:0" + type);
    expect_conformance("b=4,h=5,len=0" + type);
    expect_conformance("b=2,sq=3,h=8,len=40:1,pad=5" + type);
    expect_conformance("b=2,sq=0:2,h=4,len=40:30,pad=1,sinks=1" + type);
  }
  expect_conformance({"b=0,h=16,len=1,pad=2", "b=0,h=3,len=1", "b=3,sq=0,h=3,len=5",
                      "b=2,h=3,k=8,len=0", "b=2,h=3,k=8,len=20,pad=3", "b=0,h=3,k=8,len=20,pad=3"});
}

TEST(Decode, SplitsAndThreadsAreAllRight) {
  std::vector<PlanOptions> options;
  for (int threads : {1, 2, 3, 7}) {
    for (std::int64_t splits : {0, 1, 2, 4, 1000}) {
      PlanOptions option;
      option.num_threads = threads;
      option.num_splits = splits;
      options.push_back(option);
    }
    PlanOptions fixed;
    fixed.num_threads = threads;
    fixed.fixed_split = 100;
    options.push_back(fixed);
  }
  for (const char* problem :
       {"b=3,sq=2,h=4,len=1:700:333", "b=2,h=16,len=500:90,kv=e4m3,l=128,r=64",
        "b=1,h=2,len=1500,window=900,page=16", "b=1,h=40,len=300,l=64,r=0"}) {
    expect_conformance(problem, options);
  }
}

}  // namespace
}  // namespace mla
