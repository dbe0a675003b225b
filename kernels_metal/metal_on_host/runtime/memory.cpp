// Guarded slots, the shadow of every writable byte, and the call-backs of -fsanitize=thread.
#include "runtime.h"

namespace {

constexpr int kNone = 0, kReadWrite = 3, kPrivateAnonymous = 0x22, kNoReserve = 0x4000;

bool is_failure(void* p) { return (u64)p == ~0ul; }

void* pages(u64 bytes) {
  void* p = mmap(nullptr, bytes ? bytes : 1, kReadWrite, kPrivateAnonymous | kNoReserve, -1, 0);
  return is_failure(p) ? nullptr : p;
}

bool reserve_arena() {
  if (machine.arena) return true;
  for (u32 shift = 34; shift >= 30; shift -= 2) {
    void* p = mmap(nullptr, (u64)kSlots << shift, kNone, kPrivateAnonymous | kNoReserve, -1, 0);
    if (is_failure(p)) continue;
    machine.arena = (u8*)p;
    machine.slot_shift = shift;
    return true;
  }
  return false;
}

// In the middle of its slot, so that a wild index either way stays in the slot and names the right buffer.
u8* place(u32 slot, u64 bytes, u64 offset, u64* mapped) {
  u8* middle = machine.arena + ((u64)slot << machine.slot_shift) + (1ul << (machine.slot_shift - 1));
  *mapped = (offset + bytes + 8191) & ~4095ul;
  return mprotect(middle, *mapped, kReadWrite) == 0 ? middle + offset : nullptr;
}

void release(Buffer& buffer) {
  if (buffer.shadow) munmap(buffer.shadow, (buffer.bytes + 1) * sizeof(Shadow));
  if (buffer.touched) munmap(buffer.touched, buffer.bytes + 1);
  u8* start = (u8*)((u64)buffer.base & ~4095ul);
  mmap(start, buffer.mapped, kNone, kPrivateAnonymous | kNoReserve | 0x10, -1, 0);
  buffer = {};
}

void copy_name(char* to, const char* from) {
  u32 i = 0;
  for (; from[i] && i < 63; i++) to[i] = from[i];
  to[i] = 0;
}

u32 code_offset(const void* code) { return (u32)((u64)code - machine.launch->image_start); }

// Whether what `before` did happened before what the current thread does now.
bool ordered(const Stamp& before, u32 epoch, u32 simd_epoch) {
  if (before.group != machine.group_serial) return before.group == 0;
  u32 me = machine.current->index;
  if (before.thread == me || before.epoch < epoch) return true;
  return before.thread / kLanes == me / kLanes && before.simd_epoch < simd_epoch;
}

[[noreturn]] void memory_fault(Fault kind, u32 slot, i64 offset, u32 size, bool write, const void* code, const char* note,
                               const Stamp* other = nullptr) {
  FaultInfo& f = *machine.fault;
  f.code = (u64)code;
  f.slot = (i32)slot;
  f.offset = offset;
  f.size = size;
  f.is_write = write;
  if (other) {
    f.other_code = machine.launch->image_start + other->code;
    f.other_index = other->group == machine.group_serial ? other->thread : -1;
  }
  fail(kind, note);
}

// Neighbouring accesses of a lane count as one of up to 16 bytes: compilers merge them where nothing stands between.
bool merge(Fiber& f, u64 address, u32 size, bool write) {
  constexpr u32 kBack = 16;
  const u64 slot = (address - (u64)machine.arena) >> machine.slot_shift;
  for (u32 i = f.log_size, seen = 0; i > 0 && seen < kBack; i--, seen++) {
    Record& r = f.log[i - 1];
    if (r.write != write || (r.address - (u64)machine.arena) >> machine.slot_shift != slot) continue;
    if (r.address + r.size != address || r.size + size > 16) return false;
    r.size += (u16)size;
    return true;
  }
  return false;
}

void log_access(u64 address, u32 size, bool write, u32 code) {
  Fiber& f = *machine.current;
  if (merge(f, address, size, write)) return;
  if (f.log_size == f.log_capacity) {
    f.log_capacity = f.log_capacity ? f.log_capacity * 2 : 256;
    f.log = (Record*)realloc(f.log, f.log_capacity * sizeof(Record));
  }
  f.log[f.log_size++] = {address, code, (u16)size, write};
}

void check_bytes(u32 slot, Buffer& buffer, u64 offset, u32 size, bool write, bool atomic, const void* code) {
  const bool in_threadgroup = buffer.flags & kThreadgroup;
  const Simdgroup& group = machine.simdgroups[machine.current->index / kLanes];
  const u32 epoch = in_threadgroup ? machine.epoch_threadgroup : machine.epoch_device;
  const u32 simd_epoch = in_threadgroup ? group.epoch_threadgroup : group.epoch_device;
  const Stamp now = {machine.group_serial, epoch, simd_epoch, code_offset(code), (u16)machine.current->index, atomic};
  for (u32 i = 0; i < size; i++) {
    Shadow& s = buffer.shadow[offset + i];
    const bool written = in_threadgroup ? s.write.group == machine.group_serial : s.write.group != 0;
    if (!write && !written && !(buffer.flags & kInitialised))
      memory_fault(Fault::uninitialised, slot, offset + i, size, write, code, "");
    if (written && !(atomic && s.write.atomic) && !ordered(s.write, epoch, simd_epoch))
      memory_fault(Fault::race, slot, offset + i, size, write, code, write ? "two writes" : "a read after a write", &s.write);
    if (write) {
      const Stamp* readers[] = {&s.read, &s.other_read};
      for (const Stamp* r : readers) {
        const bool relevant = in_threadgroup ? r->group == machine.group_serial : r->group != 0;
        if (relevant && !(atomic && r->atomic) && !ordered(*r, epoch, simd_epoch))
          memory_fault(Fault::race, slot, offset + i, size, write, code, "a write after a read", r);
      }
      s.write = now;
    } else {
      if (s.read.thread != now.thread || s.read.group != now.group) s.other_read = s.read;
      s.read = now;
    }
  }
}

}  // namespace

