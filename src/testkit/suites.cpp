#include "testkit/suites.hpp"

#include <algorithm>
#include <cstdlib>

#include "core/diagnostics.hpp"

namespace mla::testkit {
namespace {

/// Builds a list; a string that does not parse is a bug of this file.
class CaseList {
 public:
  void add(const std::string& problem) {
    Result<Case> parsed = parse_case(problem);
    if (!parsed.ok()) {
      if (status_.ok()) status_ = Status(StatusCode::kInternal, parsed.status().message());
      return;
    }
    // Each case has its own data unless it asks for a seed.
    if (problem.find("seed=") == std::string::npos) parsed->seed = cases_.size() + 1;
    cases_.push_back(std::move(*parsed));
  }
  Result<std::vector<Case>> take() && {
    if (!status_.ok()) return status_;
    return std::move(cases_);
  }

 private:
  std::vector<Case> cases_;
  Status status_;
};

const char* const kTypes[] = {"",
                              ",kv=e4m3",
                              ",kv=fp8_ds_mla",
                              ",q=f16,kv=f16",
                              ",q=e4m3,kv=e4m3",
                              ",q=f16,kv=bf16",
                              ",kv=f16",
                              ",q=f16,kv=e4m3",
                              ",q=e4m3,kv=fp8_ds_mla",
                              ",out=f32",
                              ",q=e4m3,kv=e4m3,out=f16"};

const char* const kSmoke[] = {
    "b=1,h=16,len=1",
    "b=2,h=16,len=64:65",
    "b=3,h=128,len=13:64:200",
    "b=2,h=1,len=100:257",
    "b=2,h=5,len=31:33,page=16",
    "b=2,sq=2,h=20,len=70:129,page=1",
    "b=3,sq=1:3:2,h=8,len=9:100:47",
    "b=2,sq=4,h=16,len=2:90",
    "b=2,sq=3,h=16,len=65:80,causal=0",
    "b=4,h=16,len=5:9:17:0,page=16",
    "b=3,h=128,len=0",
    "b=0,h=16,len=1,pad=2",
    "b=2,sq=1,h=16,len=40:50,pad=3",
    "b=2,sq=2,h=16,len=200:90,window=33",
    "b=2,h=16,len=100:90,cap=20",
    "b=2,h=16,len=60:0,sinks=1",
    "b=2,sq=2,h=16,len=60:75,alibi=1",
    "b=2,h=22,len=100:33,lse=2,sinks=1",
    "b=3,sq=2,h=16,len=1:65:300,cp=4:1:1",
    "b=3,sq=1:4:2,h=16,len=10:65:300,cp=3:2:16,alibi=1",
    "b=3,h=16,len=100:3:64,k=32",
    "b=2,sq=2:1,h=64,len=70:40,k=48,pad=1,kv=fp8_ds_mla",
    "b=2,h=16,len=100:64,kv=e4m3,scores=big",
    "b=2,h=16,len=200:33,scores=big",
    "b=2,h=16,len=200:33,scores=dominant",
    "b=2,h=16,len=200:33,scores=equal",
    "b=2,h=16,len=100:75,strides=1",
    "b=2,h=16,len=100:75,strides=1,qsplit=1,kv=fp8_ds_mla",
    "b=2,h=16,l=256,r=0,len=100:75",
    "b=2,h=6,l=64,r=32,len=100:75,qsplit=1",
    "b=2,h=16,len=700:130,splits=3",
    "b=2,h=16,len=700:130,fixed=128",
    "b=1,h=16,len=100,maxlen=163840,maxq=64",
    "b=1,h=4,len=3000,scale=0.02,vscale=0.5",
    "b=64,h=8,len=1..60,page=8",
};

void add_heads_and_pages(CaseList& list) {
  // The lengths cross tile, page and group boundaries; each head count meets one and two tokens.
  const int heads[] = {1, 2, 4, 5, 6, 8, 12, 16, 20, 22, 24, 32, 40, 64, 65, 96, 127, 128};
  for (int h : heads) {
    list.add(text("b=3,h=", h, ",len=1:65:150"));
    list.add(text("b=2,sq=2,h=", h, ",len=33:97,page=16"));
    list.add(text("b=2,sq=1:3,h=", h, ",len=47:49,page=32,kv=e4m3"));
    list.add(text("b=2,h=", h, ",len=40:77,k=48,page=16"));
  }
  const int pages[] = {1, 2, 3, 16, 32, 64, 128, 480};
  for (int page : pages) {
    for (const char* type : {"", ",kv=e4m3", ",kv=fp8_ds_mla", ",q=f16,kv=f16"}) {
      list.add(text("b=3,sq=2,h=16,len=63:64:193,page=", page, type));
      list.add(text("b=2,h=4,len=129:31,strides=1,page=", page, type));
    }
    list.add(text("b=2,h=8,len=90:33,k=40,page=", page));
  }
}

void add_types(CaseList& list) {
  for (const char* type : kTypes) {
    for (const char* scores : {"normal", "big", "equal", "dominant"}) {
      list.add(text("b=2,sq=2,h=16,len=130:49,scores=", scores, type));
      list.add(text("b=2,h=3,len=100:257,page=32,scores=", scores, type));
    }
    list.add(text("b=1,h=128,len=200", type));
    list.add(text("b=3,h=16,len=100:3:64,k=32", type));
    list.add(text("b=2,sq=1:2,h=20,len=64:70,qsplit=1,strides=1", type));
  }
  for (const char* shape :
       {"l=256,r=64", "l=256,r=0", "l=512,r=0", "l=64,r=32", "l=16,r=16", "l=32,r=0"}) {
    for (const char* type : {"", ",kv=e4m3", ",q=f16,kv=f16", ",q=e4m3,kv=e4m3"}) {
      list.add(text("b=2,sq=2,h=16,len=75:100,", shape, type));
      list.add(text("b=2,h=2,len=75:100,qsplit=1,", shape, type));
    }
  }
}

void add_modes(CaseList& list) {
  const char* tokens[] = {"b=3,sq=1,len=1:64:200",       "b=3,sq=2,len=2:65:200",
                          "b=3,sq=8,len=9:64:120",       "b=3,sq=1:4:2,len=3:64:131",
                          "b=4,sq=0:1:5:0,len=10:0:3:7", "b=3,sq=3,len=1:2:3,pad=2"};
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
  for (const char* token : tokens) {
    for (const char* mask : masks) {
      list.add(text(token, ",h=16", mask));
      list.add(text(token, ",h=5,page=16", mask));
      list.add(text(token, ",h=40,kv=e4m3,cp=2:1:4", mask));
    }
  }
}

/// Backends may choose other kernels where the bound of the lengths is far away.
void add_distant_bounds(CaseList& list) {
  const char* tokens[] = {"b=3,sq=1,len=1:64:700", "b=2,sq=2,len=2:300",
                          "b=3,sq=1:4:2,len=3:64:131", "b=4,sq=0:1:5:0,len=10:0:3:7"};
  const char* masks[] = {"",
                         ",causal=0",
                         ",window=48",
                         ",cap=30",
                         ",alibi=1",
                         ",sinks=1,lse=2,window=20",
                         ",out=f32",
                         ",cp=2:1:4",
                         ",page=16",
                         ",page=128,strides=1",
                         ",qsplit=1,page=3"};
  for (const char* token : tokens) {
    for (const char* mask : masks) {
      list.add(text(token, ",maxlen=1000000,h=64", mask));
      list.add(text(token, ",maxlen=1000000,h=24", mask));
    }
    list.add(text(token, ",maxlen=1000000,h=128"));
    list.add(text(token, ",maxlen=1000000,h=40,q=f16,kv=f16"));
  }
  for (const char* shape : {"l=256,r=64", "l=512,r=0"})
    list.add(text("b=2,sq=2,len=75:900,maxlen=1000000,h=64,", shape));
}

void add_context_parallel(CaseList& list) {
  for (int world : {2, 3, 8}) {
    for (int rank = 0; rank < world; rank += std::max(1, world / 2)) {
      for (int interleave : {1, 5, 64}) {
        const std::string cp = text(",cp=", world, ':', rank, ':', interleave);
        list.add(text("b=4,h=16,len=0:1:64:333", cp));
        list.add(text("b=3,sq=1:4:3,h=8,len=2:130:400,page=16,lse=2", cp));
        list.add(text("b=2,sq=2,h=128,len=90:150,window=50", cp));
        list.add(text("b=2,sq=3,h=16,len=90:200,causal=0,kv=fp8_ds_mla", cp));
      }
    }
  }
}

void add_sparse(CaseList& list) {
  for (int k : {1, 7, 48, 64, 130}) {
    for (const char* type : {"", ",kv=fp8_ds_mla", ",kv=e4m3", ",q=f16,kv=f16"}) {
      list.add(text("b=3,sq=2,h=16,len=0:20:200,k=", k, type));
      list.add(text("b=2,sq=1:3,h=128,len=90:64,pad=1,k=", k, type));
      list.add(text("b=2,h=3,len=200:70,sinks=1,cap=20,page=1,k=", k, type));
    }
  }
}

void add_edges(CaseList& list) {
  for (const char* type : kTypes) {
    list.add(text("b=5,h=16,len=0:1:0:33:0", type));
    list.add(text("b=16,h=16,len=0", type));
    list.add(text("b=2,sq=3,h=16,len=40:1,pad=5,sinks=1", type));
  }
  // Every count of slots in a last page.
  for (int len = 1; len <= 17; ++len) list.add(text("b=1,h=16,page=16,len=", len));
  for (int len : {47, 48, 49, 95, 96, 97, 191, 193}) list.add(text("b=1,h=20,page=3,len=", len));
  for (const char* h : {"1", "6", "16"}) {
    for (const char* split :
         {"splits=1", "splits=2", "splits=7", "fixed=64", "fixed=100", "fixed=512"}) {
      list.add(text("b=3,sq=2,len=1:900:333,h=", h, ',', split));
      list.add(text("b=2,len=800:333,kv=e4m3,window=300,h=", h, ',', split));
    }
  }
  list.add("b=1,h=1,len=131072,page=64");
  list.add("b=1,h=1,len=131072,page=64,scores=equal,kv=e4m3");
  list.add("b=1,h=8,len=16384,page=64,scores=big");
  list.add("b=1,h=16,len=8192,scores=dominant,splits=8");
  list.add("b=200,h=2,len=lognormal~40,page=8");
  list.add("b=1,h=16,len=64,maxlen=1099511627776,maxq=1000000");
}

template <class T, std::size_t kCount>
T pick(Rng& rng, const T (&values)[kCount]) {
  return values[rng.below(static_cast<std::int64_t>(kCount))];
}

}  // namespace

Result<std::vector<Case>> suite_cases(const std::string& name) {
  CaseList list;
  if (name != "smoke" && name != "full") {
    return bad_argument("check", "suite", text("'", name, "'"), "smoke or full");
  }
  for (const char* problem : kSmoke) list.add(problem);
  if (name == "full") {
    add_heads_and_pages(list);
    add_types(list);
    add_modes(list);
    add_distant_bounds(list);
    add_context_parallel(list);
    add_sparse(list);
    add_edges(list);
  }
  return std::move(list).take();
}

Case random_case(Rng& rng) {
  static constexpr std::int64_t kHeads[] = {1,  2,  3,  4,  5,  6,  7,  8,  12, 16,
                                            17, 20, 22, 24, 32, 40, 64, 65, 128};
  static constexpr std::int64_t kPages[] = {1, 2, 3, 5, 8, 16, 32, 64, 128};
  static constexpr DType kQuery[] = {DType::kBF16, DType::kBF16, DType::kF16, DType::kE4M3};
  static constexpr KvFormat kCache[] = {KvFormat::kBF16, KvFormat::kBF16, KvFormat::kF16,
                                        KvFormat::kE4M3, KvFormat::kFp8DsMla};
  static constexpr DType kOut[] = {DType::kNone, DType::kNone, DType::kBF16, DType::kF16,
                                   DType::kF32};
  static constexpr Scores kScores[] = {Scores::kNormal, Scores::kNormal, Scores::kNormal,
                                       Scores::kBig,    Scores::kEqual,  Scores::kDominant};
  Case c;
  c.seed = rng.next() >> 32;
  c.b = rng.one_in(16) ? 0 : rng.between(1, 5);
  c.h = pick(rng, kHeads);
  c.page = pick(rng, kPages);
  c.q = pick(rng, kQuery);
  c.kv = pick(rng, kCache);
  c.out = pick(rng, kOut);
  if (c.kv != KvFormat::kFp8DsMla && rng.one_in(3)) {
    c.l = 16 * rng.between(1, 32);
    c.r = 16 * rng.between(0, 5);
  }
  // Rows times keys stay small: the oracle pays for each pair.
  const std::int64_t longest = std::max<std::int64_t>(40, 6000 / c.h);
  if (rng.one_in(2) && c.b > 0) {
    c.len.kind = LengthSpec::Kind::kList;
    c.len.values.clear();
    for (std::int64_t i = 0; i < c.b; ++i) {
      c.len.values.push_back(rng.one_in(6) ? 0 : rng.between(1, longest));
    }
    if (c.b == 1) c.len.kind = LengthSpec::Kind::kConstant;
  } else {
    c.len.kind = LengthSpec::Kind::kUniform;
    c.len.values = {0, longest};
  }
  c.sq = {rng.one_in(2) ? 1 : rng.between(0, 4)};
  if (rng.one_in(3) && c.b > 1) {
    c.sq.clear();
    for (std::int64_t i = 0; i < c.b; ++i) c.sq.push_back(rng.between(0, 5));
  }
  c.causal = !rng.one_in(3);
  if (rng.one_in(4)) c.cap = static_cast<double>(rng.between(1, 50));
  c.sinks = rng.one_in(4);
  if (rng.one_in(5)) {
    c.k = rng.between(1, 150);
  } else {
    if (rng.one_in(4)) c.window = rng.between(1, longest);
    c.alibi = rng.one_in(5);
  }
  if (rng.one_in(3)) {
    c.cp_world = rng.between(1, 5);
    c.cp_rank = rng.below(c.cp_world);
    c.cp_interleave = rng.one_in(2) ? 1 : rng.between(1, 70);
  }
  if (rng.one_in(4)) c.lse = LseBase::kTwo;
  if (rng.one_in(4)) c.pad = rng.between(1, 4);
  if (rng.one_in(4)) c.scale = static_cast<double>(rng.between(1, 40)) / 256.0;
  if (rng.one_in(4)) c.vscale = static_cast<double>(rng.between(1, 40)) / 16.0;
  c.scores = pick(rng, kScores);
  if (rng.one_in(4))
    c.fixed = rng.between(1, longest);
  else if (rng.one_in(4))
    c.splits = rng.between(1, 9);
  c.pool = rng.between(0, 6);
  c.strides = rng.one_in(3);
  c.qsplit = rng.one_in(3);
  if (rng.one_in(4)) c.maxlen = longest + rng.between(0, 1000000);
  if (rng.one_in(4)) c.maxq = 5 + rng.between(0, 1000);
  return c;
}

}  // namespace mla::testkit
