// The kernels for one instruction set: this file is compiled several times, with MLXSERVE_ISA naming the set.
#include "kernels.h"
#include "kv_layout.h"
#include "training_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define MLXSERVE_STRING_(x) #x
#define MLXSERVE_STRING(x) MLXSERVE_STRING_(x)

namespace mlxserve::MLXSERVE_ISA {
namespace {

#include "vec.h"

#include "narrow.h"

#include "page_bytes.h"

#include "attention.h"
#include "matmul.h"
#include "columns.h"
#include "activations.h"
#include "rows.h"
#include "low_rank.h"
#include "sampling.h"
#if defined(MLXSERVE_AVX512)
#include "tiles.h"
#endif

}  // namespace

void quantize_groups(const Quantization& job, long begin, long end);

extern const TrainingKernels training_kernels;
extern const Kernels kernels;
const Kernels kernels = {
    .name = MLXSERVE_STRING(MLXSERVE_ISA),
    .row_tile = TM,
    .panel_cols = PANEL,
    .block_rows = BLOCK_ROWS,
    .matmul_direct = matmul_direct,
    .packed_floats = packed_floats,
    .pack = pack,
    .panel_floats = panel_floats,
    .matmul_panel = matmul_panel,
#if defined(MLXSERVE_AVX512)
    .digit_bytes = digit_bytes,
    .to_digits = to_digits,
    .tile_matmul = tile_matmul,
#else
    .digit_bytes = nullptr,
    .to_digits = nullptr,
    .tile_matmul = nullptr,
#endif
    .columns_floats = columns_floats,
    .matmul_columns = matmul_columns,
    .widen = widen,
    .narrow = narrow,
    .low_rank_inner = low_rank_inner,
    .low_rank_change = low_rank_change,
    .read_row = read_row,
    .argmax = argmax,
    .block_maxima = block_maxima,
    .weigh = weigh,
    .collect = collect,
    .draw = draw,
    .rms_norm = rms_norm,
    .activate = activate,
    .add_scaled = add_scaled,
    .rotate = rotate,
    .quantize = quantize_groups,
    .attention_scratch_floats = attention_scratch_floats,
    .partial_floats = partial_floats,
    .attend_split = attend_split,
    .attend_merge = attend_merge,
    .attend_whole = attend_whole,
    .training = &training_kernels,
};

}  // namespace mlxserve::MLXSERVE_ISA
