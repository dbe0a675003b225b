// SIMD-group and quad-group functions: every lane hands its value to the runtime, which answers when all have come.
#pragma once
#include "types.h"

#define MTL_SITE int line = __builtin_LINE(), const constant char* file = __builtin_FILE()
#define MTL_CONVERGENT inline __attribute__((convergent))

// The order is the runtime's `enum Simd`.
enum mtl_simd_op {
  mtl_op_sum, mtl_op_product, mtl_op_min, mtl_op_max, mtl_op_and, mtl_op_or, mtl_op_xor,
  mtl_op_prefix_inclusive_sum, mtl_op_prefix_exclusive_sum,
  mtl_op_prefix_inclusive_product, mtl_op_prefix_exclusive_product,
  mtl_op_shuffle, mtl_op_shuffle_xor, mtl_op_shuffle_up, mtl_op_shuffle_down,
  mtl_op_rotate_up, mtl_op_rotate_down, mtl_op_fill_up, mtl_op_fill_down,
  mtl_op_broadcast, mtl_op_broadcast_first, mtl_op_ballot, mtl_op_sync
};

// `const`, so that the compiler need not read memory again behind a call, which Metal's compiler need not either.
extern "C" __attribute__((convergent, const)) ulong mtl_simd(
    int op, int type, int width, ulong value, ulong fill, uint lane, uint modulo, int line, const constant char* file);
extern "C" __attribute__((convergent)) void mtl_simd_sync(int line, const constant char* file);

namespace metal {

// The order is the runtime's `enum Type`.
template <typename T>
struct mtl_type;
#define MTL_TYPE(type, n)                            \
  template <>                                        \
  struct mtl_type<type> {                            \
    static constexpr constant int code = n;          \
    static constexpr constant int count = 1;         \
  };
MTL_TYPE(int8_t, 0)
MTL_TYPE(char, 0)
MTL_TYPE(uchar, 1)
MTL_TYPE(short, 2)
MTL_TYPE(ushort, 3)
MTL_TYPE(int, 4)
MTL_TYPE(uint, 5)
MTL_TYPE(long, 6)
MTL_TYPE(ulong, 7)
MTL_TYPE(half, 8)
MTL_TYPE(bfloat, 9)
MTL_TYPE(float, 10)
MTL_TYPE(bool, 1)
#undef MTL_TYPE
#define MTL_VECTOR_TYPE(n)                                        \
  template <typename T>                                           \
  struct mtl_type<vec<T, n>> {                                    \
    static constexpr constant int code = mtl_type<T>::code;       \
    static constexpr constant int count = n;                      \
  };
MTL_VECTOR_TYPE(2)
MTL_VECTOR_TYPE(3)
MTL_VECTOR_TYPE(4)
#undef MTL_VECTOR_TYPE

template <typename T>
METAL_FUNC ulong mtl_bits(T x) {
  if constexpr (sizeof(T) == 1) return __builtin_bit_cast(uchar, x);
  else if constexpr (sizeof(T) == 2) return __builtin_bit_cast(ushort, x);
  else if constexpr (sizeof(T) == 4) return __builtin_bit_cast(uint, x);
  else return __builtin_bit_cast(ulong, x);
}
template <typename T>
METAL_FUNC T mtl_from_bits(ulong x) {
  if constexpr (sizeof(T) == 1) return __builtin_bit_cast(T, uchar(x));
  else if constexpr (sizeof(T) == 2) return __builtin_bit_cast(T, ushort(x));
  else if constexpr (sizeof(T) == 4) return __builtin_bit_cast(T, uint(x));
  else return __builtin_bit_cast(T, x);
}

template <typename T>
MTL_CONVERGENT T mtl_lanes(int op, int width, T value, T fill, uint lane, uint modulo, int line, const constant char* file) {
  static_assert(sizeof(T) <= 4 * mtl_type<T>::count + 4 * (mtl_type<T>::count == 3), "lanes exchange up to 32 bits");
  if constexpr (mtl_type<T>::count == 1) {
    return mtl_from_bits<T>(
        mtl_simd(op, mtl_type<T>::code, width, mtl_bits(value), mtl_bits(fill), lane, modulo, line, file));
  } else {
    T out;
    for (int i = 0; i < mtl_type<T>::count; i++)
      out[i] = mtl_lanes(op, width, value[i], fill[i], lane, modulo, line, file);
    return out;
  }
}

#define MTL_REDUCE(name)                                                                                        \
  template <typename T>                                                                                         \
  MTL_CONVERGENT T simd_##name(T x, MTL_SITE) {                                                                 \
    return mtl_lanes(mtl_op_##name, 32, x, x, 0, 32, line, file);                                               \
  }                                                                                                             \
  template <typename T>                                                                                         \
  MTL_CONVERGENT T quad_##name(T x, MTL_SITE) {                                                                 \
    return mtl_lanes(mtl_op_##name, 4, x, x, 0, 4, line, file);                                                 \
  }                                                                                                             \
  template <typename T>                                                                                         \
  MTL_CONVERGENT T __metal_simd_##name(T x, MTL_SITE) {                                                         \
    return mtl_lanes(mtl_op_##name, 32, x, x, 0, 32, line, file);                                               \
  }
MTL_REDUCE(sum)
MTL_REDUCE(product)
MTL_REDUCE(min)
MTL_REDUCE(max)
MTL_REDUCE(and)
MTL_REDUCE(or)
MTL_REDUCE(xor)
MTL_REDUCE(prefix_inclusive_sum)
MTL_REDUCE(prefix_exclusive_sum)
MTL_REDUCE(prefix_inclusive_product)
MTL_REDUCE(prefix_exclusive_product)
#undef MTL_REDUCE

#define MTL_MOVE(name, op)                                                                                      \
  template <typename T>                                                                                         \
  MTL_CONVERGENT T simd_##name(T x, ushort lane, MTL_SITE) {                                                    \
    return mtl_lanes(op, 32, x, x, lane, 32, line, file);                                                       \
  }                                                                                                             \
  template <typename T>                                                                                         \
  MTL_CONVERGENT T quad_##name(T x, ushort lane, MTL_SITE) {                                                    \
    return mtl_lanes(op, 4, x, x, lane, 4, line, file);                                                         \
  }                                                                                                             \
  template <typename T>                                                                                         \
  MTL_CONVERGENT T __metal_simd_##name(T x, ushort lane, MTL_SITE) {                                            \
    return mtl_lanes(op, 32, x, x, lane, 32, line, file);                                                       \
  }
