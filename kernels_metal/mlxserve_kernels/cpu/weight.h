// What the formats of weights need: the checks of their parts, and their sizes in memory.
#pragma once

#include <optional>
#include <string>

#include "kernels.h"
#include "mlx/array.h"

namespace mlxserve {

// A quantized weight without its pointers. Throws where its parts do not fit the mode or each other.
Weight quantized_shape(const char* op, const mlx::core::array& w, const mlx::core::array& scales,
                       const std::optional<mlx::core::array>& biases, int group_size, int bits,
                       const std::string& mode);

long row_bytes(const Weight& w);
long scale_row_bytes(const Weight& w);  // of scales, and of biases where there are any

}  // namespace mlxserve
