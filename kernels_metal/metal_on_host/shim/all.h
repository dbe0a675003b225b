#pragma once
#include "types.h"

#include "math.h"

#include "simd.h"

#include "atomic.h"
#include "entry.h"
#include "matrix.h"
#include "sync.h"
