// Timestamps of the roles, for measuring only: compiled in with -DMLA_CUDA_TRACE, else nothing.
// A trace is [CTAs][kTraceEvents] nanoseconds of the global timer; the last occurrence of an event
// wins.
#pragma once

#include <cstdint>

namespace mla::cuda {

enum TraceEvent : int {
  kTraceStart,
  kTraceShare,        // the share is known
  kTraceFirstCopy,    // producer: first copy issued
  kTraceLastCopy,     // producer: done
  kTraceQuery,        // scores: Q of the last piece is in place
  kTraceFirstScores,  // scores: QK of the piece's first tile is done
  kTraceScoresDone,   // scores: last piece finished
  kTraceValuesDone,   // values: PV of the last piece finished
  kTraceStored,       // values: output or partial written
  kTraceArrived,      // values: other pieces have arrived
  kTraceWeighed,      // values: weights of the pieces are known
  kTraceReduced,      // values: slice written
  kTraceEnd,
  // Sums of clocks over all tiles, of one thread.
  kSumWaitFull = 16,  // scores: waiting for copies
  kSumProducts,       // scores: from the last copy to the end of QK
  kSumSoftmax,        // scores: until P waits for its buffer
  kSumWaitEmpty,      // scores: waiting for the P buffer
  kSumStoreP,         // scores: P written and announced
  kSumWaitP,          // values: waiting for P
  kSumValues,         // values: PV
  kTraceEvents = 24
};

#if defined(MLA_CUDA_TRACE)
__device__ uint64_t g_trace[256 * kTraceEvents];
__device__ __forceinline__ void trace(TraceEvent event) {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  g_trace[blockIdx.x * kTraceEvents + event] = now;
}
__device__ __forceinline__ uint64_t clock_now() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
}
/// Adds the clocks since the last lap to an event.
class TraceLaps {
 public:
  __device__ explicit TraceLaps(bool on) : on_(on), last_(clock_now()) {
    if (on)
      for (int e = kSumWaitFull; e < kTraceEvents; ++e) sums_[e - kSumWaitFull] = 0;
  }
  __device__ void lap(TraceEvent event) {
    const uint64_t now = clock_now();
    sums_[event - kSumWaitFull] += now - last_;
    last_ = now;
  }
  __device__ void write(TraceEvent first, TraceEvent last) {
    for (int e = first; e <= last && on_; ++e)
      g_trace[blockIdx.x * kTraceEvents + e] = sums_[e - kSumWaitFull];
  }

 private:
  bool on_;
  uint64_t last_;
  uint64_t sums_[kTraceEvents - kSumWaitFull];
};
#else
__device__ __forceinline__ void trace(TraceEvent) {}
class TraceLaps {
 public:
  __device__ explicit TraceLaps(bool) {}
  __device__ void lap(TraceEvent) {}
  __device__ void write(TraceEvent, TraceEvent) {}
};
#endif

}  // namespace mla::cuda
