// Scalar, vector and packed types, type traits and limits of the Metal standard library.
#pragma once

typedef __bf16 bfloat;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef long intptr_t;

namespace metal {

template <typename T, int N>
using vec __attribute__((ext_vector_type(N))) = T;

#define MTL_VECTORS(type)     \
  typedef vec<type, 2> type##2; \
  typedef vec<type, 3> type##3; \
  typedef vec<type, 4> type##4;
MTL_VECTORS(char)
MTL_VECTORS(uchar)
MTL_VECTORS(short)
MTL_VECTORS(ushort)
MTL_VECTORS(int)
MTL_VECTORS(uint)
MTL_VECTORS(float)
MTL_VECTORS(bfloat)
// Vectors of 32 bytes are left out: the instrumentation sees accesses of up to 16 bytes.
typedef vec<long, 2> long2;
typedef vec<ulong, 2> ulong2;
typedef vec<ulong, 3> ulong3;
typedef vec<half, 2> half2;
typedef vec<half, 3> half3;
typedef vec<half, 4> half4;
#undef MTL_VECTORS

template <typename T, int N>
struct packed_vec {
  T mtl_elements[N];
  packed_vec() thread = default;
  packed_vec(vec<T, N> v) thread {
    for (int i = 0; i < N; i++) mtl_elements[i] = v[i];
  }
  thread T& operator[](int i) thread { return mtl_elements[i]; }
  const thread T& operator[](int i) const thread { return mtl_elements[i]; }
  device T& operator[](int i) device { return mtl_elements[i]; }
  const device T& operator[](int i) const device { return mtl_elements[i]; }
  threadgroup T& operator[](int i) threadgroup { return mtl_elements[i]; }
  const threadgroup T& operator[](int i) const threadgroup { return mtl_elements[i]; }
  const constant T& operator[](int i) const constant { return mtl_elements[i]; }
#define MTL_UNPACK(space)                                   \
  operator vec<T, N>() const space {                        \
    vec<T, N> v;                                            \
    for (int i = 0; i < N; i++) v[i] = mtl_elements[i];     \
    return v;                                               \
  }
  MTL_UNPACK(thread)
  MTL_UNPACK(device)
  MTL_UNPACK(threadgroup)
  MTL_UNPACK(constant)
#undef MTL_UNPACK
#define MTL_ASSIGN(space)                                   \
  void operator=(vec<T, N> v) space {                       \
    for (int i = 0; i < N; i++) mtl_elements[i] = v[i];     \
  }
  MTL_ASSIGN(device)
  MTL_ASSIGN(threadgroup)
#undef MTL_ASSIGN
};
#define MTL_PACKED(type)                        \
  typedef packed_vec<type, 2> packed_##type##2; \
  typedef packed_vec<type, 3> packed_##type##3; \
  typedef packed_vec<type, 4> packed_##type##4;
MTL_PACKED(char)
MTL_PACKED(uchar)
MTL_PACKED(short)
MTL_PACKED(ushort)
MTL_PACKED(int)
MTL_PACKED(uint)
MTL_PACKED(float)
MTL_PACKED(bfloat)
typedef packed_vec<half, 2> packed_half2;
typedef packed_vec<half, 3> packed_half3;
typedef packed_vec<half, 4> packed_half4;
#undef MTL_PACKED

template <typename T, T v>
struct integral_constant {
  static constexpr constant T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const thread { return v; }
  constexpr T operator()() const thread { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;

template <bool b, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool b, typename T = void>
using enable_if_t = typename enable_if<b, T>::type;
template <bool b, typename T, typename F>
struct conditional {
  typedef T type;
};
template <typename T, typename F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool b, typename T, typename F>
using conditional_t = typename conditional<b, T, F>::type;

template <typename T>
struct remove_const { typedef T type; };
template <typename T>
struct remove_const<const T> { typedef T type; };
template <typename T>
struct remove_volatile { typedef T type; };
template <typename T>
struct remove_volatile<volatile T> { typedef T type; };
template <typename T>
struct mtl_remove_space { typedef T type; };
template <typename T>
struct mtl_remove_space<__global T> { typedef T type; };
template <typename T>
struct mtl_remove_space<__local T> { typedef T type; };
template <typename T>
struct mtl_remove_space<__constant T> { typedef T type; };
template <typename T>
struct mtl_remove_space<__private T> { typedef T type; };
template <typename T>
struct remove_cv {
  typedef typename remove_const<typename remove_volatile<typename mtl_remove_space<T>::type>::type>::type type;
};
template <typename T>
struct remove_reference { typedef T type; };
template <typename T>
struct remove_reference<T&> { typedef T type; };
template <typename T>
struct remove_pointer { typedef T type; };
template <typename T>
struct remove_pointer<T*> { typedef T type; };
template <typename T>
using remove_const_t = typename remove_const<T>::type;
template <typename T>
using remove_cv_t = typename remove_cv<T>::type;
template <typename T>
using remove_reference_t = typename remove_reference<T>::type;
template <typename T>
using remove_pointer_t = typename remove_pointer<T>::type;
template <typename T>
using remove_cvref_t = remove_cv_t<remove_reference_t<T>>;
template <typename T>
using decay_t = remove_cv_t<remove_reference_t<T>>;
template <typename T>
using remove_addrspace_t = typename mtl_remove_space<T>::type;

template <typename A, typename B>
struct is_same : false_type {};
template <typename A>
struct is_same<A, A> : true_type {};
template <typename A, typename B>
static constexpr constant bool is_same_v = is_same<A, B>::value;
template <typename A, typename B>
struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};
template <typename A, typename B>
static constexpr constant bool is_convertible_v = __is_convertible_to(A, B);
template <typename... T>
struct _disjunction : bool_constant<(T::value || ...)> {};
template <typename... T>
struct _conjunction : bool_constant<(T::value && ...)> {};
template <typename T>
struct is_integral : bool_constant<__is_integral(remove_cv_t<T>)> {};
template <typename T>
static constexpr constant bool is_integral_v = is_integral<T>::value;
template <typename T>
struct is_floating_point : bool_constant<__is_floating_point(remove_cv_t<T>)> {};
template <>
struct is_floating_point<bfloat> : true_type {};
template <>
struct is_floating_point<half> : true_type {};
template <typename T>
static constexpr constant bool is_floating_point_v = is_floating_point<T>::value;
template <typename T>
static constexpr constant bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <typename T>
struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <typename T>
static constexpr constant bool is_unsigned_v = is_integral_v<T> && T(-1) > T(0);
template <typename T>
struct is_unsigned : bool_constant<is_unsigned_v<T>> {};
template <typename T>
static constexpr constant bool is_signed_v = is_arithmetic_v<T> && !(T(-1) > T(0));
template <typename T>
static constexpr constant bool is_pointer_v = false;
template <typename T>
static constexpr constant bool is_pointer_v<T*> = true;

// A value that all threads of a simdgroup share; only a hint to Metal's compiler.
template <typename T>
using uniform = T;
template <typename T>
constexpr T make_uniform(T value) {
  return value;
}

template <typename T, size_t N>
struct array {
  T mtl_elements[N];
  constexpr thread T& operator[](size_t i) thread { return mtl_elements[i]; }
  constexpr const thread T& operator[](size_t i) const thread { return mtl_elements[i]; }
  constexpr const constant T& operator[](size_t i) const constant { return mtl_elements[i]; }
  constexpr size_t size() const thread { return N; }
};

template <typename T>
struct numeric_limits;
#define MTL_INT_LIMITS(type, low, high, bits, is_sign)            \
  template <>                                                     \
  struct numeric_limits<type> {                                   \
    static constexpr constant bool is_specialized = true;         \
    static constexpr constant bool is_integer = true;             \
    static constexpr constant bool is_signed = is_sign;           \
    static constexpr constant int digits = bits - is_sign;        \
    static constexpr type min() { return type(low); }             \
    static constexpr type max() { return type(high); }            \
    static constexpr type lowest() { return type(low); }          \
  };
MTL_INT_LIMITS(bool, false, true, 1, 0)
MTL_INT_LIMITS(char, -128, 127, 8, 1)
MTL_INT_LIMITS(int8_t, -128, 127, 8, 1)
MTL_INT_LIMITS(uchar, 0, 255, 8, 0)
MTL_INT_LIMITS(short, -32768, 32767, 16, 1)
MTL_INT_LIMITS(ushort, 0, 65535, 16, 0)
MTL_INT_LIMITS(int, -2147483647 - 1, 2147483647, 32, 1)
MTL_INT_LIMITS(uint, 0, 4294967295u, 32, 0)
MTL_INT_LIMITS(long, -9223372036854775807L - 1, 9223372036854775807L, 64, 1)
MTL_INT_LIMITS(ulong, 0, 18446744073709551615uL, 64, 0)
#undef MTL_INT_LIMITS
#define MTL_FLOAT_LIMITS(type, low, high, eps, bits)                        \
  template <>                                                               \
  struct numeric_limits<type> {                                             \
    static constexpr constant bool is_specialized = true;                   \
    static constexpr constant bool is_integer = false;                      \
    static constexpr constant bool is_signed = true;                        \
    static constexpr constant bool has_infinity = true;                     \
    static constexpr constant int digits = bits;                            \
    static constexpr type min() { return type(low); }                       \
    static constexpr type max() { return type(high); }                      \
    static constexpr type lowest() { return type(-(high)); }                \
    static constexpr type epsilon() { return type(eps); }                   \
    static constexpr type infinity() { return type(__builtin_inff()); }     \
    static constexpr type quiet_NaN() { return type(__builtin_nanf("")); }  \
  };
MTL_FLOAT_LIMITS(float, 1.175494351e-38f, 3.402823466e+38f, 1.192092896e-07f, 24)
MTL_FLOAT_LIMITS(half, 6.103515625e-05f, 65504.0f, 9.765625e-04f, 11)
MTL_FLOAT_LIMITS(bfloat, 1.175494351e-38f, 3.38953139e+38f, 7.8125e-03f, 8)
#undef MTL_FLOAT_LIMITS

// What the rewritten static_cast<name> and bfloat(x) call.
template <typename To, typename From>
constexpr To mtl_cast(From x) {
  if constexpr (is_same_v<To, bfloat> && is_same_v<From, half>) return static_cast<To>(static_cast<float>(x));
  else if constexpr (is_same_v<To, half> && is_same_v<From, bfloat>) return static_cast<To>(static_cast<float>(x));
  else return static_cast<To>(x);
}

// What the rewritten `float4(...)` and `vec<T, N>(...)` call: Metal's vector constructors, which convert each element.
template <typename T, int N>
struct mtl_shape {
  typedef T element;
  static constexpr constant int size = N;
};
template <typename T>
mtl_shape<T, 1> mtl_shape_of(T);
template <typename T>
mtl_shape<T, 2> mtl_shape_of(vec<T, 2>);
template <typename T>
mtl_shape<T, 3> mtl_shape_of(vec<T, 3>);
template <typename T>
mtl_shape<T, 4> mtl_shape_of(vec<T, 4>);
template <typename V>
V mtl_make() {
  return V{};
}
template <typename V, typename A>
void mtl_put(thread V& out, thread int& at, A a) {
  typedef decltype(mtl_shape_of(V{})) shape;
  typedef decltype(mtl_shape_of(a)) from;
  if constexpr (from::size == 1) {
    out[at++] = static_cast<typename shape::element>(a);
  } else {
    for (int i = 0; i < from::size; i++) out[at++] = static_cast<typename shape::element>(a[i]);
  }
}
template <typename A>
struct mtl_size_of {
  static constexpr constant int value = decltype(mtl_shape_of(A{}))::size;
};
template <typename V, typename A, typename... Rest>
V mtl_make(A a, Rest... rest) {
  typedef decltype(mtl_shape_of(V{})) shape;
  V out;
  int at = 0;
  if constexpr (sizeof...(Rest) == 0 && mtl_size_of<A>::value == 1) {
    for (int i = 0; i < shape::size; i++) out[i] = static_cast<typename shape::element>(a);
  } else {
    constexpr int given = (mtl_size_of<A>::value + ... + mtl_size_of<Rest>::value);
    static_assert(given == shape::size, "a vector constructor takes as many elements as the vector has");
    mtl_put(out, at, a);
    (mtl_put(out, at, rest), ...);
  }
  return out;
}

}  // namespace metal

template <typename To, typename From>
constexpr To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type takes types of one size");
  return __builtin_bit_cast(To, value);
}
namespace metal {
using ::as_type;
}
