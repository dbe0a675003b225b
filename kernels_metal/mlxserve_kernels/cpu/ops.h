// The kernels as lazy MLX operations. Shapes and dtypes: see ops.py. Wrong ones throw std::invalid_argument,
// at once; wrong values of index arrays when the result is evaluated.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "mlx/array.h"

namespace mlxserve {

namespace mx = mlx::core;

mx::array quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
                           const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode);
mx::array linear(const mx::array& x, const mx::array& w);
mx::array embed_rows(const mx::array& ids, const mx::array& w, const std::optional<mx::array>& scales,
                     const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode);
mx::array greedy_tokens(const mx::array& logits);
mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps);
mx::array silu_mul(const mx::array& gate, const mx::array& up);

mx::array resize_rows(mx::array a, int rows);
std::pair<mx::array, mx::array> write_pages(const mx::array& k_pool, const mx::array& v_pool, const mx::array& k,
                                            const mx::array& v, const mx::array& slot_mapping);
std::pair<mx::array, mx::array> copy_pages(const mx::array& k_pool, const mx::array& v_pool,
                                           const mx::array& source_ids, const mx::array& target_ids);

mx::array paged_attention(const mx::array& q, const mx::array& k_pool, const mx::array& v_pool,
                          const mx::array& block_tables, const mx::array& q_starts, const mx::array& kv_lens,
                          float scale, int window, float softcap, const std::optional<mx::array>& sinks);

}  // namespace mlxserve
