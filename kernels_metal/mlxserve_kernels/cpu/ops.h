// The kernels as lazy MLX operations. Shapes and dtypes: see ops.py. Wrong ones throw std::invalid_argument,
// at once; wrong values of index arrays when the result is evaluated.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels.h"
#include "mlx/array.h"

namespace mlxserve {

namespace mx = mlx::core;

mx::array quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
                           const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode,
                           bool is_transposed);
mx::array linear(const mx::array& x, const mx::array& w);
mx::array embed_rows(const mx::array& ids, const mx::array& w, const std::optional<mx::array>& scales,
                     const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode);
// Words, scales and, for affine modes, biases.
std::vector<mx::array> quantize(const mx::array& x, int group_size, int bits, const std::string& mode, int effort,
                                const std::optional<mx::array>& importance);
mx::array greedy_tokens(const mx::array& logits);
mx::array sample_tokens(const mx::array& logits, const std::vector<double>& temperature, const std::vector<int64_t>& top_k,
                        const std::vector<double>& top_p, const std::vector<double>& min_p,
                        const std::vector<std::pair<uint32_t, uint32_t>>& keys);
mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps);
// The norm of x + residual, and that sum.
std::pair<mx::array, mx::array> add_rms_norm(const mx::array& x, const mx::array& residual,
                                             const std::optional<mx::array>& weight, float eps);
mx::array gated(const mx::array& gate, const mx::array& up, Activation activation);

// Whether this CPU computes with tiles, and how many digits its integers have.
bool has_tiles();
void set_digits(int digits);
mx::array pack_tiles(const mx::array& w, const mx::array& scales, const mx::array& biases, int group_size, int bits);
std::tuple<mx::array, mx::array, mx::array> unpack_tiles(const mx::array& tiles, int group_size, int bits,
                                                         mx::Dtype scale_dtype);
mx::array tiled_matmul(const mx::array& x, const mx::array& tiles, int group_size, int bits, mx::Dtype scale_dtype);
mx::array tiled_rows(const mx::array& ids, const mx::array& tiles, int group_size, int bits, mx::Dtype scale_dtype);

mx::array resize_rows(mx::array a, int rows);
std::pair<mx::array, mx::array> write_pages(const mx::array& k_pool, const mx::array& v_pool, const mx::array& k,
                                            const mx::array& v, const mx::array& slot_mapping, int kv_bits);
std::pair<mx::array, mx::array> copy_pages(const mx::array& k_pool, const mx::array& v_pool,
                                           const mx::array& source_ids, const mx::array& target_ids);

mx::array paged_attention(const mx::array& q, const mx::array& k_pool, const mx::array& v_pool,
                          const mx::array& block_tables, const mx::array& q_starts, const mx::array& kv_lens,
                          float scale, int window, float softcap, const std::optional<mx::array>& sinks,
                          int kv_bits);

// The weights of all experts: see ops.ExpertWeights.
struct ExpertArrays {
  mx::array w;
  std::optional<mx::array> scales, biases;
  int group_size, bits;
  std::string mode;
  std::optional<mx::array> bias;
  std::optional<mx::Dtype> scale_dtype;  // w is tiles, [experts, N / 16, groups, bytes]
};

mx::array gather_matmul(const mx::array& x, const mx::array& ids, const ExpertArrays& matrix);
mx::array gated_experts(const mx::array& x, const mx::array& ids, const std::optional<mx::array>& shares,
                        const ExpertArrays& gate, const ExpertArrays& up, const ExpertArrays& down,
                        Activation activation);
// The change that its row's adapter makes to a product: scales[s] * (x @ a[s]) @ b[s], s being slots[row]; 0 for -1.
mx::array lora_delta(const mx::array& x, const mx::array& a, const mx::array& b, const mx::array& slots,
                     const mx::array& scales);

// x [..., K] @ w [K, N].
mx::array matmul(const mx::array& x, const mx::array& w);
// x @ w^T + scale * (x @ a) @ b.
mx::array adapted_matmul(const mx::array& x, const mx::array& a, const mx::array& b, float scale, const mx::array& w,
                         const std::optional<mx::array>& scales, const std::optional<mx::array>& biases, int group_size,
                         int bits, const std::string& mode);
mx::array rotate_heads(const mx::array& x, const mx::array& positions, const mx::array& inverse_frequencies,
                       float position_scale, float input_scale, bool is_interleaved);
mx::array causal_attention(const mx::array& q, const mx::array& k, const mx::array& v,
                           const std::optional<mx::array>& segments, float scale, int window, float softcap);
mx::array cross_entropy_head(const mx::array& hidden, const mx::array& targets, const mx::array& weights,
                             const mx::array& w, const std::optional<mx::array>& scales,
                             const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode,
                             float logit_scale, float softcap, bool with_gradient);

std::pair<mx::array, mx::array> route(const mx::array& logits, int top_k, bool is_normalized);

}  // namespace mlxserve
