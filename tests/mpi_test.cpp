// The group over MPI, run by mpirun: mpi_test collectives | farewell | late. A scenario that loses
// the group ends its process without MPI_Finalize, which would wait for what can no more come.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "mla/mpi.hpp"
#include "support/rows.hpp"

namespace mla::test {
namespace {

using std::chrono::milliseconds;

std::unique_ptr<Communicator> group(milliseconds timeout = kDefaultPeerTimeout) {
  auto made = make_mpi_communicator(MPI_COMM_WORLD, timeout);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return made.ok() ? std::move(*made) : nullptr;
}

TEST(Mpi, collectives) {
  const std::unique_ptr<Communicator> ranks = group();
  const int me = ranks->rank();
  const auto world = static_cast<std::size_t>(ranks->world());
  // Blocks below, at and above the unit in which MPI moves them, and none at all.
  for (const std::size_t size : {0, 1, 3, 1024, 1025, 5000}) {
    std::vector<std::int32_t> mine(world * size), all(world * world * size), swapped(world * size);
    const auto value = [&](int from, std::size_t i) {
      return from * 100000 + static_cast<std::int32_t>(i);
    };
    for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = value(me, i);
    ASSERT_TRUE(ranks->all_gather(mine.data(), all.data(), mine.size() * 4, nullptr).ok());
    ASSERT_TRUE(ranks->all_to_all(mine.data(), swapped.data(), size * 4, nullptr).ok());
    const std::vector<float> parts(mine.begin(), mine.end());
    std::vector<float> sum(size);
    ASSERT_TRUE(ranks->reduce_scatter(parts.data(), sum.data(), size, nullptr).ok());
    for (std::size_t r = 0; r < world; ++r) {
      for (std::size_t i = 0; i < mine.size(); ++i) {
        ASSERT_EQ(all[r * mine.size() + i], value(static_cast<int>(r), i));
      }
      for (std::size_t i = 0; i < size; ++i) {
        ASSERT_EQ(swapped[r * size + i],
                  value(static_cast<int>(r), static_cast<std::size_t>(me) * size + i));
      }
    }
    for (std::size_t i = 0; i < size; ++i) {
      float expected = 0;
      for (std::size_t r = 0; r < world; ++r) {
        expected +=
            static_cast<float>(value(static_cast<int>(r), static_cast<std::size_t>(me) * size + i));
      }
      ASSERT_EQ(sum[i], expected);
    }
  }
  EXPECT_TRUE(refused(make_mpi_communicator(MPI_COMM_WORLD, milliseconds(0)).status(),
                      StatusCode::kInvalidArgument,
                      "make_mpi_communicator: timeout: found 0 ms, needed at least 1 ms"));
}

TEST(Mpi, farewell) {
  Communicator& ranks = *group(std::chrono::hours(1)).release();
  std::int32_t mine = 0;
  std::vector<std::int32_t> all(static_cast<std::size_t>(ranks.world()));
  const Status reason(StatusCode::kOutOfMemory, "rank 1: run: out of host memory");
  if (ranks.rank() == 1) ranks.abort(reason);
  for (int call = 0; call < 2; ++call) {
    EXPECT_TRUE(refused(ranks.exchange(&mine, all.data(), 4), reason.code(), reason.message()));
  }
}

TEST(Mpi, late) {
  Communicator& ranks = *group(milliseconds(200)).release();
  std::int32_t mine = 0;
  std::vector<std::int32_t> all(static_cast<std::size_t>(ranks.world()));
  if (ranks.rank() == 1) return;  // it stays away, and alive until the others have given up
  EXPECT_TRUE(refused(ranks.exchange(&mine, all.data(), 4), StatusCode::kPeer,
                      "exchange: ranks: found not all there within 200 ms, needed all 3"));
}

/// Leaves a file that says so, and stays until every rank has: mpirun ends the job when a process
/// leaves without MPI_Finalize.
void say_passed() {
  int rank = 0;
  int world = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  std::ofstream("passed." + std::to_string(rank)) << '\n';
  const auto all_passed = [world] {
    for (int r = 0; r < world; ++r) {
      if (!std::ifstream("passed." + std::to_string(r))) return false;
    }
    return true;
  };
  for (int waits = 0; waits < 3000 && !all_passed(); ++waits) {
    int found = 0;  // lets MPI deliver what was sent
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
    std::this_thread::sleep_for(milliseconds(10));
  }
}

}  // namespace
}  // namespace mla::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const std::string scenario = argc > 1 ? argv[1] : "collectives";
  testing::GTEST_FLAG(filter) = "Mpi." + scenario;
  MPI_Init(nullptr, nullptr);
  const int failed = RUN_ALL_TESTS();
  if (scenario == "collectives") {
    MPI_Finalize();
    return failed;
  }
  if (failed == 0) mla::test::say_passed();
  _exit(failed);
}
