// Threads as fibers: a seed permutes the order of threadgroups and of runnable threads; barriers and simdgroup functions
// block until all that must come have come.
#include "runtime.h"

extern "C" {
void mtl_switch(void** save, void* load);
void mtl_start();
}

// Callee-saved registers and the stack pointer; a new fiber starts in mtl_start, which calls the entry point.
asm(R"(
.text
.globl mtl_switch
.hidden mtl_switch
.type mtl_switch,@function
mtl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size mtl_switch,.-mtl_switch
.section .note.GNU-stack,"",@progbits
.text
)");

namespace {

constexpr u64 kStack = 1ul << 17;

u64 next_random() {
  machine.random ^= machine.random << 13;
  machine.random ^= machine.random >> 7;
  machine.random ^= machine.random << 17;
  return machine.random;
}

bool permuted() { return machine.launch->seed != 0; }

void fiber_body() {
  machine.launch->entry();
  block(State::done);
  __builtin_unreachable();
}

bool prepare_stack(Fiber& f) {
  if (!f.stack) {
    void* p = mmap(nullptr, kStack, 3, 0x4022, -1, 0);
    if ((u64)p == ~0ul) return false;
    mprotect(p, 4096, 0);
    f.stack = (u8*)p;
  }
  u64* top = (u64*)(f.stack + kStack);
  *--top = 0;                  // keeps the stack 16-byte aligned at the call
  *--top = (u64)&fiber_body;   // where mtl_switch returns to
  for (int i = 0; i < 6; i++) *--top = 0;
  f.stack_pointer = top;
  return true;
}

bool same_site(const Site& a, const Site& b) { return a.line == b.line && strcmp(a.file, b.file) == 0; }

void number(char*& to, u32 n) {
  char digits[12];
  int k = 0;
  do digits[k++] = '0' + n % 10;
  while (n /= 10);
  while (k) *to++ = digits[--k];
}

void words(char*& to, const char* from) {
  while (*from) *to++ = *from++;
}

// "8 of 64 threads wait at line 12, thread 9 ended"
void describe(char* to, const Fiber* one, const char* what, const Fiber* other) {
  words(to, "thread ");
  number(to, one->index);
  words(to, " waits at line ");
  number(to, (u32)one->site.line);
  if (other) {
    words(to, ", thread ");
    number(to, other->index);
    if (other->state == State::done) {
      words(to, " has ended");
    } else {
      words(to, other->state == State::barrier ? " waits at the barrier of line " : " is at line ");
      number(to, (u32)other->site.line);
    }
  }
  words(to, what);
  *to = 0;
}

void release_barrier() {
  Fiber& first = machine.fibers[0];
  for (u32 i = 1; i < machine.threads; i++) {
    Fiber& f = machine.fibers[i];
    if (!same_site(f.site, first.site) || f.barrier_flags != first.barrier_flags) {
      char note[256];
      describe(note, &first, "", &f);
      machine.current = &f;
      fail(Fault::divergent_barrier, note, first.site);
    }
  }
  machine.at_barrier = 0;
  if (first.barrier_flags & 2) machine.epoch_threadgroup++;
  if (first.barrier_flags & 1) machine.epoch_device++;
  machine.launch->barriers++;
  for (u32 s = 0; s * kLanes < machine.threads; s++) flush_log(s);
  for (u32 i = 0; i < machine.threads; i++) make_ready(&machine.fibers[i]);
}

void release_simd(u32 simdgroup, const u32* lanes, u32 n) {
  Simdgroup& group = machine.simdgroups[simdgroup];
  Fiber& first = machine.fibers[lanes[0]];
  if (first.op == Simd::barrier) {
    if (first.barrier_flags & 2) group.epoch_threadgroup++;
    if (first.barrier_flags & 1) group.epoch_device++;
  } else {
    resolve_simd(simdgroup, lanes, n);
  }
  flush_log(simdgroup);
  group.arrived -= n;
  for (u32 i = 0; i < n; i++) make_ready(&machine.fibers[lanes[i]]);
}

// All live lanes have come to a simdgroup function: one and the same?
void try_release_simd(u32 simdgroup) {
  Simdgroup& group = machine.simdgroups[simdgroup];
  if (group.arrived == 0 || group.arrived != group.live) return;
  u32 lanes[kLanes], n = 0;
  for (u32 i = simdgroup * kLanes; i < machine.threads && i < (simdgroup + 1) * kLanes; i++)
    if (machine.fibers[i].state == State::simd) lanes[n++] = i;
  const Fiber& first = machine.fibers[lanes[0]];
  for (u32 i = 1; i < n; i++) {
    const Fiber& f = machine.fibers[lanes[i]];
    if (f.op != first.op || !same_site(f.site, first.site)) {
      if (machine.launch->divergent_simd) return;
      char note[256];
      describe(note, &first, "", &f);
      machine.current = &machine.fibers[lanes[i]];
      fail(Fault::divergent_simd, note, first.site);
    }
  }
  release_simd(simdgroup, lanes, n);
}

// Nothing can run: a barrier that some never reach, or lanes that wait for lanes elsewhere.
void resolve_stall() {
  for (u32 s = 0; s * kLanes < machine.threads; s++) {
    if (machine.simdgroups[s].arrived == 0) continue;
    const Fiber *waiting = nullptr, *other = nullptr;
    for (u32 i = s * kLanes; i < machine.threads && i < (s + 1) * kLanes; i++) {
      const Fiber& f = machine.fibers[i];
      if (f.state == State::simd && (!waiting || f.site.line < waiting->site.line)) waiting = &f;
      if (f.state == State::barrier) other = &f;
    }
    if (!machine.launch->divergent_simd) {
      char note[256];
      describe(note, waiting, "", other);
      machine.current = &machine.fibers[waiting->index];
      fail(Fault::divergent_simd, note, waiting->site);
    }
    u32 lanes[kLanes], n = 0;
    for (u32 i = s * kLanes; i < machine.threads && i < (s + 1) * kLanes; i++) {
      const Fiber& f = machine.fibers[i];
      if (f.state == State::simd && f.op == waiting->op && same_site(f.site, waiting->site)) lanes[n++] = i;
    }
    release_simd(s, lanes, n);
    return;
  }
  const Fiber *waiting = nullptr, *other = nullptr;
  for (u32 i = 0; i < machine.threads; i++) {
    if (machine.fibers[i].state == State::barrier) waiting = &machine.fibers[i];
    else other = &machine.fibers[i];
  }
  char note[256];
  describe(note, waiting, "", other);
  machine.current = &machine.fibers[waiting->index];
  fail(Fault::divergent_barrier, note, waiting->site);
}

void* give_up[5];  // where fail() goes, from a fiber or from the scheduler

void run_group() {
  if (__builtin_setjmp(give_up)) return;
  while (machine.live && !machine.failed) {
    if (machine.ready_count == 0) {
      resolve_stall();
      continue;
    }
    u32 pick = machine.ready_count - 1;
    if (permuted()) pick = next_random() % machine.ready_count;
    Fiber* f = &machine.fibers[machine.ready[pick]];
    machine.ready[pick] = machine.ready[--machine.ready_count];
    machine.current = f;
    mtl_switch(&machine.scheduler, f->stack_pointer);
    machine.current = nullptr;
  }
}

bool start_group(u32 gx, u32 gy, u32 gz) {
  const u32 at[3] = {gx, gy, gz};
  for (int k = 0; k < 3; k++) {
    machine.group_position[k] = at[k];
    const u32 left = machine.launch->grid[k] - at[k] * machine.launch->group[k];
    machine.group_size[k] = left < machine.launch->group[k] ? left : machine.launch->group[k];
  }
  machine.threads = machine.live = machine.group_size[0] * machine.group_size[1] * machine.group_size[2];
  machine.at_barrier = 0;
  machine.group_serial++;
  machine.epoch_device = machine.epoch_threadgroup = 0;
  machine.ready_count = 0;
  for (u32 i = 0; i < machine.array_count; i++)
    memset(machine.buffers[kMaxBuffers + i].base, 0xa5, machine.buffers[kMaxBuffers + i].bytes);
  for (u32 s = 0; s * kLanes < machine.threads; s++) {
    const u32 left = machine.threads - s * kLanes;
    machine.simdgroups[s] = {left < kLanes ? left : kLanes, 0, 0, 0};
  }
  for (u32 i = machine.threads; i-- > 0;) {
    Fiber& f = machine.fibers[i];
    f.index = i;
    f.position[0] = i % machine.group_size[0];
    f.position[1] = i / machine.group_size[0] % machine.group_size[1];
    f.position[2] = i / (machine.group_size[0] * machine.group_size[1]);
    f.log_size = 0;
    if (!prepare_stack(f)) return false;
    make_ready(&f);
  }
  return true;
}

}  // namespace

