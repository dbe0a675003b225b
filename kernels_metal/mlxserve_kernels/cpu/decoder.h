// Whole decoder layers as one primitive. What the fields mean: see mlxserve_kernels/decoder.py.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "experts.h"
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

  // Affine weights in tiles (ops.pack_tiles).
  Matrix(const mx::array& tiles, int group_size, int bits, mx::Dtype scale_dtype, const std::optional<mx::array>& bias);

  // Its outputs begin to end - 1, on the same memory.
  Matrix rows(long begin, long end) const;

  Weight w{};
  const float* bias = nullptr;
  long site = -1;  // which of a stack's projections it is, -1 for none

 private:
  void take_bias(const std::optional<mx::array>& bias);

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

// Experts of a layer. gate, up and down hold those of all experts, one behind the other.
struct Experts {
  Experts(Matrix router, Matrix gate, Matrix up, Matrix down, long top_k, bool is_normalized,
          std::optional<Matrix> shared_gate);

  Matrix router, gate_arrays, up_arrays, down_arrays;
  ExpertMatrix gate, up, down;
  long count, top_k;
  bool is_normalized;
  std::optional<Matrix> shared_gate;
};

constexpr long kProjections = 7;  // of a layer, that adapters may change

struct DecoderLayer {
  long heads = 0, kv_heads = 0, dim = 0, value_dim = 0;
  float scale = 0;
  long window = 0;
  float softcap = 0;
  float residual_multiplier = 1;
  Activation activation = Activation::silu;
  std::optional<Matrix> q, k, v, o, gate, up, down;
  std::optional<Experts> experts;
  std::optional<Norm> attention_norm, q_norm, k_norm, post_attention_norm, mlp_norm, post_mlp_norm;
  std::optional<Rope> rope;
  std::optional<mx::array> sinks;

  bool has_mlp() const { return gate.has_value(); }
  // q, k, v, o, gate, up and down: null for any other name, and where the layer has none.
  const Matrix* projection(const std::string& name) const;
  long hidden() const { return o->w.n; }
};

// Layers that follow each other. Immutable.
class DecoderStack {
 public:
  // Throws std::invalid_argument where the parts of a layer do not fit together. Numbers the projections: site
  // kProjections * i + j is projection j of layer i.
  explicit DecoderStack(std::vector<DecoderLayer> layers);

  std::vector<DecoderLayer> layers;
  std::vector<long> angle_of;  // of each layer: which of `ropes` it takes, -1 for none
  std::vector<Rope> ropes;     // with different angles
  long widest = 0;             // inputs of the widest projection
  bool has_tiles = false, has_plain = false;  // weights in tiles, and others
  long angle_floats = 0;       // of one row, all ropes
};

class Adapters;
using Arrays = std::vector<mx::array>;

struct StackPools;  // stack_pools.h

// The hidden state behind the last layer and the new handle of k_pools[0] (see decoder.py). `adapters`, made for the
// stack of the pools, and adapter_slots come together.
std::pair<mx::array, mx::array> decoder_stack(std::shared_ptr<const StackPools> pools, const mx::array& hidden,
                                              const mx::array& positions, const mx::array& slot_mapping,
                                              const mx::array& block_tables, const mx::array& q_starts,
                                              const mx::array& kv_lens, const mx::array& order,
                                              std::shared_ptr<const Adapters> adapters,
                                              const std::optional<mx::array>& adapter_slots);

}  // namespace mlxserve
