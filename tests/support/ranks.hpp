// Runs a function on every rank of a group of threads.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "mla/communicator.hpp"

namespace mla::test {

/// Calls `body` on each of `world` ranks at once and waits for all. Ends live until all are done,
/// so a rank that returns early is late, not gone.
inline void on_ranks(int world, const std::function<void(Communicator&)>& body,
                     std::chrono::milliseconds timeout = std::chrono::minutes(2)) {
  auto ends = make_thread_communicators(world, timeout);
  ASSERT_TRUE(ends.ok()) << ends.status().message();
  std::vector<std::thread> threads;
  for (auto& end : *ends) threads.emplace_back([&body, &end] { body(*end); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace mla::test
