#include <algorithm>
#include <cstring>

#include "floats.h"
#include "isa.h"
#include "mlx/ops.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"
#include "product.h"
#include "tiles_view.h"
#include "weight.h"

namespace mlxserve {
namespace {

void direct(const Weight& w, const float* x, float* y, long rows, const After& after) {
  const Kernels& use = kernels();
  long columns = std::clamp(round_up(w.n / (8L * num_threads()), 16), 32L, 512L);
  long tasks = (w.n + columns - 1) / columns;
  parallel_for(tasks, [&](long task) {
    long begin = task * columns;
    MatmulTile tile{x, y, w.n, 0, rows, begin, std::min(begin + columns, w.n)};
    use.matmul_direct(w, tile);
    if (after) after(tile);
  });
}

void panels(const Weight& w, const float* x, float* y, long rows, const After& after) {
  const Kernels& use = kernels();
  mx::allocator::Data memory = mx::allocator::malloc(use.packed_floats(rows, w.k) * sizeof(float) + 64);
  auto address = reinterpret_cast<std::uintptr_t>(memory.buffer().raw_ptr());
  float* packed = reinterpret_cast<float*>((address + 63) / 64 * 64);
  long step = round_up(std::max(rows / (4L * num_threads()), 1L), use.row_tile);
  parallel_for((rows + step - 1) / step, [&](long task) {
    long begin = task * step, count = std::min(step, rows - begin);
    use.pack(x + begin * w.k, count, w.k, packed + use.packed_floats(begin, w.k));
  });
  long columns = (w.n + use.panel_cols - 1) / use.panel_cols;
  // With fewer panels than threads, rows are shared out as well.
  long parts = std::clamp(2L * num_threads() / columns, 1L, std::max(rows / 64, 1L));
  long height = round_up((rows + parts - 1) / parts, use.row_tile);
  parts = (rows + height - 1) / height;
  parallel_for(columns * parts, [&](long task) {
    long col = task / parts * use.panel_cols, row = task % parts * height;
    MatmulTile tile{x, y, w.n, row, std::min(row + height, rows), col, std::min(col + use.panel_cols, w.n)};
    use.matmul_panel(w, tile, packed, scratch(0, use.panel_floats(w.k)));
    if (after) after(tile);
  });
}

// `rows` rows of x @ w, or of x^T @ w where x is turned. `after` is for rows of floats.
void columns(const Weight& w, const Input& x, bool is_turned, const Output& y, long rows, const After& after) {
  if (rows == 0 || w.k == 0) return;
  if (w.n == 0) return void(std::memset(y.data, 0, rows * w.k * size_of(y.format)));
  const long strips = (w.k + kColumns - 1) / kColumns;
  // With few strips, rows are shared out as well.
  long parts = std::max((rows + kMaxColumnRows - 1) / kMaxColumnRows, std::min(4L * num_threads() / strips, rows / 16));
  const long height = std::min(round_up((rows + parts - 1) / parts, 8), kMaxColumnRows);
  parts = (rows + height - 1) / height;
  parallel_for(strips * parts, [&](long task) {
    const long col = task / parts * kColumns, row = task % parts * height;
    const ColumnsTile tile{x.data, x.format, is_turned, x.width, y.data, y.format, y.width, row,
                           std::min(row + height, rows), col, std::min(col + kColumns, w.k)};
    kernels().matmul_columns(w, tile, scratch(0, kernels().columns_floats()));
    if (after)
      after({nullptr, reinterpret_cast<float*>(y.data), y.width, row, tile.row_end, col, tile.col_end});
  });
}

class Matmul : public CpuPrimitive {
 public:
  Matmul(mx::Stream stream, Weight shape, Product product) : CpuPrimitive(stream), shape_(shape), product_(product) {}

  const char* name() const override { return "MlxserveMatmul"; }

