// Phases of work that the threads of one run share out among themselves.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <vector>

#include "pool.h"

namespace mlxserve {

// Every thread of a run calls `share` for the same phases in the same order. A phase ends for all when its
// units are done, whoever did them: a thread that comes late, or never, costs its help and nothing else.
class Team {
 public:
  explicit Team(long num_phases) : counters_(num_phases), threads_(num_threads()) {}

  // Calls body(begin, end) for ranges that cover [0, units) once, and returns when all of them are done by all
  // threads. Ranges shrink towards the end of a phase and have at most `longest` units. Bodies do not throw.
  template <class Body>
  void share(long phase, long units, long longest, Body&& body) {
    assert(phase < long(counters_.size()));
    Counter& counter = counters_[phase];
    long begin = counter.next.load(std::memory_order_relaxed), mine = 0;
    while (begin < units) {
      long count = std::clamp((units - begin) / (2 * threads_), 1L, longest);
      if (!counter.next.compare_exchange_weak(begin, begin + count, std::memory_order_relaxed)) continue;
      body(begin, begin + count);
      mine += count;
      begin = counter.next.load(std::memory_order_relaxed);
    }
    if (mine) counter.done.fetch_add(mine, std::memory_order_release);
    wait(counter, units);
  }

 private:
  struct alignas(64) Counter {
    std::atomic<long> next{0}, done{0};
  };

  static void wait(const Counter& counter, long units) {
    for (int spins = 0; counter.done.load(std::memory_order_acquire) < units; ++spins) {
      if (spins < 512) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
      } else {
        // The other thread is not running: its core may be this one.
        sched_yield();
      }
    }
  }

  std::vector<Counter> counters_;
  long threads_;
};

}  // namespace mlxserve
