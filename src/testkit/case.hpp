// The problem grammar: one string names a test, a CLI problem, a log line, a bench row and a repro.
//
//   b=4,sq=2,h=128,len=1:64:65:4097,page=64,kv=e4m3,causal=1,seed=7
//
// `key=value` pairs joined by commas. docs/notation.md describes the keys; `grammar_help()` lists them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mla/decode.hpp"
#include "mla/problem.hpp"
#include "mla/status.hpp"

namespace mla::testkit {

/// Keys per request: one number, a list with one number per request, a uniform random range, or a
/// lognormal distribution (sigma 1) around a mean.
struct LengthSpec {
  enum class Kind { kConstant, kList, kUniform, kLognormal };
  Kind kind = Kind::kConstant;
  std::vector<std::int64_t> values = {64};  ///< constant: 1; list: b; uniform: low, high; lognormal: mean
};

/// What the scores of a row look like.
enum class Scores {
  kNormal,    ///< q and cache near N(0,1)
  kBig,       ///< logits of about +-1e4
  kEqual,     ///< q = 0: every visible key weighs the same
  kDominant,  ///< one key of each request, at a random position, far above all others
};

/// A problem with everything that decides its data. Defaults are what the grammar leaves out.
struct Case {
  std::int64_t b = 1;                 ///< requests
  std::vector<std::int64_t> sq = {1}; ///< query tokens per request: one number, or one per request (then
                                      ///< query_start_loc is given)
  std::int64_t h = 16;
  std::int64_t l = 512;
  std::int64_t r = 64;
  LengthSpec len;                     ///< GLOBAL lengths; with cp the local ones follow
  std::int64_t page = 64;
  DType q = DType::kBF16;
  KvFormat kv = KvFormat::kBF16;
  DType out = DType::kNone;
  std::int64_t k = 0;                 ///< entries of a sparse index row; 0: dense
  bool causal = true;
  std::int64_t window = 0;
  double cap = 0.0;
  bool sinks = false;
  bool alibi = false;
  std::int64_t cp_world = 1;
  std::int64_t cp_rank = 0;
  std::int64_t cp_interleave = 1;
  LseBase lse = LseBase::kE;
  std::int64_t pad = 0;               ///< padding rows after the last request
  double scale = 0.0;                 ///< bmm1_scale; 0: 1/sqrt(192)
  double vscale = 1.0;                ///< bmm2_scale
  Scores scores = Scores::kNormal;
  std::int64_t fixed = 0;             ///< PlanOptions::fixed_split
  std::int64_t splits = 0;            ///< PlanOptions::num_splits
  std::int64_t pool = 2;              ///< pages owned by nobody, besides page 0
  bool strides = false;               ///< gaps between rows of q, cache and block table
  bool qsplit = false;                ///< q_nope and q_pe instead of q
  std::int64_t maxlen = 0;            ///< max_seq_len; 0: the longest request
  std::int64_t maxq = 0;              ///< max_query_len; 0: the most query tokens of a request
  std::uint64_t seed = 1;
};

/// Reads a problem string. The strings of `to_string(const DecodeProblem&)` are understood too: `t`
/// gives sq and pad when those are absent, `maxlen` gives len (and then `maxq` sq) when that is absent.
/// kInvalidArgument: the message names the key, what was found and what is needed.
Result<Case> parse_case(const std::string& problem);

/// The canonical string: b, h and len, then what differs from its default, in a fixed order.
/// parse_case of it gives the same case.
std::string to_string(const Case& problem);

/// to_string in letters, digits and underscores: a GoogleTest parameter name.
std::string safe_name(const Case& problem);

/// One line per key.
std::string grammar_help();

/// The lengths that a case means, random ones drawn from its seed. All vectors have b entries.
struct CaseLengths {
  std::vector<std::int64_t> query_lens;   ///< n_b
  std::vector<std::int64_t> global_lens;  ///< G_b
  std::vector<std::int64_t> seq_lens;     ///< S_b, keys on this rank

  std::vector<std::int32_t> query_start_loc;  ///< [b+1]
  std::int64_t num_tokens = 0;                ///< query_start_loc[b] + pad
  std::int64_t max_seq_len = 0;
  std::int64_t max_query_len = 0;
};
CaseLengths case_lengths(const Case& problem);

/// Whether the case passes query_start_loc (else the request lengths are uniform and it is left out).
bool gives_query_start_loc(const Case& problem) noexcept;

DecodeProblem decode_problem(const Case& problem, const CaseLengths& lengths);
/// num_splits and fixed_split; the rest as in `base`.
PlanOptions plan_options(const Case& problem, PlanOptions base = {});

}  // namespace mla::testkit
