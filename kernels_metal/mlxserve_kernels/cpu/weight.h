// What the formats of weights need: the checks of their parts, their sizes in memory, and parts of a weight.
#pragma once

#include <optional>
#include <string>

#include "kernels.h"
#include "mlx/array.h"

namespace mlxserve {

// A quantized weight, w [..., N, K * bits / 32], without its pointers; what stands before N is not in its shape.
// Throws where its parts do not fit the mode or each other.
Weight quantized_shape(const char* op, const mlx::core::array& w, const mlx::core::array& scales,
                       const std::optional<mlx::core::array>& biases, int group_size, int bits,
                       const std::string& mode);

// The format of these settings; throws where there is none. Whether it is one with biases.
Format quantized_format(const char* op, int group_size, int bits, const std::string& mode);
bool is_affine(Format format);

// `count` rows from `begin` on, on the same memory. Experts follow each other: expert e is rows e * n to
// (e + 1) * n - 1. Of tiled weights both are whole tiles.
Weight rows_of(Weight w, long begin, long count);

}  // namespace mlxserve
