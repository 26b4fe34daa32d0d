// Compiled once per Highway target, so that each instruction set's own peak can be measured.
#include "probes.hpp"

#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "probes.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace mla::cli {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// `rounds` rounds of 12 independent chains; returns the FLOPs made. The factors keep the values normal.
double fma_rounds(long rounds, float* sink) {
  const hn::ScalableTag<float> d;
  const auto factor = hn::Set(d, 0.999F);
  const auto addend = hn::Set(d, 0.001F);
  // Chains with equal values would be one chain to the compiler.
  auto a0 = hn::Set(d, 1.0F), a1 = hn::Set(d, 1.1F), a2 = hn::Set(d, 1.2F), a3 = hn::Set(d, 1.3F);
  auto a4 = hn::Set(d, 1.4F), a5 = hn::Set(d, 1.5F), a6 = hn::Set(d, 1.6F), a7 = hn::Set(d, 1.7F);
  auto a8 = hn::Set(d, 1.8F), a9 = hn::Set(d, 1.9F), a10 = hn::Set(d, 2.0F), a11 = hn::Set(d, 2.1F);
  for (long i = 0; i < rounds; ++i) {
    a0 = hn::MulAdd(a0, factor, addend);
    a1 = hn::MulAdd(a1, factor, addend);
    a2 = hn::MulAdd(a2, factor, addend);
    a3 = hn::MulAdd(a3, factor, addend);
    a4 = hn::MulAdd(a4, factor, addend);
    a5 = hn::MulAdd(a5, factor, addend);
    a6 = hn::MulAdd(a6, factor, addend);
    a7 = hn::MulAdd(a7, factor, addend);
    a8 = hn::MulAdd(a8, factor, addend);
    a9 = hn::MulAdd(a9, factor, addend);
    a10 = hn::MulAdd(a10, factor, addend);
    a11 = hn::MulAdd(a11, factor, addend);
  }
  a0 = hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)), hn::Add(hn::Add(a4, a5), hn::Add(a6, a7)));
  a0 = hn::Add(a0, hn::Add(hn::Add(a8, a9), hn::Add(a10, a11)));
  *sink = hn::GetLane(a0);
  return 2.0 * 12.0 * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

/// XOR of `count` words (a multiple of 64); four chains hide the latency of loads.
unsigned long long read_words(const unsigned long long* words, std::size_t count) {
  const hn::ScalableTag<uint64_t> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto* in = reinterpret_cast<const uint64_t*>(words);
  auto a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0;
  for (std::size_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    a0 = hn::Xor(a0, hn::LoadU(d, in + i));
    a1 = hn::Xor(a1, hn::LoadU(d, in + i + lanes));
    a2 = hn::Xor(a2, hn::LoadU(d, in + i + 2 * lanes));
    a3 = hn::Xor(a3, hn::LoadU(d, in + i + 3 * lanes));
  }
  return hn::GetLane(hn::Xor(hn::Xor(a0, a1), hn::Xor(a2, a3)));
}

}  // namespace HWY_NAMESPACE
}  // namespace mla::cli
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>

namespace mla::cli {

HWY_EXPORT(read_words);

namespace {

using Clock = std::chrono::steady_clock;
using FmaFunction = double (*)(long, float*);

constexpr std::size_t kSliceWords = std::size_t{4} << 20;  // 32 MiB a probe

FmaFunction fma_function(FmaIsa isa) {
  [[maybe_unused]] const auto has = [](long long target) {
    return (static_cast<long long>(hwy::SupportedTargets()) & target) != 0;
  };
#if HWY_TARGETS & HWY_AVX3
  if (isa == FmaIsa::kAvx512) return has(HWY_AVX3) ? N_AVX3::fma_rounds : nullptr;
#endif
#if HWY_TARGETS & HWY_AVX2
  if (isa == FmaIsa::kAvx2) return has(HWY_AVX2) ? N_AVX2::fma_rounds : nullptr;
#endif
#if HWY_TARGETS & HWY_SSE4
  if (isa == FmaIsa::kBaseline && has(HWY_SSE4)) return N_SSE4::fma_rounds;
#endif
  return isa == FmaIsa::kBaseline ? HWY_STATIC_DISPATCH(fma_rounds) : nullptr;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::size_t probe_words() {
  std::size_t cache = std::size_t{64} << 20;
#ifdef _SC_LEVEL3_CACHE_SIZE
  if (const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE); l3 > 0) {
    cache = std::max(cache, static_cast<std::size_t>(l3));
  }
#endif
  const std::size_t slices = (4 * cache / sizeof(unsigned long long) + kSliceWords - 1) / kSliceWords;
  return std::min<std::size_t>(slices, 64) * kSliceWords;
}

}  // namespace

FmaIsa fma_isa(const std::string& backend) {
  if (backend == "cpu_avx2") return FmaIsa::kAvx2;
  if (backend == "cpu_portable") return FmaIsa::kBaseline;
  return fma_function(FmaIsa::kAvx512) != nullptr ? FmaIsa::kAvx512
         : fma_function(FmaIsa::kAvx2) != nullptr ? FmaIsa::kAvx2
                                                  : FmaIsa::kBaseline;
}

const char* to_string(FmaIsa isa) noexcept {
  switch (isa) {
    case FmaIsa::kBaseline: return "baseline";
    case FmaIsa::kAvx2: return "AVX2";
    case FmaIsa::kAvx512: return "AVX-512";
  }
  return "unknown";
}

double fma_gflops(FmaIsa isa, int threads) {
  const FmaFunction function = fma_function(isa);
  if (function == nullptr) return 0.0;
  constexpr long kRounds = 500'000;  // about a millisecond
  double flops = 0.0;
  double seconds = 0.0;
  // The slowest thread counts: a kernel waits for it too.
#pragma omp parallel num_threads(threads) reduction(+ : flops) reduction(max : seconds)
  {
    float sink = 0.0F;
    function(1000, &sink);
#pragma omp barrier
    const Clock::time_point start = Clock::now();
    flops += function(kRounds, &sink);
    seconds = std::max(seconds, seconds_since(start));
    if (sink == 12345.0F) flops += 1.0;  // keeps the chains alive
  }
  return seconds > 0.0 ? flops / seconds * 1e-9 : 0.0;
}

BandwidthProbe::BandwidthProbe() : memory_(probe_words(), 1) {}

double BandwidthProbe::gigabytes_per_second(int threads) {
  const unsigned long long* slice = memory_.data() + next_;
  next_ = (next_ + kSliceWords) % memory_.size();
  const std::size_t share = kSliceWords / static_cast<std::size_t>(threads) / 64 * 64;
  std::atomic<unsigned long long> sink{0};
  double seconds = 0.0;
#pragma omp parallel num_threads(threads) reduction(max : seconds)
  {
    const auto thread = static_cast<std::size_t>(omp_get_thread_num());
#pragma omp barrier
    const Clock::time_point start = Clock::now();
    sink ^= HWY_DYNAMIC_DISPATCH(read_words)(slice + thread * share, share);
    seconds = std::max(seconds, seconds_since(start));
  }
  const double bytes = static_cast<double>(share * sizeof(unsigned long long)) * threads;
  return seconds > 0.0 ? bytes / seconds * 1e-9 : 0.0;
}

}  // namespace mla::cli

#endif  // HWY_ONCE
