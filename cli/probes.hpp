// What the machine gives right now: peak FMA rate and DRAM read bandwidth, at a thread count. On a
// machine that others use too, a time means little without them.
#pragma once

#include <string>
#include <vector>

namespace mla::cli {

enum class FmaIsa { kBaseline, kAvx2, kAvx512 };

/// The instruction set whose f32 FMA peak a backend row is compared with.
FmaIsa fma_isa(const std::string& backend);
const char* to_string(FmaIsa isa) noexcept;

/// GFLOP/s of independent f32 fused multiply-adds on `threads` threads, about a millisecond each.
/// 0 when the machine lacks the instruction set.
double fma_gflops(FmaIsa isa, int threads);

/// GB/s of reading memory that no cache holds. The object owns the memory.
class BandwidthProbe {
 public:
  BandwidthProbe();
  /// Reads a slice; successive calls walk through the memory.
  double gigabytes_per_second(int threads);

 private:
  std::vector<unsigned long long> memory_;
  std::size_t next_ = 0;
};

}  // namespace mla::cli
