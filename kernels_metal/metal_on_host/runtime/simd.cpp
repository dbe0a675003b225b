// What simdgroup functions compute, once all their lanes have come, and the atomics.
#include "runtime.h"

typedef float Pair __attribute__((ext_vector_type(2)));

namespace {

bool is_float(Type t) { return t >= Type::f16; }
bool is_signed(Type t) { return t == Type::i8 || t == Type::i16 || t == Type::i32 || t == Type::i64; }
u32 size_of(Type t) {
  constexpr u32 sizes[] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4};
  return sizes[(int)t];
}

float as_float(u64 bits, Type t) {
  if (t == Type::f16) return (float)__builtin_bit_cast(_Float16, (u16)bits);
  if (t == Type::bf16) return __builtin_bit_cast(float, (u32)(bits & 0xffff) << 16);
  return __builtin_bit_cast(float, (u32)bits);
}

u64 from_float(float x, Type t) {
  if (t == Type::f16) return __builtin_bit_cast(u16, (_Float16)x);
  if (t == Type::bf16) return __builtin_bit_cast(u16, (__bf16)x);
  return __builtin_bit_cast(u32, x);
}

i64 as_signed(u64 bits, Type t) {
  const int unused = 64 - 8 * (int)size_of(t);
  return (i64)(bits << unused) >> unused;
}

u64 combine(Simd op, Type t, u64 a, u64 b) {
  switch (op) {
    case Simd::and_: return a & b;
    case Simd::or_: return a | b;
    case Simd::xor_: return a ^ b;
    default: break;
  }
  if (is_float(t)) {
    const float x = as_float(a, t), y = as_float(b, t);
    switch (op) {
      case Simd::min: return x != x ? b : y != y ? a : y < x ? b : a;
      case Simd::max: return x != x ? b : y != y ? a : x < y ? b : a;
      case Simd::product: return from_float(x * y, t);
      default: return from_float(x + y, t);
    }
  }
  const u64 mask = size_of(t) == 8 ? ~0ul : (1ul << 8 * size_of(t)) - 1;
  switch (op) {
    case Simd::min:
      return is_signed(t) ? (as_signed(b, t) < as_signed(a, t) ? b : a) : (b < a ? b : a);
    case Simd::max:
      return is_signed(t) ? (as_signed(a, t) < as_signed(b, t) ? b : a) : (a < b ? b : a);
    case Simd::product: return a * b & mask;
    default: return (a + b) & mask;
  }
}

u64 identity(Simd op, Type t) {
  const bool product = op == Simd::product || op == Simd::prefix_exclusive_product;
  if (!product) return 0;
  return is_float(t) ? from_float(1.0f, t) : 1;
}

Simd base_of(Simd op) {
  if (op == Simd::prefix_inclusive_sum || op == Simd::prefix_exclusive_sum) return Simd::sum;
  if (op == Simd::prefix_inclusive_product || op == Simd::prefix_exclusive_product) return Simd::product;
  return op;
}

// Neighbours first, as butterfly shuffles do: ((0+1)+(2+3))+...
u64 reduce(Simd op, Type t, u64* values, u32 n) {
  while (n > 1) {
    u32 m = 0;
    for (u32 i = 0; i + 1 < n; i += 2) values[m++] = combine(op, t, values[i], values[i + 1]);
    if (n & 1) values[m++] = values[n - 1];
    n = m;
  }
  return values[0];
}

struct Lanes {
  Fiber* by_lane[kLanes];  // null: not active

  Fiber& source(Fiber& asking, i32 lane, u32 begin) {
    if (lane < 0 || lane >= (i32)kLanes || !by_lane[lane] || lane < (i32)begin ||
        lane >= (i32)begin + asking.width) {
      machine.current = &asking;
      fail(Fault::wrong_lane, "the lane that is read is not active, or out of range", asking.site);
    }
    return *by_lane[lane];
  }
};

void reductions(Lanes& lanes, const u32* ids, u32 n) {
  for (u32 i = 0; i < n; i++) {
    Fiber& f = machine.fibers[ids[i]];
    const Simd op = f.op, base = base_of(op);
    const u32 lane = f.index % kLanes, begin = lane / f.width * f.width;
    const bool is_prefix = base != op;
    const bool inclusive = op == Simd::prefix_inclusive_sum || op == Simd::prefix_inclusive_product;
    const u32 end = is_prefix ? lane + inclusive : begin + f.width;
    u64 values[kLanes];
    u32 m = 0;
    for (u32 other = begin; other < end; other++)
      if (lanes.by_lane[other]) values[m++] = lanes.by_lane[other]->value;
    f.result = m ? reduce(base, f.type, values, m) : identity(op, f.type);
    if (is_prefix || f.width != (i32)kLanes) continue;
    for (u32 j = 1; j < n; j++) machine.fibers[ids[j]].result = f.result;
    return;
  }
}

