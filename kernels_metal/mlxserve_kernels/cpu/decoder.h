// Whole decoder layers as one primitive. What the fields mean: see mlxserve_kernels/decoder.py.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "mlx/array.h"

namespace mlxserve {

namespace mx = mlx::core;

// y = x @ w^T + bias; holds the arrays that it reads.
class Matrix {
 public:
  // scales and biases: weights quantized so, as in mx.quantize; without them w is dense.
  Matrix(const mx::array& w, const std::optional<mx::array>& scales, const std::optional<mx::array>& biases,
         int group_size, int bits, const std::string& mode, const std::optional<mx::array>& bias);

  // Its outputs begin to end - 1, on the same memory.
  Matrix rows(long begin, long end) const;

  Weight w{};
  const float* bias = nullptr;

 private:
  std::vector<mx::array> held_;
};

struct Norm {
  Norm(const mx::array& weight, float eps);

  mx::array weight;
  Format format;
  const void* data;
  long size;
  float eps;
};

struct Rope {
  Rope(const mx::array& inverse_frequencies, float position_scale, float input_scale, bool is_interleaved);

  mx::array inverse_frequencies;
  float position_scale, input_scale;
  bool is_interleaved;
  long half() const { return long(inverse_frequencies.size()); }
};

struct DecoderLayer {
  long heads = 0, kv_heads = 0, dim = 0, value_dim = 0;
  float scale = 0;
  long window = 0;
  float softcap = 0;
  float residual_multiplier = 1;
  Activation activation = Activation::silu;
  std::optional<Matrix> q, k, v, o, gate, up, down;
  std::optional<Norm> attention_norm, q_norm, k_norm, post_attention_norm, mlp_norm, post_mlp_norm;
  std::optional<Rope> rope;
  std::optional<mx::array> sinks;

  bool has_mlp() const { return gate.has_value(); }
  long hidden() const { return o->w.n; }
};

// Layers that follow each other. Immutable.
class DecoderStack {
 public:
  // Throws std::invalid_argument where the parts of a layer do not fit together.
  explicit DecoderStack(std::vector<DecoderLayer> layers);

  std::vector<DecoderLayer> layers;
  std::vector<long> angle_of;  // of each layer: which of `ropes` it takes, -1 for none
  std::vector<Rope> ropes;     // with different angles
  long widest = 0;             // inputs of the widest projection
  long angle_floats = 0;       // of one row, all ropes
};

using Arrays = std::vector<mx::array>;

std::tuple<mx::array, Arrays, Arrays> decoder_stack(std::shared_ptr<const DecoderStack> stack, const mx::array& hidden,
                                                    const mx::array& positions, const mx::array& slot_mapping,
                                                    const mx::array& block_tables, const mx::array& q_starts,
                                                    const mx::array& kv_lens, const Arrays& k_pools,
                                                    const Arrays& v_pools);

}  // namespace mlxserve
