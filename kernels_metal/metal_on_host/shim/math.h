// Math, integer, geometric and relational functions. Overloads by type, as in Metal: a call that is ambiguous there is
// ambiguous here. fast:: and precise:: are the same here; results that depend on the difference are not to be relied on.
#pragma once
#include "types.h"

extern "C" {
float acosf(float), acoshf(float), asinf(float), asinhf(float), atanf(float), atanhf(float), ceilf(float), cosf(float),
    coshf(float), expf(float), exp2f(float), fabsf(float), floorf(float), logf(float), log2f(float), log10f(float),
    rintf(float), roundf(float), sinf(float), sinhf(float), sqrtf(float), tanf(float), tanhf(float), truncf(float);
float atan2f(float, float), fmodf(float, float), powf(float, float), nextafterf(float, float), fmaf(float, float, float),
    ldexpf(float, int);
}

namespace metal {
#define MTL_UNARY(name, call)                                                        \
  inline float __metal_##name(float x, int = 0) { return call; }
MTL_UNARY(acos, acosf(x))
MTL_UNARY(acosh, acoshf(x))
MTL_UNARY(asin, asinf(x))
MTL_UNARY(asinh, asinhf(x))
MTL_UNARY(atan, atanf(x))
MTL_UNARY(atanh, atanhf(x))
MTL_UNARY(ceil, ceilf(x))
MTL_UNARY(cos, cosf(x))
MTL_UNARY(cosh, coshf(x))
MTL_UNARY(cospi, cosf(x * M_PI_F))
MTL_UNARY(exp, expf(x))
MTL_UNARY(exp2, exp2f(x))
MTL_UNARY(exp10, powf(10.0f, x))
MTL_UNARY(fabs, fabsf(x))
MTL_UNARY(floor, floorf(x))
MTL_UNARY(fract, x - floorf(x))
MTL_UNARY(log, logf(x))
MTL_UNARY(log2, log2f(x))
MTL_UNARY(log10, log10f(x))
MTL_UNARY(rint, rintf(x))
MTL_UNARY(round, roundf(x))
MTL_UNARY(rsqrt, 1.0f / sqrtf(x))
MTL_UNARY(sin, sinf(x))
MTL_UNARY(sinh, sinhf(x))
MTL_UNARY(sinpi, sinf(x * M_PI_F))
MTL_UNARY(sqrt, sqrtf(x))
MTL_UNARY(tan, tanf(x))
MTL_UNARY(tanh, tanhf(x))
MTL_UNARY(tanpi, tanf(x * M_PI_F))
MTL_UNARY(trunc, truncf(x))
#undef MTL_UNARY
inline float __metal_atan2(float y, float x, int = 0) { return atan2f(y, x); }
inline float __metal_divide(float x, float y, int = 0) { return x / y; }
inline float __metal_fma(float x, float y, float z) { return fmaf(x, y, z); }
inline float __metal_fmod(float x, float y, int = 0) { return fmodf(x, y); }
inline float __metal_pow(float x, float y, int = 0) { return powf(x, y); }
inline float __metal_powr(float x, float y, int = 0) { return powf(x, y); }
inline float __metal_nextafter(float x, float y) { return nextafterf(x, y); }
inline float __metal_ldexp(float x, int k, int = 0) { return ldexpf(x, k); }
inline float __metal_fmax(float x, float y, int = 0) { return x != x ? y : y != y ? x : x < y ? y : x; }
inline float __metal_fmin(float x, float y, int = 0) { return x != x ? y : y != y ? x : y < x ? y : x; }
inline float __metal_fmax3(float x, float y, float z, int = 0) { return __metal_fmax(x, __metal_fmax(y, z)); }
inline float __metal_fmin3(float x, float y, float z, int = 0) { return __metal_fmin(x, __metal_fmin(y, z)); }
inline float __metal_fmedian3(float x, float y, float z, int = 0) {
  return __metal_fmax(__metal_fmin(x, y), __metal_fmin(__metal_fmax(x, y), z));
}
inline float __metal_frexp(float x, thread int* at, int = 0) {
  thread int& exponent = *at;
  exponent = 0;
  if (x == 0 || x != x || __builtin_fabsf(x) == __builtin_inff()) return x;
  uint bits = __builtin_bit_cast(uint, x);
  if ((bits >> 23 & 255) == 0) {
    bits = __builtin_bit_cast(uint, x * 8388608.0f);
    exponent = -23;
  }
  exponent += int(bits >> 23 & 255) - 126;
  return __builtin_bit_cast(float, (bits & 0x807fffffu) | 0x3f000000u);
}

#define MTL_FLOAT_FUNCTIONS                                                                                         \
  MTL_1(acos) MTL_1(acosh) MTL_1(asin) MTL_1(asinh) MTL_1(atan) MTL_1(atanh) MTL_1(ceil) MTL_1(cos) MTL_1(cosh)      \
  MTL_1(cospi) MTL_1(exp) MTL_1(exp2) MTL_1(exp10) MTL_1(fabs) MTL_1(floor) MTL_1(fract) MTL_1(log) MTL_1(log2)      \
  MTL_1(log10) MTL_1(rint) MTL_1(round) MTL_1(rsqrt) MTL_1(sin) MTL_1(sinh) MTL_1(sinpi) MTL_1(sqrt) MTL_1(tan)      \
  MTL_1(tanh) MTL_1(tanpi) MTL_1(trunc) MTL_2(atan2) MTL_2(divide) MTL_2(fmod) MTL_2(pow) MTL_2(powr) MTL_2(fmax)    \
  MTL_2(fmin) MTL_3(fma) MTL_3(fmax3) MTL_3(fmin3)
#define MTL_1(name)                                                                          \
  inline float name(float x) { return __metal_##name(x); }                                   \
  inline half name(half x) { return half(__metal_##name(float(x))); }                        \
  template <typename T, int N>                                                               \
  vec<T, N> name(vec<T, N> x) {                                                              \
    vec<T, N> r;                                                                             \
    for (int i = 0; i < N; i++) r[i] = T(__metal_##name(float(x[i])));                       \
    return r;                                                                                \
  }
#define MTL_2(name)                                                                          \
  inline float name(float x, float y) { return __metal_##name(x, y); }                       \
  inline half name(half x, half y) { return half(__metal_##name(float(x), float(y))); }      \
  template <typename T, int N>                                                               \
  vec<T, N> name(vec<T, N> x, vec<T, N> y) {                                                 \
    vec<T, N> r;                                                                             \
    for (int i = 0; i < N; i++) r[i] = T(__metal_##name(float(x[i]), float(y[i])));          \
    return r;                                                                                \
  }
#define MTL_3(name)                                                                                              \
  inline float name(float x, float y, float z) { return __metal_##name(x, y, z); }                               \
  inline half name(half x, half y, half z) { return half(__metal_##name(float(x), float(y), float(z))); }        \
  template <typename T, int N>                                                                                   \
  vec<T, N> name(vec<T, N> x, vec<T, N> y, vec<T, N> z) {                                                        \
    vec<T, N> r;                                                                                                 \
    for (int i = 0; i < N; i++) r[i] = T(__metal_##name(float(x[i]), float(y[i]), float(z[i])));                 \
    return r;                                                                                                    \
  }
MTL_FLOAT_FUNCTIONS
namespace fast {
MTL_FLOAT_FUNCTIONS
}
namespace precise {
MTL_FLOAT_FUNCTIONS
}
#undef MTL_1
#undef MTL_2
#undef MTL_3
#undef MTL_FLOAT_FUNCTIONS

inline float ldexp(float x, int k) { return ldexpf(x, k); }
inline half ldexp(half x, int k) { return half(ldexpf(float(x), k)); }
inline float frexp(float x, thread int& e) { return __metal_frexp(x, &e); }
inline float nextafter(float x, float y) { return nextafterf(x, y); }
inline float modf(float x, thread float& whole) {
  whole = truncf(x);
  return x - whole;
}
inline float sincos(float x, thread float& c) {
  c = cosf(x);
  return sinf(x);
}
inline bool isnan(float x) { return x != x; }
inline bool isnan(half x) { return x != x; }
inline bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
inline bool isinf(half x) { return isinf(float(x)); }
inline bool isfinite(float x) { return __builtin_fabsf(x) < __builtin_inff(); }
inline bool isfinite(half x) { return isfinite(float(x)); }
inline bool signbit(float x) { return __builtin_bit_cast(int, x) < 0; }
inline bool signbit(half x) { return __builtin_bit_cast(short, x) < 0; }
inline float copysign(float x, float y) {
  return __builtin_bit_cast(float, (__builtin_bit_cast(uint, x) & 0x7fffffffu) | (__builtin_bit_cast(uint, y) & 0x80000000u));
}
inline half copysign(half x, half y) { return half(copysign(float(x), float(y))); }

#define MTL_ORDERED(type)                                                         \
  inline type max(type x, type y) { return x < y ? y : x; }                       \
  inline type min(type x, type y) { return y < x ? y : x; }                       \
  inline type max3(type x, type y, type z) { return max(x, max(y, z)); }          \
  inline type min3(type x, type y, type z) { return min(x, min(y, z)); }          \
  inline type clamp(type x, type low, type high) { return min(max(x, low), high); }
#define MTL_INTEGER(type, wide, bits)                                                                    \
  MTL_ORDERED(type)                                                                                      \
  inline type absdiff(type x, type y) { return x < y ? y - x : x - y; }                                  \
  inline type mulhi(type x, type y) { return type((wide(x) * wide(y)) >> bits); }                        \
  inline type extract_bits(type x, uint at, uint count) {                                                \
    return count == 0 ? type(0) : type(type(x << (bits - at - count)) >> (bits - count));                \
  }                                                                                                      \
  inline type rotate(type x, type by) {                                                                  \
    return (by & (bits - 1)) == 0 ? x : type((x << (by & (bits - 1))) | (x >> (bits - (by & (bits - 1))))); \
  }
MTL_INTEGER(char, int, 8)
MTL_INTEGER(int8_t, int, 8)
MTL_INTEGER(uchar, uint, 8)
MTL_INTEGER(short, int, 16)
MTL_INTEGER(ushort, uint, 16)
MTL_INTEGER(int, long, 32)
MTL_INTEGER(uint, ulong, 32)
MTL_ORDERED(long)
MTL_ORDERED(ulong)
MTL_ORDERED(float)
MTL_ORDERED(half)
#undef MTL_INTEGER
#undef MTL_ORDERED
namespace fast {
using metal::clamp;
using metal::max;
using metal::min;
}
namespace precise {
using metal::clamp;
using metal::max;
using metal::min;
}

inline int abs(int x) { return x < 0 ? -x : x; }
inline short abs(short x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return fabsf(x); }
inline half abs(half x) { return half(fabsf(float(x))); }
inline float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f; }
inline half sign(half x) { return half(sign(float(x))); }
inline float saturate(float x) { return clamp(x, 0.0f, 1.0f); }
inline half saturate(half x) { return clamp(x, half(0), half(1)); }
inline float mix(float x, float y, float a) { return x + (y - x) * a; }
inline half mix(half x, half y, half a) { return x + (y - x) * a; }
inline float step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
inline uint popcount(uint x) { return __builtin_popcount(x); }
inline int popcount(int x) { return __builtin_popcount(uint(x)); }
inline ulong popcount(ulong x) { return __builtin_popcountl(x); }
inline uint clz(uint x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int clz(int x) { return x == 0 ? 32 : __builtin_clz(uint(x)); }
inline ushort clz(ushort x) { return x == 0 ? 16 : __builtin_clz(uint(x)) - 16; }
inline uchar clz(uchar x) { return x == 0 ? 8 : __builtin_clz(uint(x)) - 24; }
inline ulong clz(ulong x) { return x == 0 ? 64 : __builtin_clzl(x); }
inline uint ctz(uint x) { return x == 0 ? 32 : __builtin_ctz(x); }
inline int ctz(int x) { return x == 0 ? 32 : __builtin_ctz(uint(x)); }
inline ulong ctz(ulong x) { return x == 0 ? 64 : __builtin_ctzl(x); }
inline int mad24(int x, int y, int z) { return x * y + z; }
inline uint mad24(uint x, uint y, uint z) { return x * y + z; }
inline int mul24(int x, int y) { return x * y; }
inline uint mul24(uint x, uint y) { return x * y; }
inline uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }

template <typename T>
T select(T a, T b, bool c) {
  return c ? b : a;
}
template <typename T, typename C, int N>
vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<C, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i];
  return r;
}
template <typename T, int N>
bool any(vec<T, N> x) {
  bool r = false;
  for (int i = 0; i < N; i++) r = r || x[i];
  return r;
}
template <typename T, int N>
bool all(vec<T, N> x) {
  bool r = true;
  for (int i = 0; i < N; i++) r = r && x[i];
  return r;
}
#define MTL_EACH_1(name)                                 \
  template <typename T, int N>                           \
  vec<T, N> name(vec<T, N> x) {                          \
    vec<T, N> r;                                         \
    for (int i = 0; i < N; i++) r[i] = name(x[i]);       \
    return r;                                            \
  }
#define MTL_EACH_2(name)                                       \
  template <typename T, int N>                                 \
  vec<T, N> name(vec<T, N> x, vec<T, N> y) {                   \
    vec<T, N> r;                                               \
    for (int i = 0; i < N; i++) r[i] = name(x[i], y[i]);       \
    return r;                                                  \
  }                                                            \
  template <typename T, int N>                                 \
  vec<T, N> name(vec<T, N> x, T y) {                           \
    vec<T, N> r;                                               \
    for (int i = 0; i < N; i++) r[i] = name(x[i], y);          \
    return r;                                                  \
  }
MTL_EACH_1(abs)
MTL_EACH_1(sign)
MTL_EACH_1(saturate)
MTL_EACH_1(popcount)
MTL_EACH_2(max)
MTL_EACH_2(min)
#undef MTL_EACH_1
#undef MTL_EACH_2
template <typename T, int N>
vec<T, N> clamp(vec<T, N> x, T low, T high) {
  return min(max(x, low), high);
}
template <typename T, int N>
vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> high) {
  return min(max(x, low), high);
}
template <typename T, int N>
T dot(vec<T, N> x, vec<T, N> y) {
  T r = x[0] * y[0];
  for (int i = 1; i < N; i++) r += x[i] * y[i];
  return r;
}
template <typename T, int N>
T length_squared(vec<T, N> x) {
  return dot(x, x);
}
template <typename T, int N>
T length(vec<T, N> x) {
  return sqrt(dot(x, x));
}
template <typename T, int N>
vec<T, N> normalize(vec<T, N> x) {
  return x * rsqrt(dot(x, x));
}

}  // namespace metal
