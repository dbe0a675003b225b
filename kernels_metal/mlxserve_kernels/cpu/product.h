// Products with a weight, for the primitives that are each other's gradients.
#pragma once

#include <vector>

#include "kernels.h"
#include "mlx/array.h"

namespace mlxserve {

// Of x with w[N, K]: x[..., K] @ w^T; x[..., N] @ w; x[N, M]^T @ w, of a dense w.
enum class Product { rows, columns, turned };

// inputs: x and the arrays of the weight: w and, of quantized formats, scales and, of affine ones, biases; tiles.
mlx::core::array lazy_product(std::vector<mlx::core::array> inputs, const Weight& shape, Product product,
                              mlx::core::Dtype dtype);

// x @ w^T with tiles.
mlx::core::array lazy_tiled(std::vector<mlx::core::array> inputs, const Weight& shape, mlx::core::Dtype dtype);

}  // namespace mlxserve
