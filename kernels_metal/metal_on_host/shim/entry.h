// What the generated entry points call.
#pragma once
#include "types.h"

extern "C" {
__attribute__((const)) ulong mtl_argument(int index);
__attribute__((const)) uint mtl_attribute(int which, int axis);
ulong mtl_threadgroup(ulong bytes, ulong alignment, int line, const constant char* name);
}
