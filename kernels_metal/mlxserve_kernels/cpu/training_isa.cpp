// The kernels of training for one instruction set, as isa.cpp is for serving.
#include "training_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// The headers that all kernels share have functions that these do not call.
#pragma GCC diagnostic ignored "-Wunused-function"

namespace mlxserve::MLXSERVE_ISA {
namespace {

#include "vec.h"

#include "activations.h"
#include "block_product.h"
#include "training_attention.h"
#include "training_rows.h"

}  // namespace

extern const TrainingKernels training_kernels;
const TrainingKernels training_kernels = {
    .multiply_blocks = multiply_blocks,
    .causal_scratch_floats = causal_scratch_floats,
    .attend_causal = attend_causal,
    .causal_gradient_scratch_floats = causal_gradient_scratch_floats,
    .causal_gradient = causal_gradient,
    .take_logits = take_logits,
    .logit_gradient = logit_gradient,
    .rms_norm_gradient = rms_norm_gradient,
    .gated_gradient = gated_gradient,
};

}  // namespace mlxserve::MLXSERVE_ISA
