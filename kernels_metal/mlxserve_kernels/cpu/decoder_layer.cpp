// The parts of a layer and the checks that they fit together.
#include <algorithm>
#include <cstring>

#include "decoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "primitive.h"
#include "tiles_view.h"
#include "weight.h"

namespace mlxserve {
namespace {

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
  if (l.experts) {
    const Experts& e = *l.experts;
    require(e.router.w.k == hidden && e.gate.w.k == hidden && e.down.w.n == hidden, op,
            ": router, gate and down of experts must have ", hidden, " inputs and outputs");
    require(l.has_mlp() == e.shared_gate.has_value(), op, ": a shared expert and its gate come together");
    if (e.shared_gate) fits("shared_gate", *e.shared_gate, 1, hidden);
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
  take_bias(bias);
}

Matrix::Matrix(const mx::array& tiles, int group_size, int bits, mx::Dtype scale_dtype,
               const std::optional<mx::array>& bias)
    : w(tiles_view("Matrix", tiles, group_size, bits, scale_dtype)) {
  held_.push_back(ready(tiles));
  w.data = held_[0].data<char>();
  take_bias(bias);
}

void Matrix::take_bias(const std::optional<mx::array>& bias) {
  if (!bias) return;
  require(bias->ndim() == 1 && bias->shape(0) == w.n, "Matrix: bias must be [", w.n, "]");
  held_.push_back(ready(mx::astype(*bias, mx::float32)));
  this->bias = held_.back().data<float>();
}

Matrix Matrix::rows(long begin, long end) const {
  require(begin >= 0 && begin < end && end <= w.n, "Matrix: rows ", begin, " to ", end, " of ", w.n);
  Matrix part = *this;
  require(!is_tiled(w.format) || (begin % kTile == 0 && end % kTile == 0), "Matrix: rows ", begin, " to ", end,
          " are no whole tiles");
  part.w = rows_of(w, begin, end - begin);
  if (bias) part.bias = bias + begin;
  return part;
}

const Matrix* DecoderLayer::projection(const std::string& name) const {
  for (auto [part, matrix] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}, {"o", &o}, {"gate", &gate}, {"up", &up},
                              {"down", &down}})
    if (name == part) return *matrix ? &**matrix : nullptr;
  return nullptr;
}

Experts::Experts(Matrix router_, Matrix gate_, Matrix up_, Matrix down_, long top_k, bool is_normalized,
                 std::optional<Matrix> shared)
    : router(std::move(router_)), gate_arrays(std::move(gate_)), up_arrays(std::move(up_)),
      down_arrays(std::move(down_)), count(router.w.n), top_k(top_k), is_normalized(is_normalized),
      shared_gate(std::move(shared)) {
  const char* op = "Experts";
  require(top_k >= 1 && top_k <= count, op, ": top_k must be 1 to ", count, ", got ", top_k);
  for (auto [to, from] : {std::pair{&gate, &gate_arrays}, {&up, &up_arrays}, {&down, &down_arrays}}) {
    require(from->w.n % count == 0, op, ": ", from->w.n, " rows are not those of ", count, " experts");
    require(!is_tiled(from->w.format) || from->w.n / count % kTile == 0, op, ": experts of ", from->w.n / count,
            " rows are no whole tiles");
    *to = {rows_of(from->w, 0, from->w.n / count), from->bias};
  }
  require(is_tiled(up.w.format) == is_tiled(gate.w.format), op, ": gate and up must both be tiles, or none");
  require(up.w.n == gate.w.n && up.w.k == gate.w.k && down.w.k == gate.w.n, op, ": gate is [", gate.w.n, ", ",
          gate.w.k, "], up [", up.w.n, ", ", up.w.k, "], down [", down.w.n, ", ", down.w.k, "]");
}

Norm::Norm(const mx::array& weights, float eps)
    : weight(ready(weights)), format(format_of(weights, "Norm", "weight")), data(weight.data<char>()),
      size(long(weights.size())), eps(eps) {}

Rope::Rope(const mx::array& frequencies, float position_scale, float input_scale, bool is_interleaved)
    : inverse_frequencies(ready(mx::astype(frequencies, mx::float32))), position_scale(position_scale),
      input_scale(input_scale), is_interleaved(is_interleaved) {}

DecoderStack::DecoderStack(std::vector<DecoderLayer> parts) : layers(std::move(parts)) {
  require(!layers.empty() && layers[0].o, "DecoderStack: no layers");
  long site = 0;
  for (DecoderLayer& l : layers) {
    check(l, layers[0].hidden());
    for (auto* matrix : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down}) {
      if (*matrix) (*matrix)->site = site;
      ++site;
    }
    if (l.sinks) l.sinks = ready(*l.sinks);
    widest = std::max({widest, l.hidden(), l.o->w.k, l.has_mlp() ? l.down->w.k : 0,
                       l.experts ? l.experts->down.w.k : 0});
    for (const auto* matrix : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down})
      if (*matrix) (is_tiled((*matrix)->w.format) ? has_tiles : has_plain) = true;
    if (l.experts) {
      (is_tiled(l.experts->router.w.format) ? has_tiles : has_plain) = true;
      has_plain = true;
    }
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
