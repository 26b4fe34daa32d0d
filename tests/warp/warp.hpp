// A warp on the host: 32 coroutines that take turns and meet at every collective, so that device
// code of one warp runs, and is tested, where there is no GPU. Include it before the device code;
// its directory precedes src in the include path.
#pragma once

#include <ucontext.h>
#include <vector_types.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#define MLA_WARP_ON_HOST
#undef __host__
#undef __device__
#undef __forceinline__
#undef __noinline__
#define __host__
#define __device__
#define __forceinline__ inline
#define __noinline__

namespace mla::warp {

constexpr std::size_t kLanes = 32;
using Values = std::array<int, kLanes>;

/// Runs one body on 32 lanes, each until it meets the others.
class Warp {
 public:
  explicit Warp(const std::function<void(int)>& body) : body_(body) {
    constexpr std::size_t kStackBytes = std::size_t{1} << 18;
    stacks_.resize(kLanes * kStackBytes);
    s_running = this;
    for (std::size_t i = 0; i < kLanes; ++i) {
      getcontext(&lanes_[i]);
      lanes_[i].uc_stack.ss_sp = stacks_.data() + i * kStackBytes;
      lanes_[i].uc_stack.ss_size = kStackBytes;
      lanes_[i].uc_link = &turns_;
      makecontext(
          &lanes_[i], [] { s_running->enter(); }, 0);
    }
    while (finished_ < kLanes) {
      for (lane_ = 0; lane_ < kLanes; ++lane_) {
        if (!done_[lane_]) swapcontext(&turns_, &lanes_[lane_]);
      }
    }
  }

  static Warp& running() { return *s_running; }
  int lane() const { return static_cast<int>(lane_); }

  /// Returns when every lane has come here.
  void meet() { swapcontext(&lanes_[lane_], &turns_); }

  /// What every lane gives, at every lane.
  Values exchange(int value) {
    values_[lane_] = value;
    meet();
    const Values all = values_;
    meet();  // nobody gives the next value before all have these
    return all;
  }

 private:
  void enter() {
    body_(lane());
    done_[lane_] = true;
    ++finished_;
  }

  static inline Warp* s_running = nullptr;
  const std::function<void(int)>& body_;
  std::vector<char> stacks_;
  std::array<ucontext_t, kLanes> lanes_{};
  ucontext_t turns_{};
  std::array<bool, kLanes> done_{};
  std::size_t finished_ = 0;
  std::size_t lane_ = 0;
  Values values_{};
};

inline void run(const std::function<void(int)>& body) {
  const Warp warp(body);
}
inline void meet() {
  Warp::running().meet();
}
inline Values exchange(int value) {
  return Warp::running().exchange(value);
}

}  // namespace mla::warp

// The intrinsics that such code uses, with CUDA's names.
using std::max;
using std::min;
template <class T>
T __ldg(const T* address) {
  return *address;
}
inline int __reduce_add_sync(unsigned, int value) {
  int sum = 0;
  for (int v : mla::warp::exchange(value)) sum += v;
  return sum;
}
inline int __reduce_max_sync(unsigned, int value) {
  const auto all = mla::warp::exchange(value);
  return *std::max_element(all.begin(), all.end());
}
inline int __reduce_min_sync(unsigned, int value) {
  const auto all = mla::warp::exchange(value);
  return *std::min_element(all.begin(), all.end());
}
inline int __shfl_up_sync(unsigned, int value, int step) {
  const int lane = mla::warp::Warp::running().lane();
  const auto all = mla::warp::exchange(value);
  return all[static_cast<std::size_t>(lane < step ? lane : lane - step)];
}
inline std::uint32_t __umulhi(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>(std::uint64_t{a} * b >> 32);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float a) {
  return 1.0F / a;
}
inline int __float2int_rz(float a) {
  return static_cast<int>(a);
}
