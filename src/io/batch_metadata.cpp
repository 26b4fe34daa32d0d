#include "io/batch_metadata.hpp"

#include <charconv>
#include <cmath>
#include <iterator>

#include "core/diagnostics.hpp"
#include "io/safetensors_header.hpp"

namespace mla::io {
namespace {

constexpr const char* kKeys[] = {
    "format",         "kv_lora_rank", "qk_rope_head_dim", "bmm1_scale",    "bmm2_scale",
    "causal",         "cp_world",     "cp_rank",          "cp_interleave", "logits_soft_cap",
    "sliding_window", "lse_base",     "out_dtype",        "kv_layer",      "kv_pool_pages",
};

constexpr const char* kTensors[] = {
    "q",        "q_nope",          "q_pe",
    "kv_cache", "block_table",     "seq_lens",
    "sinks",    "query_start_loc", "causal_seqlens_kv_global",
    "indices",  "alibi_slopes",    "kv_page_ids",
};

/// Names shorter than this have too many honest neighbours.
constexpr std::size_t kShortestGuess = 4;

std::string folded(std::string_view name) {
  std::string result;
  for (char c : name) {
    if (c == '_' || c == '-') continue;
    result += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return result;
}

/// Whether one insertion, deletion, replacement or swap of neighbours at most turns `a` into `b`.
bool one_edit_apart(std::string_view a, std::string_view b) noexcept {
  if (a.size() > b.size()) std::swap(a, b);
  if (b.size() - a.size() > 1) return false;
  std::size_t same = 0;
  while (same < a.size() && a[same] == b[same]) ++same;
  if (same == b.size()) return true;
  const std::string_view rest_a = a.substr(same);
  const std::string_view rest_b = b.substr(same);
  if (a.size() < b.size()) return rest_a == rest_b.substr(1);
  if (rest_a.substr(1) == rest_b.substr(1)) return true;
  return rest_a.size() > 1 && rest_a[0] == rest_b[1] && rest_a[1] == rest_b[0] &&
         rest_a.substr(2) == rest_b.substr(2);
}

/// The whole of `raw` as one number.
template <class Number>
bool parse_whole(const std::string& raw, Number* value) noexcept {
  const char* end = raw.data() + raw.size();
  const std::from_chars_result result = std::from_chars(raw.data(), end, *value);
  return result.ec == std::errc() && result.ptr == end;
}

}  // namespace

std::span<const char* const> known_batch_keys() noexcept {
  return kKeys;
}
std::span<const char* const> known_batch_tensors() noexcept {
  return kTensors;
}

const char* likely_name(std::string_view name, std::span<const char* const> known) noexcept {
  if (name.size() < kShortestGuess || name.size() > 64) return nullptr;
  const std::string plain = folded(name);
  for (const char* candidate : known) {
    const std::string other = folded(candidate);
    if (other.size() >= kShortestGuess && one_edit_apart(plain, other)) return candidate;
  }
  return nullptr;
}

const std::string* MetadataParser::find(const char* key) const {
  const auto position = metadata_.find(key);
  return position == metadata_.end() ? nullptr : &position->second;
}

Status MetadataParser::refuse(const char* key, const std::string& needed) const {
  const std::string* value = find(key);
  return bad_argument(operation_, text(source_, ": metadata '", key, "'"),
                      value == nullptr ? std::string("no such key") : quote(*value), needed);
}

Status MetadataParser::require(const char* key, const std::string& needed) const {
  return has(key) ? Status() : refuse(key, needed);
}

Status MetadataParser::integer(const char* key, std::int64_t lowest, std::int64_t highest,
                               std::int64_t* value) const {
  const std::string* raw = find(key);
  if (raw == nullptr) return {};
  std::int64_t parsed = 0;
  if (!parse_whole(*raw, &parsed) || parsed < lowest || parsed > highest) {
    return refuse(key, text("an integer from ", lowest, " to ", highest));
  }
  *value = parsed;
  return {};
}

Status MetadataParser::number(const char* key, float* value) const {
  const std::string* raw = find(key);
  if (raw == nullptr) return {};
  float parsed = 0.0F;
  if (!parse_whole(*raw, &parsed) || !std::isfinite(parsed)) {
    return refuse(key, "a finite decimal number within the range of f32");
  }
  *value = parsed;
  return {};
}

Status MetadataParser::boolean(const char* key, bool* value) const {
  const std::string* raw = find(key);
  if (raw == nullptr) return {};
  if (*raw == "true" || *raw == "True" || *raw == "1") {
    *value = true;
  } else if (*raw == "false" || *raw == "False" || *raw == "0") {
    *value = false;
  } else {
    return refuse(key, "true or false");
  }
  return {};
}

Status MetadataParser::lse_base(const char* key, LseBase* value) const {
  const std::string* raw = find(key);
  if (raw == nullptr) return {};
  if (*raw != "e" && *raw != "2") return refuse(key, "e or 2");
  *value = *raw == "e" ? LseBase::kE : LseBase::kTwo;
  return {};
}

Status MetadataParser::out_dtype(const char* key, DType* value) const {
  const std::string* raw = find(key);
  if (raw == nullptr) return {};
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    if (*raw == safetensors_dtype(dtype) || *raw == to_string(dtype)) {
      *value = dtype;
      return {};
    }
  }
  return refuse(key, "BF16, F16 or F32");
}

Status MetadataParser::format(const char* key) const {
  const std::string* raw = find(key);
  return raw != nullptr && *raw == kBatchFormat ? Status() : refuse(key, kBatchFormat);
}

}  // namespace mla::io
