#include "testkit/case.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <string_view>

#include "core/diagnostics.hpp"
#include "testkit/rng.hpp"

namespace mla::testkit {
namespace {

constexpr std::int64_t kMaxNumber = std::int64_t{1} << 40;
constexpr std::int64_t kMaxRequests = std::int64_t{1} << 22;  // lengths are drawn one by one
constexpr std::uint64_t kLengthStream = 1;

// What a value parser needed and did not get; empty: it got it.
using Needed = std::string;

/// One key of the grammar. `print` gives nothing for a default, so parsing and printing cannot drift.
struct Key {
  const char* name;
  const char* help;
  std::function<Needed(Case&, std::string_view)> parse;
  std::function<std::string(const Case&)> print;
};

bool read_integer(std::string_view text, std::int64_t& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

bool read_list(std::string_view text, std::int64_t low, std::vector<std::int64_t>& values) {
  values.clear();
  while (true) {
    const std::size_t colon = text.find(':');
    std::int64_t value = 0;
    if (!read_integer(text.substr(0, colon), value) || value < low || value > kMaxNumber) return false;
    values.push_back(value);
    if (colon == std::string_view::npos) return true;
    text.remove_prefix(colon + 1);
  }
}

std::string join(const std::vector<std::int64_t>& values) {
  std::string joined;
  for (std::int64_t value : values) {
    if (!joined.empty()) joined += ':';
    joined += std::to_string(value);
  }
  return joined;
}

std::string shortest(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return error == std::errc() ? std::string(buffer, end) : std::string("0");
}

Key integer_key(const char* name, const char* help, std::int64_t Case::*member, std::int64_t low,
                bool always_printed = false, std::int64_t high = kMaxNumber) {
  return {name, help,
          [member, low, high](Case& c, std::string_view text) -> Needed {
            std::int64_t value = 0;
            if (read_integer(text, value) && value >= low && value <= high) {
              c.*member = value;
              return {};
            }
            return "an integer from " + std::to_string(low) + " to " + std::to_string(high);
          },
          [member, always_printed](const Case& c) -> std::string {
            if (!always_printed && c.*member == Case().*member) return {};
            return std::to_string(c.*member);
          }};
}

Key bool_key(const char* name, const char* help, bool Case::*member) {
  return {name, help,
          [member](Case& c, std::string_view text) -> Needed {
            if (text != "0" && text != "1") return "0 or 1";
            c.*member = text == "1";
            return {};
          },
          [member](const Case& c) -> std::string {
            return c.*member == Case().*member ? "" : (c.*member ? "1" : "0");
          }};
}

Key double_key(const char* name, const char* help, double Case::*member) {
  return {name, help,
          [member](Case& c, std::string_view text) -> Needed {
            double value = 0;
            const char* end = text.data() + text.size();
            const auto [stop, error] = std::from_chars(text.data(), end, value);
            if (error != std::errc() || stop != end || !std::isfinite(value)) return "a finite number";
            c.*member = value;
            return {};
          },
          [member](const Case& c) -> std::string {
            return c.*member == Case().*member ? "" : shortest(c.*member);
          }};
}

/// A member that takes one of a few named values.
template <class T>
Key choice_key(const char* name, const char* help, T Case::*member,
               std::vector<std::pair<const char*, T>> choices) {
  std::string needed;
  for (const auto& choice : choices) needed += (needed.empty() ? "" : ", ") + std::string(choice.first);
  return {name, help,
          [member, choices, needed](Case& c, std::string_view text) -> Needed {
            for (const auto& choice : choices) {
              if (text != choice.first) continue;
              c.*member = choice.second;
              return {};
            }
            return "one of " + needed;
          },
          [member, choices](const Case& c) -> std::string {
            if (c.*member == Case().*member) return {};
            for (const auto& choice : choices) {
              if (choice.second == c.*member) return choice.first;
            }
            return {};
          }};
}

Needed parse_lengths(LengthSpec& spec, std::string_view text) {
  const char* needed = "a number, a list 1:64:65, a range 1..500 or lognormal~4096";
  constexpr std::string_view kLognormal = "lognormal~";
  LengthSpec parsed;
  if (text.substr(0, kLognormal.size()) == kLognormal) {
    parsed.kind = LengthSpec::Kind::kLognormal;
    if (!read_list(text.substr(kLognormal.size()), 1, parsed.values)) return needed;
    if (parsed.values.size() != 1) return needed;
  } else if (const std::size_t dots = text.find(".."); dots != std::string_view::npos) {
    parsed.kind = LengthSpec::Kind::kUniform;
    parsed.values.assign(2, 0);
    if (!read_integer(text.substr(0, dots), parsed.values[0])) return needed;
    if (!read_integer(text.substr(dots + 2), parsed.values[1])) return needed;
    if (parsed.values[0] < 0 || parsed.values[1] < parsed.values[0]) return needed;
    if (parsed.values[1] > kMaxNumber) return needed;
  } else {
    if (!read_list(text, 0, parsed.values)) return needed;
    parsed.kind =
        parsed.values.size() == 1 ? LengthSpec::Kind::kConstant : LengthSpec::Kind::kList;
  }
  spec = parsed;
  return {};
}

std::string print_lengths(const LengthSpec& spec) {
  switch (spec.kind) {
    case LengthSpec::Kind::kConstant:
    case LengthSpec::Kind::kList: return join(spec.values);
    case LengthSpec::Kind::kUniform:
      return std::to_string(spec.values[0]) + ".." + std::to_string(spec.values[1]);
    case LengthSpec::Kind::kLognormal: return "lognormal~" + std::to_string(spec.values[0]);
  }
  return {};
}

Key query_key() {
  return {"sq", "query tokens per request: one number, or 1:3:2 (one per request)",
          [](Case& c, std::string_view text) -> Needed {
            std::vector<std::int64_t> values;
            if (!read_list(text, 0, values)) return "a number or a list 1:3:2";
            c.sq = values;
            return {};
          },
          [](const Case& c) -> std::string { return c.sq == Case().sq ? "" : join(c.sq); }};
}

Key length_key() {
  return {"len", "keys per request (global): a number, 1:64:65, 1..500 or lognormal~4096",
          [](Case& c, std::string_view text) { return parse_lengths(c.len, text); },
          [](const Case& c) { return print_lengths(c.len); }};
}

Key cp_key() {
  return {"cp", "context parallel, world:rank:interleave",
          [](Case& c, std::string_view text) -> Needed {
            std::vector<std::int64_t> values;
            if (!read_list(text, 0, values) || values.size() != 3 || values[0] < 1 ||
                values[1] >= values[0] || values[2] < 1) {
              return "world:rank:interleave with rank < world and interleave >= 1";
            }
            c.cp_world = values[0];
            c.cp_rank = values[1];
            c.cp_interleave = values[2];
            return {};
          },
          [](const Case& c) -> std::string {
            if (c.cp_world == 1 && c.cp_rank == 0 && c.cp_interleave == 1) return {};
            return join({c.cp_world, c.cp_rank, c.cp_interleave});
          }};
}

Key seed_key() {
  return {"seed", "seed of all data",
          [](Case& c, std::string_view text) -> Needed {
            const char* end = text.data() + text.size();
            const auto [stop, error] = std::from_chars(text.data(), end, c.seed);
            return error == std::errc() && stop == end ? "" : "an unsigned 64-bit integer";
          },
          [](const Case& c) -> std::string {
            return c.seed == Case().seed ? "" : std::to_string(c.seed);
          }};
}

/// The grammar, in canonical order.
const std::vector<Key>& keys() {
  static const std::vector<Key> table = {
      integer_key("b", "requests", &Case::b, 0, true, kMaxRequests),
      query_key(),
      integer_key("h", "query heads", &Case::h, 1, true),
      integer_key("l", "kv_lora_rank (512)", &Case::l, 1),
      integer_key("r", "qk_rope_head_dim (64)", &Case::r, 0),
      length_key(),
      integer_key("page", "tokens of a page (64)", &Case::page, 1),
      choice_key<DType>("q", "query type (bf16)", &Case::q,
                        {{"bf16", DType::kBF16}, {"f16", DType::kF16}, {"e4m3", DType::kE4M3}}),
      choice_key<KvFormat>("kv", "cache format (bf16)", &Case::kv,
                           {{"bf16", KvFormat::kBF16},
                            {"f16", KvFormat::kF16},
                            {"e4m3", KvFormat::kE4M3},
                            {"fp8_ds_mla", KvFormat::kFp8DsMla}}),
      choice_key<DType>("out", "output type (q's; bf16 for e4m3 q)", &Case::out,
                        {{"bf16", DType::kBF16}, {"f16", DType::kF16}, {"f32", DType::kF32}}),
      integer_key("k", "entries of a sparse index row; 0: dense", &Case::k, 0),
      bool_key("causal", "causal mask (1)", &Case::causal),
      integer_key("window", "sliding window; 0: off", &Case::window, 0),
      double_key("cap", "logits_soft_cap; 0: off", &Case::cap),
      bool_key("sinks", "attention sinks (0)", &Case::sinks),
      bool_key("alibi", "ALiBi slopes (0)", &Case::alibi),
      cp_key(),
      choice_key<LseBase>("lse", "base of lse, e or 2 (e)", &Case::lse,
                          {{"e", LseBase::kE}, {"2", LseBase::kTwo}}),
      integer_key("pad", "padding rows after the last request", &Case::pad, 0),
      double_key("scale", "bmm1_scale (1/sqrt(192))", &Case::scale),
      double_key("vscale", "bmm2_scale (1)", &Case::vscale),
      choice_key<Scores>("scores", "normal, big (+-1e4), equal or dominant", &Case::scores,
                         {{"normal", Scores::kNormal},
                          {"big", Scores::kBig},
                          {"equal", Scores::kEqual},
                          {"dominant", Scores::kDominant}}),
      integer_key("fixed", "fixed_split: tokens of a split; 0: off", &Case::fixed, 0),
      integer_key("splits", "num_splits; 0: chosen by cost", &Case::splits, 0),
      integer_key("pool", "pages that nobody owns, besides page 0 (2)", &Case::pool, 0),
      bool_key("strides", "gaps between rows of q, cache, block table (0)", &Case::strides),
      bool_key("qsplit", "q_nope and q_pe instead of q (0)", &Case::qsplit),
      integer_key("maxlen", "max_seq_len (the longest request)", &Case::maxlen, 0),
      integer_key("maxq", "max_query_len (the most query tokens)", &Case::maxq, 0),
      seed_key(),
  };
  return table;
}

Status check_lists(const Case& c) {
  const auto requests = static_cast<std::size_t>(c.b);
  if (c.sq.size() != 1 && c.sq.size() != requests) {
    return bad_argument("problem", "sq", text(c.sq.size(), " numbers"), text("1 or b = ", c.b));
  }
  if (c.len.kind == LengthSpec::Kind::kList && c.len.values.size() != requests) {
    return bad_argument("problem", "len", text(c.len.values.size(), " numbers"),
                        text("1 or b = ", c.b));
  }
  return {};
}

// A DecodeProblem knows bounds where a Case knows lengths.
Status apply_bounds(Case& c, const std::vector<std::string_view>& given, std::int64_t num_tokens) {
  const auto has = [&](std::string_view name) {
    return std::find(given.begin(), given.end(), name) != given.end();
  };
  if (has("t")) {
    if (has("sq") || c.b == 0) {
      return bad_argument("problem", "t", num_tokens, "sq instead (t is for problems without sq)");
    }
    c.sq = {num_tokens / c.b};
    if (!has("pad")) c.pad = num_tokens % c.b;
  }
  if (has("maxlen") && !has("len")) {
    c.len.values = {c.maxlen * c.cp_world};
    if (!has("t") && !has("sq")) c.sq = {std::max<std::int64_t>(1, c.maxq)};
  }
  return {};
}

}  // namespace

Result<Case> parse_case(const std::string& problem) {
  Case parsed;
  std::vector<std::string_view> given;
  std::int64_t num_tokens = 0;
  std::string_view rest = problem;
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    const std::string_view pair = rest.substr(0, comma);
    rest.remove_prefix(comma == std::string_view::npos ? rest.size() : comma + 1);
    const std::size_t equals = pair.find('=');
    if (equals == std::string_view::npos) {
      return bad_argument("problem", text("'", pair, "'"), "no '='", "key=value pairs joined by commas");
    }
    const std::string_view name = pair.substr(0, equals);
    const std::string_view value = pair.substr(equals + 1);
    if (std::find(given.begin(), given.end(), name) != given.end()) {
      return bad_argument("problem", std::string(name), "the key twice", "it once");
    }
    given.push_back(name);
    if (name == "t") {
      if (read_integer(value, num_tokens) && num_tokens >= 0 && num_tokens <= kMaxNumber) continue;
      return bad_argument("problem", "t", text("'", value, "'"), "an integer from 0");
    }
    const auto key = std::find_if(keys().begin(), keys().end(),
                                  [name](const Key& k) { return name == k.name; });
    if (key == keys().end()) {
      std::string names;
      for (const Key& k : keys()) names += text(names.empty() ? "" : " ", k.name);
      return bad_argument("problem", text("'", name, "'"), "an unknown key", text("one of ", names));
    }
    const Needed needed = key->parse(parsed, value);
    if (!needed.empty()) {
      return bad_argument("problem", std::string(name), text("'", value, "'"), needed);
    }
  }
  MLA_RETURN_IF_ERROR(apply_bounds(parsed, given, num_tokens));
  MLA_RETURN_IF_ERROR(check_lists(parsed));
  return parsed;
}

std::string to_string(const Case& problem) {
  std::string result;
  for (const Key& key : keys()) {
    const std::string value = key.print(problem);
    if (value.empty()) continue;
    if (!result.empty()) result += ',';
    result += text(key.name, '=', value);
  }
  return result;
}

std::string safe_name(const Case& problem) {
  std::string name;
  for (char c : to_string(problem)) {
    if (c == '=') continue;
    if (c == ',') name += '_';
    else if (c == ':') name += 'x';
    else if (c == '.') name += 'p';
    else if (c == '-') name += 'm';
    else if (std::isalnum(static_cast<unsigned char>(c)) != 0) name += c;
    else name += '_';
  }
  return name;
}

std::string grammar_help() {
  std::string help;
  for (const Key& key : keys()) {
    std::string name = key.name;
    name.resize(std::max<std::size_t>(name.size(), 8), ' ');
    help += text("  ", name, key.help, '\n');
  }
  return help;
}

CaseLengths case_lengths(const Case& problem) {
  CaseLengths lengths;
  Rng rng(problem.seed, kLengthStream);
  std::int64_t token = 0;
  lengths.query_start_loc.push_back(0);
  for (std::int64_t request = 0; request < problem.b; ++request) {
    const auto i = static_cast<std::size_t>(request);
    const std::int64_t query_len = problem.sq.size() == 1 ? problem.sq[0] : problem.sq[i];
    std::int64_t global_len = 0;
    switch (problem.len.kind) {
      case LengthSpec::Kind::kConstant: global_len = problem.len.values[0]; break;
      case LengthSpec::Kind::kList: global_len = problem.len.values[i]; break;
      case LengthSpec::Kind::kUniform:
        global_len = rng.between(problem.len.values[0], problem.len.values[1]);
        break;
      case LengthSpec::Kind::kLognormal: {
        const double spread = std::exp(static_cast<double>(rng.normal()) - 0.5);
        const auto drawn = std::llround(static_cast<double>(problem.len.values[0]) * spread);
        global_len = std::max<std::int64_t>(1, drawn);
        break;
      }
    }
    // Tokens of whole rounds of the deal, then of the last, incomplete round.
    const std::int64_t round_len = problem.cp_world * problem.cp_interleave;
    const std::int64_t in_round = global_len % round_len - problem.cp_rank * problem.cp_interleave;
    const std::int64_t seq_len = global_len / round_len * problem.cp_interleave +
                                 std::clamp<std::int64_t>(in_round, 0, problem.cp_interleave);
    lengths.query_lens.push_back(query_len);
    lengths.global_lens.push_back(global_len);
    lengths.seq_lens.push_back(seq_len);
    lengths.max_seq_len = std::max(lengths.max_seq_len, seq_len);
    lengths.max_query_len = std::max(lengths.max_query_len, query_len);
    token += query_len;
    lengths.query_start_loc.push_back(static_cast<std::int32_t>(token));
  }
  lengths.num_tokens = token + problem.pad;
  return lengths;
}

bool gives_query_start_loc(const Case& problem) noexcept {
  return problem.sq.size() != 1 || problem.pad > 0;
}

DecodeProblem decode_problem(const Case& problem, const CaseLengths& lengths) {
  DecodeProblem result;
  result.num_requests = problem.b;
  result.num_tokens = lengths.num_tokens;
  result.num_heads = problem.h;
  result.kv_lora_rank = problem.l;
  result.qk_rope_head_dim = problem.r;
  result.page_size = problem.page;
  result.max_seq_len = problem.maxlen > 0 ? problem.maxlen : lengths.max_seq_len;
  result.max_query_len = problem.maxq > 0 ? problem.maxq
                                          : std::max<std::int64_t>(1, lengths.max_query_len);
  result.num_indices = problem.k;
  result.q_dtype = problem.q;
  result.kv_format = problem.kv;
  result.out_dtype = problem.out;
  result.causal = problem.causal;
  result.logits_soft_cap = static_cast<float>(problem.cap);
  result.sliding_window = problem.window;
  result.uses_sinks = problem.sinks;
  result.uses_alibi_slopes = problem.alibi;
  result.cp_world = problem.cp_world;
  result.cp_rank = problem.cp_rank;
  result.cp_interleave = problem.cp_interleave;
  result.lse_base = problem.lse;
  return result;
}

PlanOptions plan_options(const Case& problem, PlanOptions base) {
  base.num_splits = problem.splits;
  base.fixed_split = problem.fixed;
  return base;
}

}  // namespace mla::testkit