MTL_MOVE(shuffle, mtl_op_shuffle)
MTL_MOVE(shuffle_xor, mtl_op_shuffle_xor)
MTL_MOVE(shuffle_up, mtl_op_shuffle_up)
MTL_MOVE(shuffle_down, mtl_op_shuffle_down)
MTL_MOVE(shuffle_rotate_up, mtl_op_rotate_up)
MTL_MOVE(shuffle_rotate_down, mtl_op_rotate_down)
MTL_MOVE(broadcast, mtl_op_broadcast)
#undef MTL_MOVE

#define MTL_FILL(name, op)                                                                                      \
  template <typename T>                                                                                         \
  MTL_CONVERGENT T simd_##name(T x, T fill, ushort delta, MTL_SITE) {                                           \
    return mtl_lanes(op, 32, x, fill, delta, 32, line, file);                                                   \
  }                                                                                                             \
  template <typename T>                                                                                         \
  MTL_CONVERGENT T __metal_simd_##name(T x, T fill, ushort delta, ushort modulo, MTL_SITE) {                    \
    return mtl_lanes(op, 32, x, fill, delta, modulo, line, file);                                               \
  }
MTL_FILL(shuffle_and_fill_up, mtl_op_fill_up)
MTL_FILL(shuffle_and_fill_down, mtl_op_fill_down)
#undef MTL_FILL

inline ushort __metal_get_simdgroup_size(ushort) { return 32; }

template <typename T>
MTL_CONVERGENT T simd_broadcast_first(T x, MTL_SITE) {
  return mtl_lanes(mtl_op_broadcast_first, 32, x, x, 0, 32, line, file);
}

struct simd_vote {
  typedef ulong vote_t;
  ulong bits;
  explicit simd_vote(ulong b) : bits(b) {}
  explicit operator vote_t() const { return bits; }
  bool all() const { return bits == 0xffffffffuL; }
  bool any() const { return bits != 0; }
};
MTL_CONVERGENT ulong mtl_ballot(bool x, int line, const constant char* file) {
  return mtl_lanes<uint>(mtl_op_ballot, 32, uint(x), 0u, 0, 32, line, file);
}
MTL_CONVERGENT simd_vote simd_ballot(bool x, MTL_SITE) { return simd_vote(mtl_ballot(x, line, file)); }
MTL_CONVERGENT simd_vote simd_active_threads_mask(MTL_SITE) { return simd_vote(mtl_ballot(true, line, file)); }
MTL_CONVERGENT bool simd_any(bool x, MTL_SITE) { return mtl_ballot(x, line, file) != 0; }
MTL_CONVERGENT bool simd_all(bool x, MTL_SITE) { return mtl_ballot(!x, line, file) == 0; }
MTL_CONVERGENT bool simd_is_first(MTL_SITE) {
  return mtl_lanes<uint>(mtl_op_prefix_exclusive_sum, 32, 1u, 0u, 0, 32, line, file) == 0;
}

}  // namespace metal
