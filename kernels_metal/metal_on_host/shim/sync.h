// Barriers. The memory flags count: a barrier without mem_threadgroup does not order threadgroup memory.
#pragma once
#include "simd.h"

extern "C" __attribute__((convergent)) void mtl_barrier(int scope, uint flags, int line, const constant char* file);

namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(uint(a) & uint(b)); }

MTL_CONVERGENT void threadgroup_barrier(mem_flags flags, MTL_SITE) { mtl_barrier(0, uint(flags), line, file); }
MTL_CONVERGENT void simdgroup_barrier(mem_flags flags, MTL_SITE) { mtl_barrier(1, uint(flags), line, file); }
}  // namespace metal