Machine machine;

void access(u64 address, u32 size, bool write, bool aligned, bool atomic, const void* code) {
  const u64 at = address - (u64)machine.arena;
  if (at >= ((u64)kSlots << machine.slot_shift)) {
    if (!machine.current) return;
    const Fiber& f = *machine.current;
    if (address - (u64)f.stack < (1ul << 17)) return;
    const Launch& l = *machine.launch;
    if (address >= l.image_start && address + size <= l.image_end && !write) return;
    memory_fault(Fault::out_of_bounds, kSlots, (i64)address, size, write, code, "the address belongs to no buffer");
  }
  const u32 slot = (u32)(at >> machine.slot_shift);
  Buffer& buffer = machine.buffers[slot];
  const i64 offset = (i64)(address - (u64)buffer.base);
  if (!buffer.base || offset < 0 || (u64)offset + size > buffer.bytes) {
    const bool known = buffer.base != nullptr;
    memory_fault(Fault::out_of_bounds, known ? slot : kSlots, known ? offset : (i64)address, size, write, code,
                 known ? "" : "the address belongs to no buffer");
  }
  if (aligned && (address & (size - 1)))
    memory_fault(Fault::misaligned, slot, offset, size, write, code, "");
  if (write && !(buffer.flags & kWritable)) memory_fault(Fault::input_write, slot, offset, size, write, code, "");
  if (++machine.launch->accesses > machine.launch->access_limit)
    memory_fault(Fault::access_limit, slot, offset, size, write, code, "");
  if (buffer.shadow) check_bytes(slot, buffer, (u64)offset, size, write, atomic, code);
  if (buffer.touched)
    for (u32 i = 0; i < size; i++) buffer.touched[offset + i] |= write ? 2 : 1;
  if (buffer.flags & kCounted) log_access(address, size, write, code_offset(code));
}