void make_ready(Fiber* fiber) {
  fiber->state = State::ready;
  machine.ready[machine.ready_count++] = fiber->index;
}

void block(State state) {
  Fiber* f = machine.current;
  f->state = state;
  Simdgroup& group = machine.simdgroups[f->index / kLanes];
  if (state == State::simd) {
    group.arrived++;
    try_release_simd(f->index / kLanes);
  } else if (state == State::barrier) {
    if (++machine.at_barrier == machine.threads) release_barrier();
  } else {
    group.live--;
    machine.live--;
    if (group.live == 0) flush_log(f->index / kLanes);
    try_release_simd(f->index / kLanes);
  }
  mtl_switch(&f->stack_pointer, machine.scheduler);
}

void fail(Fault kind, const char* note, Site site) {
  FaultInfo& f = *machine.fault;
  const Fiber* me = machine.current;
  f.kind = (i32)kind;
  f.line = site.line;
  u32 i = 0;
  for (; site.file && site.file[i] && i < 255; i++) f.file[i] = site.file[i];
  f.file[i] = 0;
  for (i = 0; note[i] && i < 255; i++) f.note[i] = note[i];
  f.note[i] = 0;
  for (int k = 0; k < 3; k++) {
    f.group[k] = machine.group_position[k];
    f.thread[k] = me->position[k];
  }
  f.index = me->index;
  f.lane = me->index % kLanes;
  f.simdgroup = me->index / kLanes;
  machine.failed = true;
  __builtin_longjmp(give_up, 1);
}