void moves(Lanes& lanes, Fiber& f) {
  const i32 width = f.width, lane = (i32)(f.index % kLanes), begin = lane / width * width;
  const i32 at = lane - begin, argument = (i32)f.lane_argument;
  i32 from = lane;
  bool fill = false;
  switch (f.op) {
    case Simd::shuffle:
    case Simd::broadcast: from = begin + argument; break;
    case Simd::shuffle_xor: from = begin + (at ^ argument); break;
    // A lane that would read past the edge keeps its own value.
    case Simd::shuffle_up: from = at - argument < 0 ? lane : lane - argument; break;
    case Simd::shuffle_down: from = at + argument >= width ? lane : lane + argument; break;
    case Simd::rotate_up: from = begin + ((at - argument) % width + width) % width; break;
    case Simd::rotate_down: from = begin + (at + argument) % width; break;
    case Simd::fill_up:
      fill = at % (i32)f.modulo - argument < 0;
      from = lane - argument;
      break;
    case Simd::fill_down:
      fill = at % (i32)f.modulo + argument >= (i32)f.modulo;
      from = lane + argument;
      break;
    default: break;
  }
  if (fill) {
    // The neighbour's filling data, shifted in past the edge of each run of `modulo` lanes.
    const i32 modulo = (i32)f.modulo, run = lane / modulo * modulo, in_run = lane - run;
    from = f.op == Simd::fill_up ? run + ((in_run - argument) % modulo + modulo) % modulo
                                 : run + (in_run + argument) % modulo;
    Fiber& source = lanes.source(f, from, (u32)begin);
    f.result = source.fill;
    return;
  }
  Fiber& source = lanes.source(f, from, (u32)begin);
  f.result = source.value;
}

void mma(Lanes& lanes) {
  float a[8][8], b[8][8];
  for (u32 lane = 0; lane < kLanes; lane++) {
    Fiber* f = lanes.by_lane[lane];
    if (!f) {
      for (Fiber* other : lanes.by_lane)
        if (other) {
          machine.current = other;
          fail(Fault::wrong_lane, "a matrix function needs all 32 lanes", other->site);
        }
      return;
    }
    const u32 row = (lane / 4 & 4) + (lane / 2) % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
    for (int i = 0; i < 2; i++) {
      a[row][column + i] = f->a[i];
      b[row][column + i] = f->b[i];
    }
  }
  for (u32 lane = 0; lane < kLanes; lane++) {
    Fiber* f = lanes.by_lane[lane];
    const u32 row = (lane / 4 & 4) + (lane / 2) % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
    for (int i = 0; i < 2; i++) {
      float sum = f->c[i];
      for (int k = 0; k < 8; k++) sum += a[row][k] * b[k][column + i];
      f->d[i] = sum;
    }
  }
}

}  // namespace

void resolve_simd(u32 simdgroup, const u32* ids, u32 n) {
  Lanes lanes = {};
  for (u32 i = 0; i < n; i++) lanes.by_lane[ids[i] - simdgroup * kLanes] = &machine.fibers[ids[i]];
  const Simd op = machine.fibers[ids[0]].op;
  if (op <= Simd::prefix_exclusive_product) {
    reductions(lanes, ids, n);
  } else if (op == Simd::mma) {
    mma(lanes);
  } else if (op == Simd::ballot) {
    u64 mask = 0;
    for (u32 i = 0; i < n; i++)
      if (machine.fibers[ids[i]].value) mask |= 1ul << (ids[i] % kLanes);
    for (u32 i = 0; i < n; i++) machine.fibers[ids[i]].result = mask;
  } else if (op == Simd::broadcast_first) {
    for (u32 i = 0; i < n; i++) machine.fibers[ids[i]].result = machine.fibers[ids[0]].value;
  } else if (op != Simd::sync) {
    for (u32 i = 0; i < n; i++) moves(lanes, machine.fibers[ids[i]]);
  }
}

extern "C" {

u64 mtl_simd(i32 op, i32 type, i32 width, u64 value, u64 fill, u32 lane, u32 modulo, i32 line, const char* file) {
  Fiber* f = machine.current;
  f->op = (Simd)op;
  f->type = (Type)type;
  f->width = width;
  f->value = value;
  f->fill = fill;
  f->lane_argument = lane;
  f->modulo = modulo;
  f->site = {line, file};
  block(State::simd);
  return f->result;
}

void mtl_simd_sync(i32 line, const char* file) {
  Fiber* f = machine.current;
  f->op = Simd::sync;
  f->site = {line, file};
  block(State::simd);
}

Pair mtl_simd_mma(float a0, float a1, float b0, float b1, float c0, float c1, i32 line, const char* file) {
  Fiber* f = machine.current;
  f->op = Simd::mma;
  f->site = {line, file};
  f->a[0] = a0;
  f->a[1] = a1;
  f->b[0] = b0;
  f->b[1] = b1;
  f->c[0] = c0;
  f->c[1] = c1;
  block(State::simd);
  return Pair{f->d[0], f->d[1]};
}

u64 mtl_atomic(i32 op, i32 type, u64 address, u64 operand, u64 expected) {
  const Type t = (Type)type;
  const Atomic what = (Atomic)op;
  const u32 size = size_of(t);
  const void* code = __builtin_return_address(0);
  if (what != Atomic::store) access(address, size, false, true, true, code);
  u64 before = 0;
  memcpy(&before, (const void*)address, size);
  u64 after = before;
  switch (what) {
    case Atomic::load: return before;
    case Atomic::store:
    case Atomic::exchange: after = operand; break;
    case Atomic::add: after = combine(Simd::sum, t, before, operand); break;
    case Atomic::sub:
      after = is_float(t) ? from_float(as_float(before, t) - as_float(operand, t), t) : before - operand;
      break;
    case Atomic::and_: after = before & operand; break;
    case Atomic::or_: after = before | operand; break;
    case Atomic::xor_: after = before ^ operand; break;
    case Atomic::min: after = combine(Simd::min, t, before, operand); break;
    case Atomic::max: after = combine(Simd::max, t, before, operand); break;
    case Atomic::compare: after = before == expected ? operand : before; break;
  }
  access(address, size, true, true, true, code);
  memcpy((void*)address, &after, size);
  return before;
}

}  // extern "C"
