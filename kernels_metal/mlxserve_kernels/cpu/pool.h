// One persistent pool of threads for all kernels.
#pragma once

#include <cstddef>
#include <functional>

namespace mlxserve {

// Number of threads, the calling one included. Call it while no kernel runs; threads start on first need.
void set_threads(int count);
int num_threads();

// Calls work(i) for each i in [0, count), in any order, on the pool and the caller; returns when all are done.
// The first exception of a call is rethrown. While the pool serves another caller the work runs on this
// thread alone. Safe after a fork: the child starts its own threads.
void parallel_for(long count, const std::function<void(long)>& work);

// Floats up to a whole cache line.
inline std::size_t aligned(std::size_t floats) { return (floats + 15) / 16 * 16; }

// At least `floats` floats of this thread, aligned to 64 bytes; kept until the thread ends. Three slots: 0 for
// the work of one task, 1 and 2 for what tasks of one primitive share.
float* scratch(int slot, std::size_t floats);

}  // namespace mlxserve
