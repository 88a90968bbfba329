// A barrier for the threads of one parallel region.
//
// Threads spin for some microseconds, as long as the others usually need, and then sleep: beside another busy process a
// thread may wait for milliseconds until the one that it waits for gets a processor, which it must not take itself.
#pragma once

#include <atomic>
#include <cstdint>

class Barrier {
 public:
  void wait(int64_t num_threads) {
    if (num_threads == 1) return;
    const int before = phase_.load(std::memory_order_acquire);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads - 1) {
      num_arrived_.store(0, std::memory_order_relaxed);
      phase_.store(before + 1, std::memory_order_release);
      phase_.notify_all();
      return;
    }
    for (int i = 0; i < SPINS; i++) {
      if (phase_.load(std::memory_order_acquire) != before) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    phase_.wait(before, std::memory_order_acquire);
  }

 private:
  static constexpr int SPINS = 2000;
  alignas(64) std::atomic<int64_t> num_arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};
