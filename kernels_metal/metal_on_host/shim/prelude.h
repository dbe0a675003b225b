// Forced in front of every Metal source: Metal's spelling in clang's C++ for OpenCL, which has the same address spaces.
#pragma once
#define __METAL_VERSION__ 320
#define __METAL__ 1
#define METAL_ON_HOST 1
#define MTL_PRELUDE 1

#define device __global
#define threadgroup __local
#define thread __private
#define half _Float16

// Keywords of OpenCL that are plain names in Metal.
#define local mtl_name_local
#define global mtl_name_global
#define generic mtl_name_generic
#define pipe mtl_name_pipe
#define read_only mtl_name_read_only
#define write_only mtl_name_write_only
#define read_write mtl_name_read_write

// Types that OpenCL has in the global namespace.
#define atomic_int mtl_name_atomic_int
#define atomic_uint mtl_name_atomic_uint
#define atomic_float mtl_name_atomic_float

#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST constant
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 0
#define __METAL_PRECISE_MATH__ 0
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX half(65504.0f)
#define HALF_MIN half(6.103515625e-05f)
#define HALF_EPSILON half(9.765625e-04f)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define USHRT_MAX 65535
#define SHRT_MAX 32767
#define UCHAR_MAX 255
#define CHAR_MAX 127
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_PI_F 0.636619772367581343076f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
