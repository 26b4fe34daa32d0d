// A group of ranks over MPI. In a library of its own, libmla_mpi (CMake target mla::mpi), so that
// libmla needs no MPI; link your own MPI next to it.
#pragma once

#include <mpi.h>

#include <memory>

#include "mla/communicator.hpp"

namespace mla {

/// This process's end of a group of all ranks of `comm`, which is duplicated: collective over
/// `comm`. MPI must be initialised (MPI_THREAD_SERIALIZED when calls come from several threads),
/// and stays the caller's to finalise, after the end is destroyed. Host memory.
///
/// Payload passes through buffers of the communicator's own, so that a call that gave up on a peer
/// leaves none of the caller's memory in MPI's hands. Sums run in rank order, with the bits of the
/// group over threads. A process that dies is mpirun's to notice, and ends the job; one that hangs
/// is kPeer after `timeout`, and then the process should end by MPI_Abort, since MPI_Finalize would
/// wait for it. kInvalidArgument: MPI is not initialised, timeout <= 0. kPeer: MPI reported an
/// error.
MLA_API Result<std::unique_ptr<Communicator>> make_mpi_communicator(
    MPI_Comm comm, std::chrono::milliseconds timeout = kDefaultPeerTimeout);

}  // namespace mla
