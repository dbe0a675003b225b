// What training needs beside the kernels of serving, compiled for each instruction set as those are.
#pragma once

#include <cstddef>

#include "kernels.h"

namespace mlxserve {

constexpr long kAttentionBlock = 64;  // queries and keys of a block of causal attention
constexpr long kBlockLanes = 16;      // widths of what is multiplied are multiples of this, zeros at their ends

// c [m, n] = a [m, k] @ b [k, n], or c + that; n is a multiple of kBlockLanes. Rows of a are a_row, its columns
// a_column values apart; rows of b and c b_row and c_row.
struct BlockProduct {
  long m, n, k;
  const float* a;
  long a_row, a_column;
  const float* b;
  long b_row;
  float* c;
  long c_row;
  bool is_added;
};

// One query head of one row of a batch. Keys and values lie in blocks of kAttentionBlock positions, zeros behind the
// last: [block][position][dimension], `padded` dimensions; turned [block][dimension][position].
struct CausalHead {
  long length, dim, value_dim;
  long padded_dim, padded_value_dim;
  float scale, softcap;   // softcap 0: none
  const int* first_keys;  // [length]: query i sees keys first_keys[i] to i; it never decreases
  const float* q;
  long q_row;
  const float *keys, *turned_keys, *values, *turned_values;
};

// What comes back to a head; keys and values as [position][padded dimension], whole blocks of positions.
struct CausalHeadGradient {
  const float *out, *d_out;
  long out_row, d_out_row;
  const float* log_sums;
  float* d_q;
  long d_q_row;
  float *d_keys, *d_values;
};

// Logits are softcap * tanh(scale * product / softcap), or scale * product where softcap is 0.
struct LogitShape {
  float scale, softcap;
};

struct TrainingKernels {
  void (*multiply_blocks)(const BlockProduct&);

  std::size_t (*causal_scratch_floats)(const CausalHead&);
  // Queries begin to end - 1, of one block: `out` and `log_sums` are those of the first of them.
  void (*attend_causal)(const CausalHead&, long begin, long end, float* out, long out_row, float* log_sums,
                        float* scratch);
  std::size_t (*causal_gradient_scratch_floats)(const CausalHead&);
  void (*causal_gradient)(const CausalHead&, const CausalHeadGradient&, float* scratch);

  // A row of n products becomes e ** (logit - top) times the slope of its logit, `top` the largest so far. Returns
  // the factor for what was computed with the top before; `total` becomes the sum of e ** (logit - top).
  float (*take_logits)(const LogitShape&, float* products, long n, float& top, double& total);
  // A row of n products becomes the gradient of weight * (log_sum - logit[target]); target -1: none of these.
  void (*logit_gradient)(const LogitShape&, float* products, long n, float log_sum, long target, float weight);

  // For rows of k values: d_x of y = x / sqrt(mean(x ** 2) + eps) * weight, plus d_sum where that is given; what
  // belongs to the weight is added to d_weight where that is given.
  void (*rms_norm_gradient)(const float* x, const float* weight, const float* d_y, const float* d_sum, float eps,
                            long rows, long k, float* d_x, float* d_weight);
  void (*gated_gradient)(Activation, const float* gate, const float* up, const float* d_y, long n, float* d_gate,
                         float* d_up);
};

}  // namespace mlxserve
