// The gradients of norms and gated activations as operations of their own.
#pragma once

#include <optional>
#include <utility>

#include "kernels.h"
#include "mlx/array.h"

namespace mlxserve {

// Of y = rms_norm(x, weight, eps): what belongs to x, plus d_sum, and to the weight, where there is one and
// `is_weight_wanted`. All float32, x [..., K], weight [K].
std::pair<mlx::core::array, std::optional<mlx::core::array>> rms_norm_gradient(
    const mlx::core::array& x, const std::optional<mlx::core::array>& weight, const mlx::core::array& d_y,
    const std::optional<mlx::core::array>& d_sum, float eps, bool is_weight_wanted);

// Of y = f(gate) * up: what belongs to gate and to up. All float32 of one shape.
std::pair<mlx::core::array, mlx::core::array> gated_gradient(const mlx::core::array& gate, const mlx::core::array& up,
                                                             const mlx::core::array& d_y, Activation activation);

}  // namespace mlxserve
