// Timestamps of the roles, for measuring only: compiled in with -DMLA_SM90_TRACE, else nothing.
// A trace is [CTAs][kTraceEvents] nanoseconds of the global timer; the last occurrence of an event wins.
#pragma once

#include <cstdint>

namespace mla::sm90 {

enum TraceEvent : int {
  kTraceStart,
  kTraceShare,          // the share is known
  kTraceFirstCopy,      // producer: first copy issued
  kTraceLastCopy,       // producer: done
  kTraceQuery,          // scores: Q of the last piece is in place
  kTraceFirstScores,    // scores: QK of the piece's first tile is done
  kTraceScoresDone,     // scores: last piece finished
  kTraceValuesDone,     // values: PV of the last piece finished
  kTraceStored,         // values: output or partial written
  kTraceArrived,        // values: other pieces have arrived
  kTraceWeighed,        // values: weights of the pieces are known
  kTraceReduced,        // values: slice written
  kTraceEnd,
  kTraceEvents = 16
};

#if defined(MLA_SM90_TRACE)
__device__ uint64_t g_trace[256 * kTraceEvents];
__device__ __forceinline__ void trace(TraceEvent event) {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  g_trace[blockIdx.x * kTraceEvents + event] = now;
}
#else
__device__ __forceinline__ void trace(TraceEvent) {}
#endif

}  // namespace mla::sm90
