// Products with a frozen weight and a low-rank change that is trained (Hu et al., 2021, arXiv:2106.09685).
#include <algorithm>

#include "isa.h"
#include "mlx/ops.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"
#include "product.h"
#include "weight.h"

namespace mlxserve {
namespace {

// All rows of an array, as a matrix.
mx::array flat(const mx::array& a, mx::Stream stream) {
  const int width = a.shape(-1);
  return mx::reshape(a, {int(a.size()) / std::max(width, 1), width}, stream);
}

// y = x @ w^T + scale * (x @ a) @ b, or x @ w + ...; the result of x @ a as well. Both directions are of this form:
// what belongs to x is d_y @ w + scale * (d_y @ b^T) @ a^T.
class AdaptedMatmul : public CpuPrimitive {
 public:
  AdaptedMatmul(mx::Stream stream, Weight shape, Product product, float scale)
      : CpuPrimitive(stream), shape_(shape), product_(product), scale_(scale) {}

  const char* name() const override { return "MlxserveAdaptedMatmul"; }

  // inputs: x, a, b, w and, of quantized formats, scales and, of affine ones, biases.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (mx::array& out : outputs) allocate(out);
    mx::array x = dense(inputs[0], encoder), a = dense(inputs[1], encoder), b = dense(inputs[2], encoder);
    Weight w = shape_;
    w.data = dense(inputs[3], encoder).data<char>();
    if (inputs.size() > 4) w.scales = dense(inputs[4], encoder).data<char>();
    if (inputs.size() > 5) w.biases = dense(inputs[5], encoder).data<char>();
    const LowRank change{Format::float32, a.shape(0), b.shape(1), a.shape(1), a.data<float>(), b.data<float>(),
                         std::max(b.shape(1), 1), scale_};
    encoder.dispatch([w, change, product = product_, from = x.data<float>(), rows = long(x.size()) / x.shape(-1),
                      to = outputs[0].data<float>(), inner = outputs[1].data<float>()] {
      run(w, change, product, from, rows, to, inner);
    });
  }

  // For x, a and b.
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>& outputs) override {
    const mx::Stream s = stream();
    const mx::array &x = primals[0], &d_y = cotangents[0];
    mx::array turned_a = mx::transpose(primals[1], s), turned_b = mx::transpose(primals[2], s);
    const bool is_x_wanted = std::find(argnums.begin(), argnums.end(), 0) != argnums.end();
    std::vector<mx::array> back;
    if (is_x_wanted) {
      std::vector<mx::array> inputs{d_y, turned_b, turned_a};
      inputs.insert(inputs.end(), primals.begin() + 3, primals.end());
      back = make(std::move(inputs), shape_, product_ == Product::rows ? Product::columns : Product::rows, scale_);
    } else {
      mx::array w = mx::contiguous(turned_b, false, s);
      back = {d_y, lazy_product({d_y, w}, dense_weight(w), Product::columns, mx::float32)};
    }
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      require(argnum < 3, "adapted_matmul: there is no gradient of the weight below an adapter");
      if (argnum == 0) {
        gradients.push_back(back[0]);
        continue;
      }
      // x^T @ (d_y @ b^T) and (x @ a)^T @ d_y.
      mx::array left = flat(argnum == 1 ? x : outputs[1], s), right = flat(argnum == 1 ? back[1] : d_y, s);
      mx::array sums = lazy_product({left, right}, dense_weight(right), Product::turned, mx::float32);
      gradients.push_back(mx::multiply(sums, mx::array(scale_), s));
    }
    return gradients;
  }

  static std::vector<mx::array> make(std::vector<mx::array> inputs, const Weight& shape, Product product, float scale) {
    mx::Shape y = inputs[0].shape(), inner = y;
    y.back() = inputs[2].shape(1), inner.back() = inputs[1].shape(1);
    return mx::array::make_arrays({y, inner}, {mx::float32, mx::float32},
                                  std::make_shared<AdaptedMatmul>(cpu_stream(), shape, product, scale), inputs);
  }

 private:
  static void run(const Weight& w, const LowRank& change, Product product, const float* x, long rows, float* y,
                  float* inner) {
    constexpr long kTaskRows = 32;
    parallel_for((rows + kTaskRows - 1) / kTaskRows, [&](long task) {
      const long row = task * kTaskRows;
      kernels().low_rank_inner(change, x + row * change.k, std::min(kTaskRows, rows - row), 0, change.k,
                               inner + row * change.rank, change.rank);
    });
    auto after = [&](const MatmulTile& tile) {
      kernels().low_rank_change(change, inner + tile.row_begin * change.rank, change.rank, tile);
    };
    if (product == Product::rows) multiply_rows(w, x, y, rows, after);
    else multiply_columns(w, x, y, rows, after);
  }

  Weight shape_;
  Product product_;
  float scale_;
};

}  // namespace

mx::array adapted_matmul(const mx::array& x, const mx::array& a, const mx::array& b, float scale, const mx::array& w,
                         const std::optional<mx::array>& scales, const std::optional<mx::array>& biases, int group_size,
                         int bits, const std::string& mode) {
  const char* op = "adapted_matmul";
  std::vector<mx::array> inputs{x, a, b, w};
  Weight shape{};
  if (scales) {
    shape = quantized_shape(op, w, *scales, biases, group_size, bits, mode);
    inputs.push_back(*scales);
    if (biases) inputs.push_back(*biases);
  } else {
    format_of(w, op, "w");
  }
  require(w.ndim() == 2, op, ": w must have 2 dimensions, got ", w.ndim());
  if (!scales) shape = dense_weight(w);
  require(x.dtype() == mx::float32 && x.ndim() >= 1 && x.shape(-1) == shape.k && shape.k > 0, op,
          ": x must be float32 [..., ", shape.k, "]");
  require(a.dtype() == mx::float32 && a.ndim() == 2 && a.shape(0) == shape.k && a.shape(1) > 0, op,
          ": a must be float32 [", shape.k, ", R]");
  require(b.dtype() == mx::float32 && b.ndim() == 2 && b.shape(0) == a.shape(1) && b.shape(1) == shape.n, op,
          ": b must be float32 [", a.shape(1), ", ", shape.n, "]");
  return AdaptedMatmul::make(std::move(inputs), shape, Product::rows, scale)[0];
}

mx::array matmul(const mx::array& x, const mx::array& w) {
  const char* op = "matmul";
  format_of(x, op, "x");
  format_of(w, op, "w");
  require(w.ndim() == 2, op, ": w must be [K, N], got ", w.ndim(), " dimensions");
  require(x.ndim() >= 1 && x.shape(-1) == w.shape(0), op, ": x has ", x.ndim() ? x.shape(-1) : 0, " columns, w has ",
          w.shape(0), " rows");
  return lazy_product({x, w}, dense_weight(w), Product::columns, x.dtype());
}

}  // namespace mlxserve
