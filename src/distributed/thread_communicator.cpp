// A group of ranks over the threads of one process.
//
// A collective has two barriers. `meet` waits until every rank has published its offer (operation,
// sizes, address of what it sends); then each rank copies what it needs straight out of the others'
// memory; `part` holds everyone until the last copy is done. Only `meet` can fail: a rank that met
// is inside a copy and will arrive at `part`, so nobody's memory is let go while another reads it.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "core/diagnostics.hpp"
#include "mla/communicator.hpp"

namespace mla {
namespace {

struct Offer {
  const char* operation = "";
  const std::byte* send = nullptr;
  std::size_t bytes = 0;
};

class ThreadGroup {
 public:
  ThreadGroup(int world, std::chrono::milliseconds timeout)
      : timeout_(timeout),
        offers_(static_cast<std::size_t>(world)),
        present_(static_cast<std::size_t>(world), false) {}

  int world() const noexcept { return static_cast<int>(offers_.size()); }
  const Offer& offer(int rank) const noexcept { return offers_[static_cast<std::size_t>(rank)]; }

  /// Publishes an offer and waits for everybody's.
  Status meet(int rank, const Offer& offer) {
    std::unique_lock lock(mutex_);
    if (!lost_.ok()) return lost_;
    offers_[static_cast<std::size_t>(rank)] = offer;
    const std::uint64_t round = round_;
    if (arrive(rank)) return {};
    const bool woken =
        changed_.wait_for(lock, timeout_, [&] { return round_ != round || !lost_.ok(); });
    // A round that is complete counts, even when a rank has left since.
    if (round_ != round) return {};
    if (!woken) lose(lateness(offer.operation));
    return lost_;
  }

  /// Waits until everybody is done with the offers.
  void part(int rank) {
    std::unique_lock lock(mutex_);
    const std::uint64_t round = round_;
    if (arrive(rank)) return;
    changed_.wait(lock, [&] { return round_ != round; });
  }

  void leave(const Status& reason) noexcept {
    const std::scoped_lock lock(mutex_);
    lose(reason);
  }

 private:
  /// Whether this rank was the last.
  bool arrive(int rank) {
    present_[static_cast<std::size_t>(rank)] = true;
    if (std::find(present_.begin(), present_.end(), false) != present_.end()) return false;
    std::fill(present_.begin(), present_.end(), false);
    ++round_;
    changed_.notify_all();
    return true;
  }

  void lose(const Status& reason) {
    if (lost_.ok()) lost_ = reason;
    changed_.notify_all();
  }

  Status lateness(const char* operation) const {
    std::string missing;
    for (int r = 0; r < world(); ++r) {
      if (!present_[static_cast<std::size_t>(r)]) missing += text(missing.empty() ? "" : ", ", r);
    }
    return {StatusCode::kPeer, text(operation, ": rank ", missing, ": found no arrival within ",
                                    timeout_.count(), " ms, needed all ", world(), " ranks")};
  }

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t round_ = 0;
  Status lost_;
  std::vector<Offer> offers_;
  std::vector<bool> present_;  ///< who has arrived in this round
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}
  ~ThreadCommunicator() override {
    group_->leave({StatusCode::kPeer, text("communicator: rank ", rank_,
                                           ": found it gone, needed all ", world(), " ranks")});
  }

  const char* name() const noexcept override { return "threads"; }
  int rank() const noexcept override { return rank_; }
  int world() const noexcept override { return group_->world(); }
  bool on_device() const noexcept override { return false; }

  Status all_gather(const void* send, void* receive, std::size_t bytes, void*) override {
    return collect("all_gather", send, bytes,
                   [&](int r, const std::byte* theirs) { copy(receive, r, theirs, bytes); });
  }

  Status all_to_all(const void* send, void* receive, std::size_t bytes, void*) override {
    return collect("all_to_all", send, bytes, [&](int r, const std::byte* theirs) {
      copy(receive, r, theirs + static_cast<std::size_t>(rank_) * bytes, bytes);
    });
  }

  Status reduce_scatter(const float* send, float* receive, std::size_t count, void*) override {
    std::vector<float> sum(count, 0.0F);  // `receive` may be part of `send`
    const Status done =
        collect("reduce_scatter", send, count * sizeof(float), [&](int, const std::byte* theirs) {
          const float* block =
              reinterpret_cast<const float*>(theirs) + static_cast<std::size_t>(rank_) * count;
          for (std::size_t i = 0; i < count; ++i) sum[i] += block[i];
        });
    if (done.ok()) std::copy(sum.begin(), sum.end(), receive);
    return done;
  }

  Status exchange(const void* send, void* receive, std::size_t bytes) override {
    return collect("exchange", send, bytes,
                   [&](int r, const std::byte* theirs) { copy(receive, r, theirs, bytes); });
  }

  void abort(const Status& reason) noexcept override { group_->leave(reason); }

 private:
  static void copy(void* receive, int block, const std::byte* from, std::size_t bytes) {
    if (bytes == 0) return;
    std::memcpy(static_cast<std::byte*>(receive) + static_cast<std::size_t>(block) * bytes, from,
                bytes);
  }

  /// Calls `take` with each rank's send, in rank order, once all have met for the same thing.
  template <class Take>
  Status collect(const char* operation, const void* send, std::size_t bytes, const Take& take) {
    MLA_RETURN_IF_ERROR(
        group_->meet(rank_, {operation, static_cast<const std::byte*>(send), bytes}));
    const Status same = check_offers();
    for (int r = 0; r < world() && same.ok(); ++r) take(r, group_->offer(r).send);
    group_->part(rank_);
    return same;
  }

  /// The same sentence on every rank.
  Status check_offers() const {
    const Offer& first = group_->offer(0);
    for (int r = 1; r < world(); ++r) {
      const Offer& theirs = group_->offer(r);
      if (std::strcmp(theirs.operation, first.operation) == 0 && theirs.bytes == first.bytes)
        continue;
      return bad_argument("communicator", text("rank ", r),
                          text(theirs.operation, " of ", theirs.bytes, " bytes"),
                          text(first.operation, " of ", first.bytes, " bytes as on rank 0"));
    }
    return {};
  }

  std::shared_ptr<ThreadGroup> group_;
  int rank_;
};

}  // namespace

Result<std::vector<std::unique_ptr<Communicator>>> make_thread_communicators(
    int world, std::chrono::milliseconds timeout) {
  if (world < 1) return bad_argument("make_thread_communicators", "world", world, "at least 1");
  if (timeout.count() < 1) {
    return bad_argument("make_thread_communicators", "timeout", text(timeout.count(), " ms"),
                        "at least 1 ms");
  }
  auto group = std::make_shared<ThreadGroup>(world, timeout);
  std::vector<std::unique_ptr<Communicator>> ends;
  for (int r = 0; r < world; ++r) ends.push_back(std::make_unique<ThreadCommunicator>(group, r));
  return ends;
}

}  // namespace mla
