// A group of ranks over MPI, by non-blocking collectives that are polled until a deadline.
//
// Each poll also looks for a farewell: a message in which a rank that gave up says why. So `abort`
// reaches ranks that wait in a collective which can no more complete.
#include <algorithm>
#include <climits>
#include <cstring>
#include <thread>

#include "core/diagnostics.hpp"
#include "mla/mpi.hpp"

namespace mla {
namespace {

constexpr int kFarewellTag = 1;
constexpr std::size_t kUnit = 4096;  // blocks travel in whole units: their number fits MPI's int

struct Farewell {
  std::int32_t code = 0;
  char message[1020] = {};
};

Status check(const char* operation, int error) {
  if (error == MPI_SUCCESS) return {};
  char message[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(error, message, &length);
  return {StatusCode::kPeer, text(operation, ": MPI: found ", message, ", needed success")};
}

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, MPI_Comm farewells, std::chrono::milliseconds timeout)
      : comm_(comm), farewells_(farewells), timeout_(timeout) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &world_);
    MPI_Type_contiguous(static_cast<int>(kUnit), MPI_BYTE, &unit_);
    MPI_Type_commit(&unit_);
  }

  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    // What a lost group still has in flight may not be freed.
    if (finalized != 0 || !lost_.ok()) return;
    MPI_Type_free(&unit_);
    MPI_Comm_free(&farewells_);
    MPI_Comm_free(&comm_);
  }

  const char* name() const noexcept override { return "mpi"; }
  int rank() const noexcept override { return rank_; }
  int world() const noexcept override { return world_; }
  bool on_device() const noexcept override { return false; }

  Status all_gather(const void* send, void* receive, std::size_t bytes, void*) override {
    return gather("all_gather", send, receive, bytes);
  }
  Status exchange(const void* send, void* receive, std::size_t bytes) override {
    return gather("exchange", send, receive, bytes);
  }

  Status all_to_all(const void* send, void* receive, std::size_t bytes, void*) override {
    MLA_RETURN_IF_ERROR(swap("all_to_all", send, bytes));
    for (int r = 0; r < world_ && bytes > 0; ++r) {
      std::memcpy(static_cast<std::byte*>(receive) + static_cast<std::size_t>(r) * bytes,
                  received(r, bytes), bytes);
    }
    return {};
  }

  Status reduce_scatter(const float* send, float* receive, std::size_t count, void*) override {
    const std::size_t bytes = count * sizeof(float);
    MLA_RETURN_IF_ERROR(swap("reduce_scatter", send, bytes));
    std::fill(receive, receive + count, 0.0F);
    for (int r = 0; r < world_; ++r) {
      const float* block = reinterpret_cast<const float*>(received(r, bytes));
      for (std::size_t i = 0; i < count; ++i) receive[i] += block[i];
    }
    return {};
  }

  void abort(const Status& reason) noexcept override {
    if (!lost_.ok()) return;
    lost_ = reason;
    auto* farewell = new (std::nothrow) Farewell;  // in MPI's hands until the process ends
    if (farewell == nullptr) return;
    farewell->code = static_cast<std::int32_t>(reason.code());
    reason.message().copy(farewell->message, sizeof(farewell->message) - 1);
    for (int r = 0; r < world_; ++r) {
      MPI_Request request;
      if (r == rank_) continue;
      MPI_Isend(farewell, sizeof(Farewell), MPI_BYTE, r, kFarewellTag, farewells_, &request);
      int done = 0;
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    }
  }

 private:
  static std::size_t padded(std::size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }
  const std::byte* received(int rank, std::size_t bytes) const {
    return receive_.data() + static_cast<std::size_t>(rank) * padded(bytes);
  }

  Status gather(const char* operation, const void* send, void* receive, std::size_t bytes) {
    MLA_RETURN_IF_ERROR(prepare(operation, bytes, 1));
    if (bytes > 0) std::memcpy(send_.data(), send, bytes);
    MPI_Request request = MPI_REQUEST_NULL;
    MLA_RETURN_IF_ERROR(start(operation,
                              MPI_Iallgather(send_.data(), units_, unit_, receive_.data(), units_,
                                             unit_, comm_, &request),
                              request));
    for (int r = 0; r < world_ && bytes > 0; ++r) {
      std::memcpy(static_cast<std::byte*>(receive) + static_cast<std::size_t>(r) * bytes,
                  received(r, bytes), bytes);
    }
    return {};
  }

  /// Leaves what the ranks sent here in `receive_`.
  Status swap(const char* operation, const void* send, std::size_t bytes) {
    MLA_RETURN_IF_ERROR(prepare(operation, bytes, static_cast<std::size_t>(world_)));
    for (int r = 0; r < world_ && bytes > 0; ++r) {
      const auto block = static_cast<std::size_t>(r);
      std::memcpy(send_.data() + block * padded(bytes),
                  static_cast<const std::byte*>(send) + block * bytes, bytes);
    }
    MPI_Request request = MPI_REQUEST_NULL;
    return start(
        operation,
        MPI_Ialltoall(send_.data(), units_, unit_, receive_.data(), units_, unit_, comm_, &request),
        request);
  }

  Status prepare(const char* operation, std::size_t bytes, std::size_t num_sent) {
    if (!lost_.ok()) return lost_;
    const std::size_t block = padded(bytes);
    if (block / kUnit > INT_MAX) {
      return bad_argument(operation, "bytes", bytes, text("at most ", kUnit * INT_MAX));
    }
    units_ = static_cast<int>(block / kUnit);
    if (send_.size() < block * num_sent) send_.resize(block * num_sent);
    if (receive_.size() < block * static_cast<std::size_t>(world_)) {
      receive_.resize(block * static_cast<std::size_t>(world_));
    }
    return {};
  }

  /// Polls what was started until it is done, a farewell comes or the time is over.
  Status start(const char* operation, int started, MPI_Request& request) {
    Status status = check(operation, started);
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    for (int done = 0; status.ok();) {
      status = check(operation, MPI_Test(&request, &done, MPI_STATUS_IGNORE));
      if (done != 0) break;
      if (status.ok()) status = read_farewell();
      if (status.ok() && std::chrono::steady_clock::now() >= deadline) {
        status = {StatusCode::kPeer, text(operation, ": ranks: found not all there within ",
                                          timeout_.count(), " ms, needed all ", world_)};
      }
      std::this_thread::yield();
    }
    if (status.ok()) return {};
    lost_ = status;
    // The buffers stay in MPI's hands until the process ends.
    new std::vector<std::byte>(std::move(send_));
    new std::vector<std::byte>(std::move(receive_));
    return status;
  }

  Status read_farewell() {
    int found = 0;
    MPI_Status from;
    MLA_RETURN_IF_ERROR(
        check("farewell", MPI_Iprobe(MPI_ANY_SOURCE, kFarewellTag, farewells_, &found, &from)));
    if (found == 0) return {};
    Farewell farewell;
    MLA_RETURN_IF_ERROR(
        check("farewell", MPI_Recv(&farewell, sizeof(Farewell), MPI_BYTE, from.MPI_SOURCE,
                                   kFarewellTag, farewells_, MPI_STATUS_IGNORE)));
    return {static_cast<StatusCode>(farewell.code), farewell.message};
  }

  MPI_Comm comm_, farewells_;
  std::chrono::milliseconds timeout_;
  MPI_Datatype unit_ = MPI_DATATYPE_NULL;
  int rank_ = 0, world_ = 1, units_ = 0;
  std::vector<std::byte> send_, receive_;
  Status lost_;
};

}  // namespace

Result<std::unique_ptr<Communicator>> make_mpi_communicator(MPI_Comm comm,
                                                            std::chrono::milliseconds timeout) {
  constexpr const char* kOperation = "make_mpi_communicator";
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized == 0 || finalized != 0) {
    return bad_argument(kOperation, "MPI", finalized != 0 ? "finalised" : "not initialised",
                        "MPI_Init before");
  }
  if (timeout.count() < 1) {
    return bad_argument(kOperation, "timeout", text(timeout.count(), " ms"), "at least 1 ms");
  }
  MPI_Comm payload = MPI_COMM_NULL;
  MPI_Comm farewells = MPI_COMM_NULL;
  MLA_RETURN_IF_ERROR(check(kOperation, MPI_Comm_dup(comm, &payload)));
  MLA_RETURN_IF_ERROR(check(kOperation, MPI_Comm_dup(comm, &farewells)));
  MPI_Comm_set_errhandler(payload, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(farewells, MPI_ERRORS_RETURN);
  return std::unique_ptr<Communicator>(
      std::make_unique<MpiCommunicator>(payload, farewells, timeout));
}

}  // namespace mla
