// The machine that Metal kernels run on here: threads as fibers, SIMD-groups of 32, memory in guarded slots, every
// access reported by -fsanitize=thread's call-backs. Freestanding: libc's and libm's symbols come from the process.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long;
using i32 = int;
using i64 = long;

extern "C" {
void* mmap(void*, u64, int, int, int, long);
int mprotect(void*, u64, int);
int munmap(void*, u64);
void* memcpy(void*, const void*, u64);
void* memset(void*, int, u64);
void* memmove(void*, const void*, u64);
int strcmp(const char*, const char*);
void* realloc(void*, u64);
void free(void*);
}

inline constexpr u32 kLanes = 32;
inline constexpr u32 kMaxThreads = 1024;
inline constexpr u32 kMaxBuffers = 96;
inline constexpr u32 kMaxArrays = 32;  // threadgroup arrays
inline constexpr u32 kSlots = kMaxBuffers + kMaxArrays;

// Python's errors.FAULT_KINDS has this order.
enum class Fault : i32 {
  none, out_of_bounds, race, uninitialised, misaligned, input_write, divergent_barrier, divergent_simd, wrong_lane,
  threadgroup_limit, access_limit, arithmetic
};

// The shim's enum mtl_simd_op has this order.
enum class Simd : i32 {
  sum, product, min, max, and_, or_, xor_, prefix_inclusive_sum, prefix_exclusive_sum, prefix_inclusive_product,
  prefix_exclusive_product, shuffle, shuffle_xor, shuffle_up, shuffle_down, rotate_up, rotate_down, fill_up, fill_down,
  broadcast, broadcast_first, ballot, sync, mma, barrier
};

// The shim's mtl_type has this order.
enum class Type : i32 { i8, u8, i16, u16, i32, u32, i64, u64, f16, bf16, f32 };

// The shim's enum mtl_atomic_op has this order.
enum class Atomic : i32 { load, store, exchange, add, sub, and_, or_, xor_, min, max, compare };

struct Site {
  i32 line;
  const char* file;
};

// One thread's access to a byte: when (threadgroup, barriers passed), who, where in the code.
struct Stamp {
  u32 group;        // 1 + serial number of the threadgroup; 0 is never
  u32 epoch;        // threadgroup barriers passed that order this memory
  u32 simd_epoch;   // simdgroup barriers passed
  u32 code;         // offset of the call in the kernel's image
  u16 thread;
  u16 atomic;
};

struct Shadow {
  Stamp write, read, other_read;  // other_read is by another thread than read
};

// Counters Python reads (runtime.py has the same order).
struct Cost {
  u64 thread_read, thread_written;  // bytes asked for by threads
  u64 simd_read, simd_written;      // bytes asked for by simdgroups: each byte once an access
  u64 lines;                        // 64-byte lines touched, summed over simdgroup accesses
  u64 accesses;                     // simdgroup accesses
  u64 unique_read, unique_written;
  u64 unique_lines;                 // 64-byte lines of which any byte was touched
};

struct Buffer {
  char name[64];
  u8* base;
  u64 bytes;
  u64 mapped;
  Shadow* shadow;   // null for buffers that nobody writes
  u8* touched;      // bit 0 read, bit 1 written; null where not counted
  u32 flags;
  Cost cost;
};
inline constexpr u32 kWritable = 1, kInitialised = 2, kCounted = 4, kThreadgroup = 8;

struct FaultInfo {  // runtime.py has the same layout
  i32 kind;
  i32 line;         // of a barrier or simdgroup function; 0 where `code` says it
  char file[256];
  u64 code, other_code;
  i32 slot;
  i64 offset;
  u32 size, is_write;
  u32 group[3], thread[3];
  u32 lane, simdgroup, index;
  i32 other_index;
  char note[256];
};

struct Launch {  // runtime.py has the same layout
  void (*entry)();
  u32 grid[3], group[3];
  u64 seed;
  u32 count;             // bytes and coalescing
  u32 divergent_simd;    // 0: a fault; 1: the active lanes go on by themselves, lowest line first
  u64 access_limit;
  u64 image_start, image_end;
  u64 accesses;          // out
  u64 barriers;          // out: threadgroup barriers, summed over groups
  u64 threadgroup_bytes; // out: largest of any group
  u64 groups;            // out
};

enum class State : u8 { ready, simd, barrier, done };

struct Record {
  u64 address;
  u32 code;
  u16 size;
  u16 write;
};

struct Fiber {
  void* stack_pointer;
  u8* stack;
  State state;
  u32 index;               // in the threadgroup
  u32 position[3];
  Site site;
  // A pending simdgroup operation.
  Simd op;
  Type type;
  i32 width;
  u64 value, fill, result;
  u32 lane_argument, modulo;
  float a[2], b[2], c[2], d[2];
  u32 barrier_flags;
  Record* log;
  u32 log_size, log_capacity;
};

struct Simdgroup {
  u32 live, arrived;
  u32 epoch_device, epoch_threadgroup;
};

struct Machine {
  Launch* launch;
  FaultInfo* fault;
  Fiber fibers[kMaxThreads];
  Simdgroup simdgroups[kMaxThreads / kLanes];
  Buffer buffers[kSlots];
  u32 buffer_count, array_count;
  u8* arena;
  u32 slot_shift;
  u64 random;
  Fiber* current;
  void* scheduler;
  u32 ready[kMaxThreads];
  u32 ready_count;
  u32 threads, live, at_barrier;
  u32 group_position[3], group_size[3], groups[3];
  u32 group_serial;
  u32 epoch_device, epoch_threadgroup;
  u64 threadgroup_bytes;
  i32 array_line[kMaxArrays];
  bool failed;
};
extern Machine machine;

[[noreturn]] void fail(Fault kind, const char* note, Site site = {0, nullptr});
void access(u64 address, u32 size, bool write, bool aligned, bool atomic, const void* code);
void resolve_simd(u32 simdgroup, const u32* lanes, u32 n);
void flush_log(u32 simdgroup);
void block(State state);
void make_ready(Fiber* fiber);
