// The parts of a layer and the checks that they fit together.
#include <algorithm>
#include <cstring>

#include "decoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "primitive.h"
#include "weight.h"

namespace mlxserve {
namespace {

mx::array ready(const mx::array& a) {
  mx::array whole = mx::contiguous(a);
  whole.eval();
  return whole;
}

bool has_same_angles(const Rope& a, const Rope& b) {
  return a.position_scale == b.position_scale && a.half() == b.half() &&
         std::memcmp(a.inverse_frequencies.data<float>(), b.inverse_frequencies.data<float>(),
                     a.half() * sizeof(float)) == 0;
}

void check(const DecoderLayer& l, long hidden) {
  const char* op = "DecoderStack";
  require(l.q && l.k && l.v && l.o, op, ": a layer needs q, k, v and o");
  require(l.heads > 0 && l.kv_heads > 0 && l.heads % l.kv_heads == 0, op, ": heads must be a multiple of kv_heads ",
          l.kv_heads, ", got ", l.heads);
  auto fits = [&](const char* name, const Matrix& m, long n, long k) {
    require(m.w.n == n && m.w.k == k, op, ": ", name, " must be [", n, ", ", k, "], got [", m.w.n, ", ", m.w.k, "]");
  };
  fits("q", *l.q, l.heads * l.dim, hidden);
  fits("k", *l.k, l.kv_heads * l.dim, hidden);
  fits("v", *l.v, l.kv_heads * l.value_dim, hidden);
  fits("o", *l.o, hidden, l.heads * l.value_dim);
  require(l.gate.has_value() == l.up.has_value() && l.gate.has_value() == l.down.has_value(), op,
          ": gate, up and down come together");
  if (l.has_mlp()) {
    fits("gate", *l.gate, l.gate->w.n, hidden);
    fits("up", *l.up, l.gate->w.n, hidden);
    fits("down", *l.down, hidden, l.gate->w.n);
  }
  for (const auto* norm : {&l.attention_norm, &l.post_attention_norm, &l.mlp_norm, &l.post_mlp_norm})
    require(!*norm || (*norm)->size == hidden, op, ": a norm must have ", hidden, " weights");
  require(!l.q_norm || l.q_norm->size == l.dim || l.q_norm->size == l.heads * l.dim, op,
          ": q_norm must have the weights of a head or of all");
  require(!l.k_norm || l.k_norm->size == l.dim || l.k_norm->size == l.kv_heads * l.dim, op,
          ": k_norm must have the weights of a head or of all");
  require(!l.rope || 2 * l.rope->half() <= l.dim, op, ": rope turns more than the ", l.dim, " values of a head");
  require(!l.sinks || (l.sinks->dtype() == mx::float32 && long(l.sinks->size()) == l.heads), op,
          ": sinks must be float32 [", l.heads, "]");
  require(l.window >= 0 && l.softcap >= 0, op, ": window and softcap must be positive");
}

}  // namespace

Matrix::Matrix(const mx::array& weight, const std::optional<mx::array>& scales, const std::optional<mx::array>& biases,
               int group_size, int bits, const std::string& mode, const std::optional<mx::array>& bias) {
  const char* op = "Matrix";
  require(weight.ndim() == 2 && weight.size() > 0, op, ": w must be [N, K]");
  require(scales || !biases, op, ": biases come with scales");
  if (scales) {
    w = quantized_shape(op, weight, *scales, biases, group_size, bits, mode);
    held_.push_back(ready(*scales));
    w.scales = held_.back().data<char>();
    if (biases) {
      held_.push_back(ready(*biases));
      w.biases = held_.back().data<char>();
    }
  } else {
    w.format = format_of(weight, op, "w");
    w.n = weight.shape(0), w.k = weight.shape(1);
  }
  held_.push_back(ready(weight));
  w.data = held_.back().data<char>();
  if (bias) {
    require(bias->ndim() == 1 && bias->shape(0) == w.n, op, ": bias must be [", w.n, "]");
    held_.push_back(ready(mx::astype(*bias, mx::float32)));
    this->bias = held_.back().data<float>();
  }
}

Matrix Matrix::rows(long begin, long end) const {
  require(begin >= 0 && begin < end && end <= w.n, "Matrix: rows ", begin, " to ", end, " of ", w.n);
  Matrix part = *this;
  part.w.n = end - begin;
  part.w.data = static_cast<const char*>(w.data) + begin * row_bytes(w);
  if (w.scales) {
    long offset = begin * scale_row_bytes(w);
    part.w.scales = static_cast<const char*>(w.scales) + offset;
    if (w.biases) part.w.biases = static_cast<const char*>(w.biases) + offset;
  }
  if (bias) part.bias = bias + begin;
  return part;
}

Norm::Norm(const mx::array& weights, float eps)
    : weight(ready(weights)), format(format_of(weights, "Norm", "weight")), data(weight.data<char>()),
      size(long(weights.size())), eps(eps) {}

Rope::Rope(const mx::array& frequencies, float position_scale, float input_scale, bool is_interleaved)
    : inverse_frequencies(ready(mx::astype(frequencies, mx::float32))), position_scale(position_scale),
      input_scale(input_scale), is_interleaved(is_interleaved) {}

DecoderStack::DecoderStack(std::vector<DecoderLayer> parts) : layers(std::move(parts)) {
  require(!layers.empty() && layers[0].o, "DecoderStack: no layers");
  for (DecoderLayer& l : layers) {
    check(l, layers[0].hidden());
    if (l.sinks) l.sinks = ready(*l.sinks);
    widest = std::max({widest, l.hidden(), l.o->w.k, l.has_mlp() ? l.down->w.k : 0});
    if (!l.rope) {
      angle_of.push_back(-1);
      continue;
    }
    auto found = std::find_if(ropes.begin(), ropes.end(), [&](const Rope& r) { return has_same_angles(r, *l.rope); });
    angle_of.push_back(found - ropes.begin());
    if (found == ropes.end()) ropes.push_back(*l.rope);
  }
  for (const Rope& rope : ropes) angle_floats += 2 * rope.half();
}

}  // namespace mlxserve