extern "C" {

// Returns the address of a new buffer, or null when memory or slots are short.
u8* mtl_add_buffer(const char* name, u64 bytes, u32 flags, u64 offset) {
  if (!reserve_arena() || machine.buffer_count == kMaxBuffers) return nullptr;
  const u32 slot = machine.buffer_count;
  Buffer& buffer = machine.buffers[slot];
  buffer = {};
  buffer.base = place(slot, bytes, offset, &buffer.mapped);
  if (!buffer.base) return nullptr;
  machine.buffer_count++;
  copy_name(buffer.name, name);
  buffer.bytes = bytes;
  buffer.flags = flags;
  if (flags & kWritable) buffer.shadow = (Shadow*)pages((bytes + 1) * sizeof(Shadow));
  buffer.touched = (u8*)pages(bytes + 1);
  return buffer.touched && (buffer.shadow || !(flags & kWritable)) ? buffer.base : nullptr;
}

void mtl_reset() {
  for (u32 i = 0; i < kSlots; i++)
    if (machine.buffers[i].base) release(machine.buffers[i]);
  machine.buffer_count = machine.array_count = 0;
}

void mtl_buffer_cost(u32 slot, Cost* out) {
  Buffer& buffer = machine.buffers[slot];
  *out = buffer.cost;
  for (u64 i = 0; buffer.touched && i < buffer.bytes; i++) {
    out->unique_read += buffer.touched[i] & 1;
    out->unique_written += buffer.touched[i] >> 1;
  }
  for (u64 line = 0; buffer.touched && line < buffer.bytes; line += 64) {
    bool any = false;
    for (u64 i = line; i < line + 64 && i < buffer.bytes; i++) any |= buffer.touched[i] != 0;
    out->unique_lines += any;
  }
}

// The first byte that nobody wrote, or -1.
i64 mtl_first_unwritten(u32 slot) {
  const Buffer& buffer = machine.buffers[slot];
  for (u64 i = 0; i < buffer.bytes; i++)
    if (!(buffer.touched[i] & 2)) return (i64)i;
  return -1;
}

const char* mtl_buffer_name(u32 slot) { return machine.buffers[slot].name; }
u64 mtl_buffer_bytes(u32 slot) { return machine.buffers[slot].bytes; }
u64 mtl_argument(i32 index) { return (u64)machine.buffers[index].base; }

// The range of one threadgroup variable in the running threadgroup, poisoned when it is new there.
u64 mtl_threadgroup(u64 bytes, u64 alignment, i32 line, const char* name) {
  for (u32 i = 0; i < machine.array_count; i++) {
    Buffer& known = machine.buffers[kMaxBuffers + i];
    if (machine.array_line[i] == line && strcmp(known.name, name) == 0 && known.bytes == bytes) return (u64)known.base;
  }
  if (machine.array_count == kMaxArrays) fail(Fault::threadgroup_limit, "more than 32 threadgroup variables");
  const u32 slot = kMaxBuffers + machine.array_count;
  machine.array_line[machine.array_count++] = line;
  Buffer& buffer = machine.buffers[slot];
  buffer = {};
  // No better aligned than the type asks: a wider vector access must be asked for with alignas.
  buffer.base = place(slot, bytes, alignment < 4096 ? 4096 - alignment : 0, &buffer.mapped);
  copy_name(buffer.name, name);
  buffer.bytes = bytes;
  buffer.flags = kWritable | kThreadgroup;
  buffer.shadow = (Shadow*)pages((bytes + 1) * sizeof(Shadow));
  if (!buffer.base || !buffer.shadow) fail(Fault::threadgroup_limit, "no memory");
  memset(buffer.base, 0xa5, bytes);
  machine.threadgroup_bytes += bytes;
  if (machine.threadgroup_bytes > machine.launch->threadgroup_bytes)
    machine.launch->threadgroup_bytes = machine.threadgroup_bytes;
  if (machine.threadgroup_bytes > 32768) fail(Fault::threadgroup_limit, "more than 32768 bytes of threadgroup memory");
  return (u64)buffer.base;
}

#define CALLER __builtin_return_address(0)
#define CALLBACKS(n)                                                                                          \
  void __tsan_read##n(void* p) { access((u64)p, n, false, true, false, CALLER); }                             \
  void __tsan_write##n(void* p) { access((u64)p, n, true, true, false, CALLER); }                             \
  void __tsan_unaligned_read##n(void* p) { access((u64)p, n, false, false, false, CALLER); }                  \
  void __tsan_unaligned_write##n(void* p) { access((u64)p, n, true, false, false, CALLER); }                  \
  void __tsan_volatile_read##n(void* p) { access((u64)p, n, false, true, false, CALLER); }                    \
  void __tsan_volatile_write##n(void* p) { access((u64)p, n, true, true, false, CALLER); }                    \
  void __tsan_read_write##n(void* p) {                                                                        \
    access((u64)p, n, false, true, false, CALLER);                                                            \
    access((u64)p, n, true, true, false, CALLER);                                                             \
  }                                                                                                           \
  void __tsan_unaligned_read_write##n(void* p) {                                                              \
    access((u64)p, n, false, false, false, CALLER);                                                           \
    access((u64)p, n, true, false, false, CALLER);                                                            \
  }
CALLBACKS(1)
CALLBACKS(2)
CALLBACKS(4)
CALLBACKS(8)
CALLBACKS(16)

void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

void* __tsan_memcpy(void* to, const void* from, u64 n) {
  access((u64)from, (u32)n, false, false, false, CALLER);
  access((u64)to, (u32)n, true, false, false, CALLER);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, u64 n) {
  access((u64)from, (u32)n, false, false, false, CALLER);
  access((u64)to, (u32)n, true, false, false, CALLER);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, u64 n) {
  access((u64)to, (u32)n, true, false, false, CALLER);
  return memset(to, value, n);
}

// clang calls this where the processor has no bfloat conversion: round to nearest even.
__bf16 __truncsfbf2(float x) {
  u32 bits = __builtin_bit_cast(u32, x);
  if (x != x) return __builtin_bit_cast(__bf16, (u16)((bits >> 16) | 0x40));
  bits += 0x7fff + (bits >> 16 & 1);
  return __builtin_bit_cast(__bf16, (u16)(bits >> 16));
}

}  // extern "C"
