// What comes back through products of rows with experts, as operations of their own.
#pragma once

#include <vector>

#include "kernels.h"
#include "mlx/array.h"

namespace mlxserve {

// Of y[..., j, :] = x[..., j, :] @ w[ids[..., j]]^T what belongs to x: y[..., j, :] @ w[ids[..., j]]. d_y float32
// [..., top_k, N], ids [..., top_k]; `weights` are the arrays of w: w [E, N, ...] and, of quantized formats, scales and,
// of affine ones, biases; `shape` is that of one expert. Returns [..., top_k, K].
mlx::core::array gather_columns(const mlx::core::array& d_y, const mlx::core::array& ids,
                                const std::vector<mlx::core::array>& weights, const Weight& shape, long experts);

// What belongs to dense weights, float32 [experts, N, K]: of each expert the sum of d_y^T @ x of its rows. d_y float32
// [P, N], x float32 [P, K], ids [P].
mlx::core::array expert_weight_gradient(const mlx::core::array& d_y, const mlx::core::array& x,
                                        const mlx::core::array& ids, long experts);

}  // namespace mlxserve
