// The operations on experts that are not part of a whole layer.
#include "expert_gradients.h"
#include "experts.h"
#include "floats.h"
#include "mlx/ops.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"
#include "row_gradients.h"
#include "team.h"
#include "tiles_view.h"
#include "weight.h"

namespace mlxserve {
namespace {

// At most: two packings, two products, one end.
constexpr long kPhases = 5;

// Which arrays of a primitive a matrix reads, in this order: w; scales of quantized formats and
// biases of affine ones; a bias.
struct Layout {
  Weight shape;
  long experts;
  bool has_bias, has_biases;

  static Layout of(const char* op, const ExpertArrays& m) {
    require(m.w.ndim() == (m.scale_dtype ? 4 : 3) && m.w.size() > 0, op, ": w must be [experts, N, K]");
    Layout layout{{}, m.w.shape(0), m.bias.has_value(), m.biases.has_value()};
    Weight& shape = layout.shape;
    if (m.scale_dtype) {
      shape = tiles_view(op, mx::flatten(m.w, 0, 1), m.group_size, m.bits, *m.scale_dtype);
      shape.n /= layout.experts;
      layout.check_bias(op, m);
      return layout;
    }
    require(m.scales || !m.biases, op, ": biases come with scales");
    if (m.scales) {
      shape = quantized_shape(op, m.w, *m.scales, m.biases, m.group_size, m.bits, m.mode);
    } else {
      shape.format = format_of(m.w, op, "w");
      shape.n = m.w.shape(1), shape.k = m.w.shape(2);
    }
    layout.check_bias(op, m);
    return layout;
  }

  void check_bias(const char* op, const ExpertArrays& m) const {
    if (!m.bias) return;
    mx::Shape wanted{static_cast<mx::ShapeElem>(experts), static_cast<mx::ShapeElem>(shape.n)};
    require(m.bias->dtype() == mx::float32 && m.bias->shape() == wanted, op, ": bias must be float32 [", experts, ", ",
            shape.n, "]");
  }

  // How many of its arrays are weights: all but the bias.
  std::size_t num_weights() const {
    return is_tiled(shape.format) || !shape.group ? 1 : has_biases ? 3 : 2;
  }
  std::size_t num_arrays() const { return num_weights() + (has_bias ? 1 : 0); }

  static void append(const ExpertArrays& m, std::vector<mx::array>& inputs) {
    inputs.push_back(m.w);
    for (const auto* part : {&m.scales, &m.biases, &m.bias})
      if (*part) inputs.push_back(**part);
  }

  // Reads its arrays from `next` on, and moves it behind them.
  ExpertMatrix matrix(std::vector<mx::array>::const_iterator& next, mx::cpu::CommandEncoder& encoder) const {
    auto take = [&] { return dense(*next++, encoder); };
    ExpertMatrix m{shape, nullptr};
    m.w.data = take().data<char>();
    if (shape.group && !is_tiled(shape.format)) {
      m.w.scales = take().data<char>();
      if (has_biases) m.w.biases = take().data<char>();
    }
    if (has_bias) m.bias = take().data<float>();
    return m;
  }
};

// A layer with experts among the inputs of a primitive, and its gradients.
struct Given {
  const Layout& layout;
  std::vector<mx::array> arrays;

  Given(const Layout& layout, const std::vector<mx::array>& inputs, std::size_t first)
      : layout(layout), arrays(inputs.begin() + first, inputs.begin() + first + layout.num_arrays()) {}

  mx::array product(const mx::array& x, const mx::array& ids, bool is_paired) const;

  // What belongs to a row a choice, of d_y [..., top_k, N].
  mx::array gradient(const mx::array& d_y, const mx::array& ids) const {
    require(!is_tiled(layout.shape.format), "gather_matmul: there is no gradient through tiles");
    std::vector<mx::array> weights(arrays.begin(), arrays.begin() + layout.num_weights());
    return gather_columns(d_y, ids, weights, layout.shape, layout.experts);
  }
};

mx::array wide(const mx::array& a) { return mx::astype(a, mx::float32, cpu_stream()); }

// [..., K] to [pairs, K], each row once a choice where it is not.
mx::array rows_of_pairs(const mx::array& x, const mx::array& ids, bool is_paired) {
  const mx::Stream s = cpu_stream();
  const int width = x.shape(-1);
  mx::array rows = wide(x);
  if (!is_paired) {
    mx::Shape shape = ids.shape();
    shape.push_back(width);
    rows = mx::broadcast_to(mx::expand_dims(rows, -2, s), shape, s);
  }
  return mx::reshape(rows, {int(ids.size()), width}, s);
}

void check_ids(const char* op, const int* ids, const Grouping& grouping) {
  for (long pair = 0; pair < grouping.rows * grouping.top_k; ++pair)
    require(ids[pair] >= 0 && ids[pair] < grouping.experts, op, ": id ", ids[pair], " at [", pair / grouping.top_k,
            ", ", pair % grouping.top_k, "], there are ", grouping.experts, " experts");
}

// Calls run(x, y) with floats of all rows.
template <class Run>
void in_all_floats(const Input& x, const Output& y, long rows, Run&& run) {
  in_floats(x, y, rows, [&](const float* from, float* to, long, long) { run(from, to); }, 1, rows);
}

// Calls work(worker) with an ExpertWorker on each thread.
template <class Work>
void run(const Grouping& grouping, std::size_t own_floats, Work&& work) {
  Team team(kPhases);
  parallel_for(num_threads(), [&](long) {
    long phase = 0;
    auto share = [&](long units, auto&& body) { team.share(phase++, units, units, body); };
    work(ExpertWorker(grouping, scratch(0, own_floats), share));
  });
}

class GatherMatmul : public CpuPrimitive {
 public:
  GatherMatmul(mx::Stream stream, const Layout& layout, bool is_paired)
      : CpuPrimitive(stream), layout_(layout), is_paired_(is_paired) {}

