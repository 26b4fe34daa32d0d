// Communicator: what context-parallel decode needs of a group of ranks. The library brings one over
// the threads of a process, and over MPI and NCCL where it was built with them; an engine that has
// a group of its own derives from the class.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "mla/export.hpp"
#include "mla/status.hpp"

namespace mla {

/// One rank's end of a group of W ranks. Every rank calls the same collectives in the same order
/// with the same sizes; a rank's calls come from one thread at a time. Blocks are in rank order and
/// dense.
///
/// Payload collectives work on the memory that `on_device` names. On host memory they return when
/// done; on device memory they are ordered on `stream` (a cudaStream_t) and return at once.
///
/// A group that lost a rank stays lost: each later call returns kPeer, or the error that `abort`
/// gave.
class MLA_API Communicator {
 public:
  virtual ~Communicator() = default;

  virtual const char* name() const noexcept = 0;  ///< "threads", "mpi", "nccl"
  virtual int rank() const noexcept = 0;          ///< 0 <= rank < world
  virtual int world() const noexcept = 0;         ///< W
  virtual bool on_device() const noexcept = 0;    ///< payload lies in device memory

  /// receive[r] = rank r's send: `bytes` sent, W * `bytes` received.
  virtual Status all_gather(const void* send, void* receive, std::size_t bytes, void* stream) = 0;

  /// receive[r] = rank r's send[rank()]: W * `bytes` sent and received.
  virtual Status all_to_all(const void* send, void* receive, std::size_t bytes, void* stream) = 0;

  /// receive = sum over r of rank r's send[rank()]: W * `count` f32 sent, `count` received.
  virtual Status reduce_scatter(const float* send, float* receive, std::size_t count,
                                void* stream) = 0;

  /// all_gather on host memory, done on return, whatever `on_device` says: how ranks agree before
  /// payload moves.
  virtual Status exchange(const void* send, void* receive, std::size_t bytes) = 0;

  /// Ends the group: calls that wait, here and on every rank that can be reached, return `reason`.
  virtual void abort(const Status& reason) noexcept = 0;

 protected:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
};

/// How long a rank waits in a collective for the others before the group counts as lost.
inline constexpr std::chrono::milliseconds kDefaultPeerTimeout{30000};

/// A group over threads of this process: element r is rank r's end, to be used by one thread. Host
/// memory. Sums run in rank order, so results have the same bits in every call. Destroying an end
/// takes its rank out: the others' next collective returns kPeer at once. kInvalidArgument: world <
/// 1 or timeout <= 0.
MLA_API Result<std::vector<std::unique_ptr<Communicator>>> make_thread_communicators(
    int world, std::chrono::milliseconds timeout = kDefaultPeerTimeout);

}  // namespace mla