  // inputs: x, w and, of quantized formats, scales and, of affine ones, biases.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    mx::array& out = outputs[0];
    allocate(out);
    mx::array x = dense(inputs[0], encoder), data = dense(inputs[1], encoder);
    Weight w = shape_;
    w.data = data.data<char>();
    if (inputs.size() > 2) w.scales = dense(inputs[2], encoder).data<char>();
    if (inputs.size() > 3) w.biases = dense(inputs[3], encoder).data<char>();
    Input from = input_rows(x, x.shape(-1));
    Output to = output_rows(out, out.shape(-1));
    encoder.dispatch([w, from, to, product = product_, rows = to.width ? long(out.size()) / to.width : 0] {
      if (product != Product::rows) return columns(w, from, product == Product::turned, to, rows, {});
      in_floats(from, to, rows, [&](const float* x, float* y, long, long count) { multiply_rows(w, x, y, count, {}); });
    });
  }

  // For x, and for w where it is dense.
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>&) override {
    const mx::array &x = primals[0], &dy = cotangents[0];
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      require(argnum == 0 || shape_.group == 0, "quantized_matmul: there is no gradient of quantized weights");
      gradients.push_back(argnum == 0 ? gradient_of_x(primals, dy) : gradient_of_w(x, primals[1], dy));
    }
    return gradients;
  }

 private:
  // With y = x w^T: dy w; with y = x w: dy w^T; with y = x^T w: w dy^T.
  mx::array gradient_of_x(std::vector<mx::array> inputs, const mx::array& dy) {
    const mx::Dtype dtype = inputs[0].dtype();
    if (product_ == Product::turned) return lazy_product({inputs[1], dy}, dense_weight(dy), Product::rows, dtype);
    inputs[0] = dy;
    return lazy_product(std::move(inputs), shape_, product_ == Product::rows ? Product::columns : Product::rows, dtype);
  }
  // With y = x w^T: dy^T x; with y = x w: x^T dy; with y = x^T w: x dy.
  mx::array gradient_of_w(const mx::array& x, const mx::array& w, const mx::array& dy) {
    mx::array from = flat(x), back = flat(dy);
    if (product_ == Product::rows) return lazy_product({back, from}, dense_weight(from), Product::turned, w.dtype());
    Product product = product_ == Product::columns ? Product::turned : Product::columns;
    return lazy_product({from, back}, dense_weight(back), product, w.dtype());
  }
  mx::array flat(const mx::array& a) {
    int rows = 1;
    for (int axis = 0; axis + 1 < int(a.ndim()); ++axis) rows *= a.shape(axis);
    return mx::reshape(a, {rows, a.shape(-1)}, stream());
  }

  Weight shape_;
  Product product_;
};

class EmbedRows : public CpuPrimitive {
 public:
  EmbedRows(mx::Stream stream, Weight shape) : CpuPrimitive(stream), shape_(shape) {}

  const char* name() const override { return "MlxserveEmbedRows"; }

  // inputs: ids, w and, of quantized formats, scales and, of affine ones, biases.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    mx::array ids = dense(inputs[0], encoder), data = dense(inputs[1], encoder);
    Weight w = shape_;
    w.data = data.data<char>();
    if (inputs.size() > 2) w.scales = dense(inputs[2], encoder).data<char>();
    if (inputs.size() > 3) w.biases = dense(inputs[3], encoder).data<char>();
    encoder.dispatch([w, at = ids.data<int>(), to = outputs[0].data<float>(), count = long(ids.size())] {
      for (long i = 0; i < count; ++i) {
        require(at[i] >= -w.n && at[i] < w.n, "embed_rows: id ", at[i], " at ", i, ", the table has ", w.n, " rows");
        kernels().read_row(w, at[i] < 0 ? at[i] + w.n : at[i], to + i * w.k);
      }
    });
  }

  // For a dense table.
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>&) override {
    const mx::Stream s = stream();
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      require(argnum == 1 && primals.size() == 2, "embed_rows: there is no gradient of ids and quantized tables");
      const mx::array &ids = primals[0], &w = primals[1];
      mx::array none = mx::zeros(w.shape(), mx::float32, s);
      mx::array rows = mx::reshape(cotangents[0], {int(ids.size()), 1, w.shape(1)}, s);
      gradients.push_back(
          mx::astype(mx::scatter_add(none, mx::reshape(ids, {int(ids.size())}, s), rows, 0, s), w.dtype(), s));
    }
    return gradients;
  }

 private:
  Weight shape_;
};

}  // namespace

