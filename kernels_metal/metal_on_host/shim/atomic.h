// Atomics with relaxed order, as Metal has them.
#pragma once
#include "simd.h"

// The order is the runtime's `enum Atomic`.
enum mtl_atomic_op {
  mtl_atomic_load, mtl_atomic_store, mtl_atomic_exchange, mtl_atomic_add, mtl_atomic_sub, mtl_atomic_and, mtl_atomic_or,
  mtl_atomic_xor, mtl_atomic_min, mtl_atomic_max, mtl_atomic_compare
};
extern "C" ulong mtl_atomic(int op, int type, ulong address, ulong operand, ulong expected);

namespace metal {
enum memory_order { memory_order_relaxed };

template <typename T>
struct atomic {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "Metal has atomics of 4 bytes (and a few of 8)");
  T mtl_value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;

template <typename T>
struct mtl_plain { typedef T type; };
template <typename T>
using mtl_operand = typename mtl_plain<T>::type;

#define MTL_ATOMIC(space, name, op)                                                                                \
  template <typename T>                                                                                            \
  T atomic_##name##_explicit(volatile space atomic<T>* at, mtl_operand<T> x, memory_order) {                       \
    return mtl_from_bits<T>(mtl_atomic(op, mtl_type<T>::code, (ulong)at, mtl_bits<T>(x), 0));                      \
  }
#define MTL_ATOMICS(space)                                                                                         \
  template <typename T>                                                                                            \
  T atomic_load_explicit(const volatile space atomic<T>* at, memory_order) {                                       \
    return mtl_from_bits<T>(mtl_atomic(mtl_atomic_load, mtl_type<T>::code, (ulong)at, 0, 0));                      \
  }                                                                                                                \
  template <typename T>                                                                                            \
  void atomic_store_explicit(volatile space atomic<T>* at, mtl_operand<T> x, memory_order) {                       \
    mtl_atomic(mtl_atomic_store, mtl_type<T>::code, (ulong)at, mtl_bits<T>(x), 0);                                 \
  }                                                                                                                \
  template <typename T>                                                                                            \
  bool atomic_compare_exchange_weak_explicit(                                                                      \
      volatile space atomic<T>* at, thread mtl_operand<T>* expected, mtl_operand<T> x, memory_order, memory_order) { \
    T before = mtl_from_bits<T>(                                                                                   \
        mtl_atomic(mtl_atomic_compare, mtl_type<T>::code, (ulong)at, mtl_bits<T>(x), mtl_bits<T>(*expected)));     \
    bool same = mtl_bits<T>(before) == mtl_bits<T>(*expected);                                                     \
    *expected = before;                                                                                            \
    return same;                                                                                                   \
  }                                                                                                                \
  MTL_ATOMIC(space, exchange, mtl_atomic_exchange)                                                                 \
  MTL_ATOMIC(space, fetch_add, mtl_atomic_add)                                                                     \
  MTL_ATOMIC(space, fetch_sub, mtl_atomic_sub)                                                                     \
  MTL_ATOMIC(space, fetch_and, mtl_atomic_and)                                                                     \
  MTL_ATOMIC(space, fetch_or, mtl_atomic_or)                                                                       \
  MTL_ATOMIC(space, fetch_xor, mtl_atomic_xor)                                                                     \
  MTL_ATOMIC(space, fetch_min, mtl_atomic_min)                                                                     \
  MTL_ATOMIC(space, fetch_max, mtl_atomic_max)
MTL_ATOMICS(device)
MTL_ATOMICS(threadgroup)
#undef MTL_ATOMIC
#undef MTL_ATOMICS
}  // namespace metal
