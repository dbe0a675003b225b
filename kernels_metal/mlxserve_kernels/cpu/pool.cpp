#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

namespace mlxserve {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Condition>
bool spin_until(Condition&& is_met) {
  auto start = std::chrono::steady_clock::now();
  for (;;) {
    for (int i = 0; i < 32; ++i) {
      if (is_met()) return true;
      pause_briefly();
    }
    if (std::chrono::steady_clock::now() - start > kSpin) return false;
  }
}

class Pool {
 public:
  explicit Pool(int workers) {
    for (int i = 0; i < workers; ++i) std::thread([this] { serve(); }).detach();
  }

  bool try_run(long count, const std::function<void(long)>& work) {
    std::unique_lock only(run_mutex_, std::try_to_lock);
    if (!only) return false;
    work_ = &work, count_ = count, error_ = nullptr;
    next_.store(0);
    state_.store(((state_.load() >> 32) + 1) << 32 | kOpen);
    if (sleepers_.load() > 0) {
      std::lock_guard lock(mutex_);
      wake_.notify_all();
    }
    take_all();
    state_.fetch_and(~kOpen);
    if (!spin_until([this] { return inside() == 0; })) {
      std::unique_lock lock(mutex_);
      is_caller_waiting_.store(true);
      done_.wait(lock, [this] { return inside() == 0; });
      is_caller_waiting_.store(false);
    }
    if (error_) std::rethrow_exception(error_);
    return true;
  }

 private:
  // state_: epoch of the job in the upper half; below it whether workers may still enter, and how many are in.
  // A worker that wakes late finds the job closed, so nobody waits for it.
  static constexpr uint64_t kOpen = uint64_t{1} << 31;

  uint64_t inside() const { return state_.load() & (kOpen - 1); }

  void take_all() {
    for (long i; (i = next_.fetch_add(1)) < count_;) {
      try {
        (*work_)(i);
      } catch (...) {
        std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
      }
    }
  }

  void serve() {
    uint64_t last = 0;
    for (;;) {
      auto is_new = [&] {
        uint64_t state = state_.load();
        return (state & kOpen) && state >> 32 != last;
      };
      if (!spin_until(is_new)) {
        std::unique_lock lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, is_new);
        sleepers_.fetch_sub(1);
      }
      uint64_t state = state_.load();
      if (!(state & kOpen) || state >> 32 == last || !state_.compare_exchange_strong(state, state + 1)) continue;
      last = state >> 32;
      take_all();
      if (((state_.fetch_sub(1) - 1) & (kOpen - 1)) == 0 && is_caller_waiting_.load()) {
        std::lock_guard lock(mutex_);
        done_.notify_all();
      }
    }
  }

  std::mutex run_mutex_, mutex_;
  std::condition_variable wake_, done_;
  std::atomic<uint64_t> state_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> is_caller_waiting_{false};
  std::atomic<long> next_{0};
  const std::function<void(long)>* work_ = nullptr;
  long count_ = 0;
  std::exception_ptr error_;
};

std::atomic<int> thread_count{1};
// Never destroyed: its threads sleep through the end of the process, in which nobody could join them.
std::atomic<Pool*> pool{nullptr};

Pool& shared_pool() {
  if (Pool* found = pool.load()) return *found;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (!pool.load()) {
    pool.store(new Pool(thread_count.load() - 1));
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); }); });
  }
  return *pool.load();
}

struct Buffer {
  float* data = nullptr;
  std::size_t size = 0;
  ~Buffer() { ::operator delete[](data, std::align_val_t{64}); }
};

}  // namespace

void set_threads(int count) {
  if (thread_count.exchange(count) != count) pool.store(nullptr);
}

int num_threads() { return thread_count.load(); }

void parallel_for(long count, const std::function<void(long)>& work) {
  if (count > 1 && num_threads() > 1 && shared_pool().try_run(count, work)) return;
  for (long i = 0; i < count; ++i) work(i);
}

float* scratch(int slot, std::size_t floats) {
  thread_local Buffer buffers[3];
  Buffer& buffer = buffers[slot];
  if (buffer.size < floats) {
    ::operator delete[](buffer.data, std::align_val_t{64});
    buffer.data = nullptr, buffer.size = 0;
    std::size_t size = std::max(floats, std::size_t{1} << 14);
    buffer.data = static_cast<float*>(::operator new[](size * sizeof(float), std::align_val_t{64}));
    buffer.size = size;
  }
  return buffer.data;
}

}  // namespace mlxserve
