// What a run promises besides its result: it allocates nothing, plans are shared between threads, a
// smaller team than planned still does all the work, and any aligned workspace serves.
#include <gtest/gtest.h>
#include <omp.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "support/rows.hpp"
#include "support/scene.hpp"
#include "testkit/check.hpp"

namespace {

std::atomic<std::int64_t> num_allocations{0};

void* counted(std::size_t bytes, std::size_t alignment) {
  ++num_allocations;
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) {
  return counted(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace mla {
namespace {

using namespace test;

Scene mixed_scene() {
  Scene scene = random_scene(shape(20, 16), {1, 300, 0, 133, 64}, {2, 1, 3, 4, 1});
  scene.padding = 2;
  scene.sinks.assign(20, 0.5F);
  return scene;
}

Output copy_of(const Laid& laid) {
  Output output;
  output.dtype = laid.problem.resolved_out_dtype();
  output.heads = laid.problem.num_heads;
  output.rank = laid.problem.kv_lora_rank;
  output.out.assign(laid.out.data(), laid.out.data() + laid.out.size());
  output.lse.assign(laid.lse.as<float>(), laid.lse.as<float>() + laid.lse.size() / 4);
  return output;
}

TEST(Run, AllocatesNothing) {
  for (const std::int64_t fixed_split : {0, 100}) {
    PlanOptions options;
    options.num_threads = 3;
    options.fixed_split = fixed_split;
    for_each_kernel_row(mixed_scene(), [&](const std::string& row) {
      Laid laid = lay_out(mixed_scene());
      const Result<DecodePlan> made = plan(laid.problem, forced(row, options));
      ASSERT_TRUE(made.ok());
      const Buffer workspace = testkit::make_workspace(*made);
      const std::int64_t before = num_allocations;
      const bool ok = run(*made, laid.tensors, workspace.data(), workspace.size()).ok();
      const std::int64_t after = num_allocations;
      EXPECT_TRUE(ok);
      EXPECT_EQ(after, before);
      expect_right(mixed_scene(), copy_of(laid));
    });
  }
}

TEST(Run, OnePlanServesSeveralThreadsAtOnce) {
  const Scene scene = mixed_scene();
  const Exact right = exact(scene);
  PlanOptions options;
  options.num_threads = 2;
  for_each_row(scene, [&](const std::string& row) {
    const Result<DecodePlan> made = plan(lay_out(scene).problem, forced(row, options));
    ASSERT_TRUE(made.ok());
    std::vector<Laid> laid;
    std::vector<Buffer> workspaces;
    std::vector<int> ok(4, 0);
    for (int i = 0; i < 4; ++i) {
      laid.push_back(lay_out(scene));
      workspaces.push_back(testkit::make_workspace(*made));
    }
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        for (int repeat = 0; repeat < 5; ++repeat) {
          ok[i] +=
              run(*made, laid[i].tensors, workspaces[i].data(), workspaces[i].size()).ok() ? 1 : 0;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(ok[i], 5);
      expect_right(scene, copy_of(laid[i]), right);
      EXPECT_TRUE(same_bits(copy_of(laid[i]), copy_of(laid[0])));
    }
  });
}

TEST(Run, ASmallerTeamThanPlannedDoesAllTheWork) {
  // Inside a parallel region OpenMP gives the inner one a single thread.
  const Scene scene = mixed_scene();
  const Exact right = exact(scene);
  PlanOptions options;
  options.num_threads = 5;
  for_each_row(scene, [&](const std::string& row) {
    const Output expected = decode(scene, row, options);
    std::vector<Laid> laid;
    for (int i = 0; i < 2; ++i) laid.push_back(lay_out(scene));
    const Result<DecodePlan> made = plan(laid[0].problem, forced(row, options));
    const Buffer workspaces[2] = {testkit::make_workspace(*made), testkit::make_workspace(*made)};
    bool ok[2] = {false, false};
#pragma omp parallel for num_threads(2) schedule(static, 1)
    for (int i = 0; i < 2; ++i) {
      ok[i] = run(*made, laid[static_cast<std::size_t>(i)].tensors, workspaces[i].data(),
                  workspaces[i].size())
                  .ok();
    }
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(ok[i]);
      expect_right(scene, copy_of(laid[i]), right);
      EXPECT_TRUE(same_bits(copy_of(laid[i]), expected));
    }
  });
}

TEST(Run, AnyAlignedWorkspaceServes) {
  const Scene scene = mixed_scene();
  for_each_row(scene, [&](const std::string& row) {
    const Output expected = decode(scene, row);
    Laid laid = lay_out(scene);
    const Result<DecodePlan> made = plan(laid.problem, forced(row));
    for (const std::size_t offset : {16, 32, 48, 240}) {
      const std::size_t bytes = made->workspace_bytes();
      const Buffer workspace(bytes + offset, 0);
      // The last byte that may be touched is the last one of the buffer: its guard band is behind
      // it.
      ASSERT_TRUE(run(*made, laid.tensors, workspace.data() + offset, bytes).ok());
      EXPECT_TRUE(workspace.intact());
      for (std::size_t i = 0; i < offset; ++i) ASSERT_EQ(workspace.data()[i], std::byte{0});
      EXPECT_TRUE(same_bits(copy_of(laid), expected));
    }
  });
}

TEST(Run, AFailedRunLeavesTheNextOneAlone) {
  const Scene scene = mixed_scene();
  for_each_row(scene, [&](const std::string& row) {
    Laid laid = lay_out(scene);
    const Result<DecodePlan> made = plan(laid.problem, forced(row));
    const Buffer workspace = testkit::make_workspace(*made);
    laid.seq_lens.as<std::int32_t>()[1] = 1000000;
    EXPECT_FALSE(run(*made, laid.tensors, workspace.data(), workspace.size()).ok());
    laid.seq_lens.as<std::int32_t>()[1] = 300;
    ASSERT_TRUE(run(*made, laid.tensors, workspace.data(), workspace.size()).ok());
    expect_right(scene, copy_of(laid));
  });
}

}  // namespace
}  // namespace mla