  const char* name() const override { return "MlxserveGatherMatmul"; }

  // inputs: x, ids, the matrix.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    mx::array x = dense(inputs[0], encoder), ids = dense(inputs[1], encoder);
    auto next = inputs.begin() + 2;
    ExpertMatrix m = layout_.matrix(next, encoder);
    Grouping grouping(long(ids.size()) / ids.shape(-1), ids.shape(-1), layout_.experts);
    Input from = input_rows(x, is_paired_ ? grouping.top_k * m.w.k : m.w.k);
    Output to = output_rows(outputs[0], grouping.top_k * m.w.n);
    encoder.dispatch([=, grouping = std::move(grouping), is_paired = is_paired_, ids = ids.data<int>()]() mutable {
      check_ids("gather_matmul", ids, grouping);
      grouping.sort(ids);
      in_all_floats(from, to, grouping.rows, [&](const float* x, float* y) { multiply(m, grouping, is_paired, x, y); });
    });
  }

  // For x, and for dense weights.
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>&) override {
    const mx::Stream s = stream();
    const mx::array &x = primals[0], &ids = primals[1];
    mx::array d_y = wide(cotangents[0]);
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      if (argnum == 0) {
        mx::array d_x = Given(layout_, primals, 2).gradient(d_y, ids);
        gradients.push_back(mx::astype(is_paired_ ? d_x : mx::sum(d_x, -2, false, s), x.dtype(), s));
        continue;
      }
      require(argnum == 2 && layout_.shape.format <= Format::bfloat16,
              "gather_matmul: there is no gradient of ids, biases and quantized weights");
      mx::array sums = expert_weight_gradient(mx::reshape(d_y, {int(ids.size()), d_y.shape(-1)}, s),
                                              rows_of_pairs(x, ids, is_paired_), mx::reshape(ids, {int(ids.size())}, s),
                                              layout_.experts);
      gradients.push_back(mx::astype(sums, primals[2].dtype(), s));
    }
    return gradients;
  }

 private:
  static void multiply(const ExpertMatrix& m, const Grouping& grouping, bool is_paired, const float* x, float* y) {
    const bool to_tiles = is_tiled(m.w.format);
    std::size_t results = aligned(grouping.pairs.size() * m.w.n);
    long packed = long(grouping.packed_places.size());
    float* shared = scratch(2, results + expert_input_floats(grouping, packed, m.w.k, to_tiles));
    run(grouping, expert_scratch_floats(m.w.k), [&](auto worker) {
      using Order = decltype(worker)::Order;
      worker.prepare(x, m.w.k, is_paired ? Order::pairs : Order::rows, shared + results, to_tiles);
      worker.multiply(m, shared);
      worker.scatter(shared, m.w.n, y);
    });
  }

  Layout layout_;
  bool is_paired_;
};

mx::array Given::product(const mx::array& x, const mx::array& ids, bool is_paired) const {
  std::vector<mx::array> inputs{x, ids};
  inputs.insert(inputs.end(), arrays.begin(), arrays.end());
  mx::Shape shape = ids.shape();
  shape.push_back(static_cast<mx::ShapeElem>(layout.shape.n));
  return mx::array(std::move(shape), mx::float32, std::make_shared<GatherMatmul>(cpu_stream(), layout, is_paired),
                   std::move(inputs));
}

class GatedExperts : public CpuPrimitive {
 public:
  GatedExperts(mx::Stream stream, const Layout& gate, const Layout& up, const Layout& down, Activation activation,
               bool has_shares)
      : CpuPrimitive(stream), gate_(gate), up_(up), down_(down), activation_(activation), has_shares_(has_shares) {}