extern "C" {

void mtl_barrier(i32 scope, u32 flags, i32 line, const char* file) {
  Fiber* f = machine.current;
  f->site = {line, file};
  f->barrier_flags = flags;
  f->op = Simd::barrier;
  block(scope == 0 ? State::barrier : State::simd);
}

u32 mtl_lane() { return machine.current->index % kLanes; }

// Python's entries.ATTRIBUTES has this order.
u32 mtl_attribute(i32 which, i32 axis) {
  const Fiber& f = *machine.current;
  const u32* grid = machine.launch->grid;
  const u32* nominal = machine.launch->group;
  const u32* size = machine.group_size;
  const u32 total = nominal[0] * nominal[1] * nominal[2];
  switch (which) {
    case 0: return (total + 3) / 4;
    case 1: return (total + kLanes - 1) / kLanes;
    case 2: return nominal[axis];
    case 3: return 0;
    case 4: return grid[axis];
    case 5: return f.index / 4;
    case 6: return (machine.threads + 3) / 4;
    case 7: return f.index / kLanes;
    case 8: return (machine.threads + kLanes - 1) / kLanes;
    case 9: return kLanes;
    case 10: return f.index % 4;
    case 11: return f.index % kLanes;
    case 12: return f.index;
    case 13: return machine.group_position[axis] * nominal[axis] + f.position[axis];
    case 14: return f.position[axis];
    case 15: return machine.group_position[axis];
    case 16: return machine.groups[axis];
    case 17: return grid[axis];
    case 18: return kLanes;
    default: return size[axis];
  }
}

// Runs a grid. Returns 0, or 1 with *fault filled in.
i32 mtl_launch(Launch* launch, FaultInfo* fault) {
  machine.launch = launch;
  machine.fault = fault;
  machine.failed = false;
  machine.random = launch->seed * 0x9e3779b97f4a7c15ul | 1;
  machine.group_serial = 0;
  machine.current = nullptr;
  fault->kind = 0;
  fault->slot = -1;
  fault->other_index = -2;
  u64 total = 1;
  for (int k = 0; k < 3; k++) {
    machine.groups[k] = (launch->grid[k] + launch->group[k] - 1) / launch->group[k];
    total *= machine.groups[k];
  }
  launch->groups = total;
  // A stride that shares no factor with the number of groups visits each once, in another order for each seed.
  u64 stride = 1, start = 0;
  if (permuted() && total > 1) {
    start = next_random() % total;
    stride = next_random() % total | 1;
    for (u64 a = stride, b = total;; stride += 2, a = stride, b = total) {
      while (b) {
        const u64 t = a % b;
        a = b;
        b = t;
      }
      if (a == 1) break;
    }
  }
  machine.array_count = 0;
  machine.threadgroup_bytes = 0;
  for (u64 n = 0; n < total && !machine.failed; n++) {
    const u64 g = (start + n * stride) % total;
    if (!start_group(g % machine.groups[0], g / machine.groups[0] % machine.groups[1],
                     g / ((u64)machine.groups[0] * machine.groups[1])))
      return 2;
    run_group();
  }
  return machine.failed;
}

}  // extern "C"
