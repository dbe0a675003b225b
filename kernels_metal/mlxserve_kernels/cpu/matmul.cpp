#include <algorithm>

#include "isa.h"
#include "mlx/ops.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"
#include "tiles_view.h"
#include "weight.h"

namespace mlxserve {
namespace {

long round_up(long value, long step) { return (value + step - 1) / step * step; }

void direct(const Weight& w, const float* x, float* y, long rows) {
  const Kernels& use = kernels();
  long columns = std::clamp(round_up(w.n / (8L * num_threads()), 16), 32L, 512L);
  long tasks = (w.n + columns - 1) / columns;
  parallel_for(tasks, [&](long task) {
    long begin = task * columns;
    use.matmul_direct(w, {x, y, w.n, 0, rows, begin, std::min(begin + columns, w.n)});
  });
}

void panels(const Weight& w, const float* x, float* y, long rows) {
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
  });
}

void matmul(const Weight& w, const float* x, float* y, long rows) {
  if (rows == 0 || w.n == 0) return;
  if (rows <= kMaxDirectRows) return direct(w, x, y, rows);
  panels(w, x, y, rows);
}

mx::array all_rows(std::vector<mx::array> inputs, const Weight& shape);

class Matmul : public CpuPrimitive {
 public:
  Matmul(mx::Stream stream, Weight shape) : CpuPrimitive(stream), shape_(shape) {}

  const char* name() const override { return "MlxserveMatmul"; }

  // inputs: x, w and, of quantized formats, scales and, of affine ones, biases.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    mx::array x = dense(inputs[0], encoder), data = dense(inputs[1], encoder);
    Weight w = shape_;
    w.data = data.data<char>();
    if (inputs.size() > 2) w.scales = dense(inputs[2], encoder).data<char>();
    if (inputs.size() > 3) w.biases = dense(inputs[3], encoder).data<char>();
    encoder.dispatch([w, from = x.data<float>(), to = outputs[0].data<float>(), rows = long(x.size() / w.k)] {
      matmul(w, from, to, rows);
    });
  }

  // For x, and for w where it is dense.
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>&) override {
    const mx::array &x = primals[0], &dy = cotangents[0];
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      if (argnum == 0) {
        gradients.push_back(mx::matmul(dy, all_rows(primals, shape_), stream()));
        continue;
      }
      require(shape_.group == 0, "quantized_matmul: there is no gradient of quantized weights");
      int rows = int(x.size() / shape_.k);
      mx::array from = mx::reshape(x, {rows, int(shape_.k)}, stream());
      mx::array back = mx::transpose(mx::reshape(dy, {rows, int(shape_.n)}, stream()), stream());
      gradients.push_back(mx::astype(mx::matmul(back, from, stream()), primals[1].dtype(), stream()));
    }
    return gradients;
  }

 private:
  Weight shape_;
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

 private:
  Weight shape_;
};

// A weight in float32; the first input of a product is replaced by the ids of all rows.
mx::array all_rows(std::vector<mx::array> inputs, const Weight& shape) {
  inputs[0] = mx::arange(int(shape.n), cpu_stream());
  mx::Shape out{int(shape.n), int(shape.k)};
  return mx::array(std::move(out), mx::float32, std::make_shared<EmbedRows>(cpu_stream(), shape), std::move(inputs));
}

mx::array lazy_matmul(std::vector<mx::array> inputs, const Weight& shape) {
  mx::Shape out = inputs[0].shape();
  out.back() = static_cast<mx::ShapeElem>(shape.n);
  return mx::array(std::move(out), mx::float32, std::make_shared<Matmul>(cpu_stream(), shape), std::move(inputs));
}

}  // namespace

mx::array quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
                           const std::optional<mx::array>& biases, int group_size, int bits, const std::string& mode) {
  const char* op = "quantized_matmul";
  Weight shape = quantized_shape(op, w, scales, biases, group_size, bits, mode);
  require(x.dtype() == mx::float32 && x.ndim() >= 1, op, ": x must be float32 [..., K]");
  require(x.shape(-1) == shape.k, op, ": x has ", x.shape(-1), " columns, w has ", shape.k);
  std::vector<mx::array> inputs{x, w, scales};
  if (biases) inputs.push_back(*biases);
  return lazy_matmul(std::move(inputs), shape);
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
    shape = {format_of(w, op, "w"), w.shape(0), w.shape(1), nullptr, 0, Format::float32, nullptr, nullptr};
  }
  return lazy_rows(std::move(inputs), shape);
}

mx::array linear(const mx::array& x, const mx::array& w) {
  const char* op = "linear";
  require(x.dtype() == mx::float32 && x.ndim() >= 1, op, ": x must be float32 [..., K]");
  require(w.ndim() == 2, op, ": w must be [N, K], got ", w.ndim(), " dimensions");
  require(x.shape(-1) == w.shape(1), op, ": x has ", x.shape(-1), " columns, w has ", w.shape(1));
  require(w.shape(1) > 0, op, ": K must be positive");
  Weight shape{format_of(w, op, "w"), w.shape(0), w.shape(1), nullptr, 0, Format::float32, nullptr, nullptr};
  return lazy_matmul({x, w}, shape);
}

}  // namespace mlxserve
