// Tiled weights as MLX arrays: uint8 [N / 16, K / group, bytes of a group].
#pragma once

#include <vector>

#include "kernels.h"
#include "mlx/array.h"

namespace mlxserve {

// The shape of tiled weights, without their data. Throws std::invalid_argument where it is none.
Weight tiles_view(const char* op, const mlx::core::array& tiles, int group_size, int bits,
                  mlx::core::Dtype scale_dtype);

// Rows of a weight by int32 ids, dequantized; inputs are the ids and the arrays of the weight, of tiles one.
mlx::core::array lazy_rows(std::vector<mlx::core::array> inputs, const Weight& shape);

bool has_tiles();

// Digits of the integers that activations become: 3 is float32's accuracy, 1 is int8.
long num_digits();

}  // namespace mlxserve
