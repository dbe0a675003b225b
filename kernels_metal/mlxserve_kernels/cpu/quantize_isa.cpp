// Quantization for one instruction set: compiled as isa.cpp is, beside it, as nothing else needs its code.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace mlxserve::MLXSERVE_ISA {
namespace {

#include "vec.h"

#include "narrow.h"

#include "quantize.h"

}  // namespace

void quantize_groups(const Quantization& job, long begin, long end);
void quantize_groups(const Quantization& job, long begin, long end) {
  if (job.x_format == Format::float32) return quantize_some<Format::float32>(job, begin, end);
  if (job.x_format == Format::float16) return quantize_some<Format::float16>(job, begin, end);
  quantize_some<Format::bfloat16>(job, begin, end);
}

}  // namespace mlxserve::MLXSERVE_ISA