  const char* name() const override { return "MlxserveGatedExperts"; }

  // inputs: x, ids, perhaps shares, then gate, up, down.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    mx::array x = dense(inputs[0], encoder), ids = dense(inputs[1], encoder);
    Parts parts{activation_, has_shares_ ? dense(inputs[2], encoder).data<float>() : nullptr, {}, {}, {}};
    auto next = inputs.begin() + (has_shares_ ? 3 : 2);
    parts.gate = gate_.matrix(next, encoder), parts.up = up_.matrix(next, encoder);
    parts.down = down_.matrix(next, encoder);
    Grouping grouping(long(ids.size()) / ids.shape(-1), ids.shape(-1), gate_.experts);
    Input from = input_rows(x, parts.gate.w.k);
    Output to = output_rows(outputs[0], has_shares_ ? parts.down.w.n : grouping.top_k * parts.down.w.n);
    encoder.dispatch([=, grouping = std::move(grouping), ids = ids.data<int>()]() mutable {
      check_ids("gated_experts", ids, grouping);
      grouping.sort(ids);
      in_all_floats(from, to, grouping.rows, [&](const float* x, float* y) { run_all(parts, grouping, x, y); });
    });
  }

  // For x and the shares; the products are computed again, one after the other.
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>&) override {
    const mx::Stream s = stream();
    const mx::array& ids = primals[1];
    const std::size_t first = has_shares_ ? 3 : 2;
    const Given gate(gate_, primals, first), up(up_, primals, first + gate_.num_arrays());
    const Given down(down_, primals, first + gate_.num_arrays() + up_.num_arrays());
    mx::array x = wide(primals[0]), d_y = wide(cotangents[0]);
    mx::array gates = gate.product(x, ids, false), ups = up.product(x, ids, false);
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      require(argnum == 0 || (has_shares_ && argnum == 2), "gated_experts: there is no gradient of ids and weights");
      mx::array d_each = has_shares_ ? mx::expand_dims(d_y, -2, s) : d_y;
      if (argnum == 2) {
        mx::array y = down.product(mlxserve::gated(gates, ups, activation_), ids, true);
        gradients.push_back(mx::sum(mx::multiply(d_each, y, s), -1, false, s));
        continue;
      }
      if (has_shares_) d_each = mx::multiply(d_each, mx::expand_dims(primals[2], -1, s), s);
      auto [d_gates, d_ups] = gated_gradient(gates, ups, down.gradient(d_each, ids), activation_);
      mx::array d_x = mx::add(gate.gradient(d_gates, ids), up.gradient(d_ups, ids), s);
      gradients.push_back(mx::astype(mx::sum(d_x, -2, false, s), primals[0].dtype(), s));
    }
    return gradients;
  }

 private:
  struct Parts {
    Activation activation;
    const float* shares;
    ExpertMatrix gate, up, down;
  };

  static void run_all(const Parts& parts, const Grouping& grouping, const float* x, float* y) {
    const auto& [activation, shares, gate, up, down] = parts;
    long hidden = gate.w.k, width = gate.w.n, n = down.w.n, widest = std::max(hidden, width);
    std::size_t inner = aligned(grouping.pairs.size() * width), results = aligned(grouping.pairs.size() * n);
    std::size_t packing = 0;
    for (const Weight& w : {gate.w, down.w})
      packing = std::max(packing, expert_input_floats(grouping, long(grouping.packed_places.size()), w.k,
                                                      is_tiled(w.format)));
    float* gates = scratch(2, 2 * inner + results + packing);
    float *ups = gates + inner, *z = ups + inner, *packed = z + results;
    run(grouping, expert_scratch_floats(widest), [&](auto worker) {
      using Order = decltype(worker)::Order;
      worker.prepare(x, hidden, Order::rows, packed, is_tiled(gate.w.format));
      worker.multiply_gated(gate, up, activation, gates, ups);
      worker.prepare(gates, width, Order::places, packed, is_tiled(down.w.format));
      worker.multiply(down, z);
      if (shares) worker.combine(z, n, shares, y);
      else worker.scatter(z, n, y);
    });
  }

  Layout gate_, up_, down_;
  Activation activation_;
  bool has_shares_;
};

class Route : public CpuPrimitive {
 public:
  Route(mx::Stream stream, long top_k, bool is_normalized)
      : CpuPrimitive(stream), top_k_(top_k), is_normalized_(is_normalized) {}

