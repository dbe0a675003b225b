// Products with a weight, for the primitives that are each other's gradients.
#pragma once

#include <functional>
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

// The shape of a dense w [N, K], without its data.
Weight dense_weight(const mlx::core::array& w);

// Takes a rectangle of y that is done.
using After = std::function<void(const MatmulTile&)>;

// y [rows, N] = x [rows, K] @ w^T, and y [rows, K] = x [rows, N] @ w, on all threads; `after` may be empty. Not for
// tiles.
void multiply_rows(const Weight& w, const float* x, float* y, long rows, const After& after);
void multiply_columns(const Weight& w, const float* x, float* y, long rows, const After& after);

}  // namespace mlxserve
