// Coalescing: the accesses that the 32 lanes of a simdgroup make at one place in the code, taken together.
#include "runtime.h"

namespace {

struct Range {
  u64 begin, end;
};

// Bytes in the union of the ranges, and the 64-byte lines they touch. Sorts by insertion: lanes mostly come in order.
void add_access(const Record* const* records, u32 n) {
  Range ranges[kLanes];
  for (u32 i = 0; i < n; i++) {
    const Range r = {records[i]->address, records[i]->address + records[i]->size};
    u32 j = i;
    for (; j > 0 && ranges[j - 1].begin > r.begin; j--) ranges[j] = ranges[j - 1];
    ranges[j] = r;
  }
  u64 used = 0, lines = 0, end = 0, last_line = ~0ul, asked = 0;
  for (u32 i = 0; i < n; i++) {
    const Range r = ranges[i];
    asked += r.end - r.begin;
    const u64 begin = r.begin > end ? r.begin : end;
    if (r.end > begin) used += r.end - begin;
    if (r.end > end) end = r.end;
    const u64 first = r.begin / 64, last = (r.end - 1) / 64;
    const u64 from = last_line != ~0ul && first <= last_line ? last_line + 1 : first;
    if (last >= from) lines += last - from + 1;
    if (last_line == ~0ul || last > last_line) last_line = last;
  }
  Buffer& buffer = machine.buffers[(records[0]->address - (u64)machine.arena) >> machine.slot_shift];
  Cost& cost = buffer.cost;
  (records[0]->write ? cost.thread_written : cost.thread_read) += asked;
  (records[0]->write ? cost.simd_written : cost.simd_read) += used;
  cost.lines += lines;
  cost.accesses++;
}

bool same_place(const Record& a, const Record& b) {
  return a.code == b.code && a.write == b.write &&
         (a.address - (u64)machine.arena) >> machine.slot_shift == (b.address - (u64)machine.arena) >> machine.slot_shift;
}

}  // namespace

// Lanes that ran one path have logs that match entry by entry. Where they do not, a lane whose next entry is elsewhere
// sits out; entries of one place that no longer line up count as accesses of their own, which only lowers the figure.
void flush_log(u32 simdgroup) {
  if (!machine.launch->count) return;
  Fiber* lanes[kLanes];
  u32 n = 0, at[kLanes] = {};
  for (u32 i = simdgroup * kLanes; i < machine.threads && i < (simdgroup + 1) * kLanes; i++)
    if (machine.fibers[i].log_size) lanes[n++] = &machine.fibers[i];
  for (;;) {
    const Record* leader = nullptr;
    u32 left = ~0u;
    // The lane with most entries left leads: what the others lack, it did in a branch of its own.
    for (u32 i = 0; i < n; i++) {
      const u32 remaining = lanes[i]->log_size - at[i];
      if (remaining && (!leader || remaining > left)) {
        leader = &lanes[i]->log[at[i]];
        left = remaining;
      }
    }
    if (!leader) break;
    const Record* together[kLanes];
    u32 m = 0;
    for (u32 i = 0; i < n; i++)
      if (at[i] < lanes[i]->log_size && same_place(lanes[i]->log[at[i]], *leader)) together[m++] = &lanes[i]->log[at[i]++];
    add_access(together, m);
  }
  for (u32 i = 0; i < n; i++) lanes[i]->log_size = 0;
}