  const char* name() const override { return "MlxserveRoute"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    constexpr long kTaskRows = 16;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    allocate(outputs[1]);
    mx::array logits = dense(inputs[0], encoder);
    long n = logits.shape(-1);
    encoder.dispatch([n, k = top_k_, is_normalized = is_normalized_, rows = long(logits.size()) / n,
                      from = logits.data<float>(), ids = outputs[0].data<int>(), shares = outputs[1].data<float>()] {
      parallel_for((rows + kTaskRows - 1) / kTaskRows, [&](long task) {
        for (long row = task * kTaskRows; row < std::min((task + 1) * kTaskRows, rows); ++row)
          mlxserve::route(from + row * n, n, k, is_normalized, ids + row * k, shares + row * k);
      });
    });
  }

 private:
  long top_k_;
  bool is_normalized_;
};

// [..., top_k] of ids [..., top_k]; one id a pair, of 32 bits.
mx::Shape rows_shape(const char* op, const mx::array& x, const mx::array& ids) {
  require(ids.dtype() == mx::int32 || ids.dtype() == mx::uint32, op, ": ids must be int32 or uint32");
  require(ids.ndim() >= 1 && ids.shape(-1) > 0, op, ": ids must be [..., top_k]");
  format_of(x, op, "x");
  require(x.ndim() >= 1, op, ": x must be [..., K]");
  mx::Shape rows = ids.shape();
  rows.pop_back();
  return rows;
}

mx::Shape with(mx::Shape shape, std::initializer_list<long> more) {
  for (long size : more) shape.push_back(static_cast<mx::ShapeElem>(size));
  return shape;
}

}  // namespace

mx::array gather_matmul(const mx::array& x, const mx::array& ids, const ExpertArrays& matrix) {
  const char* op = "gather_matmul";
  Layout layout = Layout::of(op, matrix);
  mx::Shape rows = rows_shape(op, x, ids);
  bool is_paired = x.shape() == with(ids.shape(), {layout.shape.k});
  require(is_paired || x.shape() == with(rows, {layout.shape.k}), op, ": x must be [..., ", layout.shape.k,
          "] with the rows or the pairs of ids");
  std::vector<mx::array> inputs{x, ids};
  Layout::append(matrix, inputs);
  return mx::array(with(ids.shape(), {layout.shape.n}), x.dtype(),
                   std::make_shared<GatherMatmul>(cpu_stream(), layout, is_paired), std::move(inputs));
}

mx::array gated_experts(const mx::array& x, const mx::array& ids, const std::optional<mx::array>& shares,
                        const ExpertArrays& gate, const ExpertArrays& up, const ExpertArrays& down,
                        Activation activation) {
  const char* op = "gated_experts";
  Layout g = Layout::of(op, gate), u = Layout::of(op, up), d = Layout::of(op, down);
  require(g.experts == u.experts && g.experts == d.experts, op, ": gate, up and down have ", g.experts, ", ",
          u.experts, " and ", d.experts, " experts");
  require(u.shape.n == g.shape.n && u.shape.k == g.shape.k && d.shape.k == g.shape.n, op, ": gate is [", g.shape.n,
          ", ", g.shape.k, "], up [", u.shape.n, ", ", u.shape.k, "], down [", d.shape.n, ", ", d.shape.k, "]");
  require(is_tiled(g.shape.format) == is_tiled(u.shape.format), op, ": gate and up must both be tiles, or none");
  mx::Shape rows = rows_shape(op, x, ids);
  require(x.shape() == with(rows, {g.shape.k}), op, ": x must be [..., ", g.shape.k, "] with the rows of ids");
  std::vector<mx::array> inputs{x, ids};
  if (shares) {
    require(shares->dtype() == mx::float32 && shares->shape() == ids.shape(), op,
            ": shares must be float32 of the shape of ids");
    inputs.push_back(*shares);
  }
  for (const ExpertArrays* m : {&gate, &up, &down}) Layout::append(*m, inputs);
  auto primitive = std::make_shared<GatedExperts>(cpu_stream(), g, u, d, activation, shares.has_value());
  return mx::array(shares ? with(rows, {d.shape.n}) : with(ids.shape(), {d.shape.n}), x.dtype(),
                   std::move(primitive), std::move(inputs));
}

std::pair<mx::array, mx::array> route(const mx::array& logits, int top_k, bool is_normalized) {
  const char* op = "route";
  require(logits.dtype() == mx::float32 && logits.ndim() >= 1, op, ": logits must be float32 [..., experts]");
  require(top_k >= 1 && top_k <= logits.shape(-1), op, ": top_k must be 1 to ", logits.shape(-1), ", got ", top_k);
  mx::Shape shape = logits.shape();
  shape.back() = top_k;
  auto outputs = mx::array::make_arrays({shape, shape}, {mx::int32, mx::float32},
                                        std::make_shared<Route>(cpu_stream(), top_k, is_normalized), {logits});
  return {outputs[0], outputs[1]};
}

}  // namespace mlxserve