Weight dense_weight(const mx::array& w) {
  return {format_of(w.dtype()), w.shape(0), w.shape(1), nullptr, 0, Format::float32, nullptr, nullptr};
}

void multiply_rows(const Weight& w, const float* x, float* y, long rows, const After& after) {
  if (rows == 0 || w.n == 0) return;
  if (rows <= kMaxDirectRows) return direct(w, x, y, rows, after);
  panels(w, x, y, rows, after);
}

void multiply_columns(const Weight& w, const float* x, float* y, long rows, const After& after) {
  columns(w, {reinterpret_cast<const char*>(x), Format::float32, w.n}, false,
          {reinterpret_cast<char*>(y), Format::float32, w.k}, rows, after);
}

mx::array quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
                           const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode,
                           bool is_transposed) {
  const char* op = "quantized_matmul";
  Weight shape = quantized_shape(op, w, scales, biases, group_size, bits, mode);
  require(w.ndim() == 2, op, ": w must be [N, K * bits / 32], got ", w.ndim(), " dimensions");
  format_of(x, op, "x");
  long width = is_transposed ? shape.k : shape.n;
  require(x.ndim() >= 1 && x.shape(-1) == width, op, ": x has ", x.ndim() ? x.shape(-1) : 0, " columns, w has ", width,
          is_transposed ? "" : " rows");
  std::vector<mx::array> inputs{x, w, scales};
  if (biases) inputs.push_back(*biases);
  return lazy_product(std::move(inputs), shape, is_transposed ? Product::rows : Product::columns, x.dtype());
}

mx::array lazy_product(std::vector<mx::array> inputs, const Weight& shape, Product product, mx::Dtype dtype) {
  if (product == Product::rows && is_tiled(shape.format)) return lazy_tiled(std::move(inputs), shape, dtype);
  mx::Shape out = inputs[0].shape();
  if (product == Product::turned) out[0] = out[1];
  out.back() = static_cast<mx::ShapeElem>(product == Product::rows ? shape.n : shape.k);
  auto primitive = std::make_shared<Matmul>(cpu_stream(), shape, product);
  return mx::array(std::move(out), dtype, std::move(primitive), std::move(inputs));
}

mx::array lazy_rows(std::vector<mx::array> inputs, const Weight& shape) {
  mx::Shape out = inputs[0].shape();
  out.push_back(static_cast<mx::ShapeElem>(shape.k));
  return mx::array(std::move(out), mx::float32, std::make_shared<EmbedRows>(cpu_stream(), shape), std::move(inputs));
}

mx::array embed_rows(const mx::array& ids, const mx::array& w, const std::optional<mx::array>& scales,
                     const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode) {
  const char* op = "embed_rows";
  require(ids.dtype() == mx::int32, op, ": ids must be int32");
  std::vector<mx::array> inputs{ids, w};
  Weight shape{};
  if (scales) {
    shape = quantized_shape(op, w, *scales, biases, group_size, bits, mode);
    inputs.push_back(*scales);
    if (biases) inputs.push_back(*biases);
  } else {
    require(w.ndim() == 2 && w.shape(1) > 0, op, ": w must be [N, K]");
    format_of(w, op, "w");
    shape = dense_weight(w);
  }
  return lazy_rows(std::move(inputs), shape);
}

mx::array linear(const mx::array& x, const mx::array& w) {
  const char* op = "linear";
  format_of(x, op, "x");
  require(w.ndim() == 2, op, ": w must be [N, K], got ", w.ndim(), " dimensions");
  require(x.ndim() >= 1, op, ": x must be [..., K]");
  require(x.shape(-1) == w.shape(1), op, ": x has ", x.shape(-1), " columns, w has ", w.shape(1));
  require(w.shape(1) > 0, op, ": K must be positive");
  format_of(w, op, "w");
  return lazy_product({x, w}, dense_weight(w), Product::rows, x.dtype());
}

}  // namespace mlxserve
