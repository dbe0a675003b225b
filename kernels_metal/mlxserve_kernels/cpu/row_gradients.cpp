#include "row_gradients.h"

#include <algorithm>
#include <cstring>

#include "isa.h"
#include "mlx/ops.h"
#include "pool.h"
#include "primitive.h"
#include "training_kernels.h"

namespace mlxserve {
namespace {

constexpr long kTaskElements = 1 << 15;

class RmsNormGradient : public CpuPrimitive {
 public:
  RmsNormGradient(mx::Stream stream, float eps, bool has_weight, bool has_sum)
      : CpuPrimitive(stream), eps_(eps), has_weight_(has_weight), has_sum_(has_sum) {}

  const char* name() const override { return "MlxserveRmsNormGradient"; }

  // Rows that one task takes: the sums of d_weight do not depend on the number of threads.
  static long task_rows(long k) { return std::max(kTaskElements / k, 1L); }

  // inputs: x, d_y, perhaps a weight, perhaps d_sum; outputs: d_x, and d_weight of each task where it is wanted.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (mx::array& out : outputs) allocate(out);
    auto next = inputs.begin();
    auto take = [&] { return static_cast<const float*>(dense(*next++, encoder).data<float>()); };
    const float *x = take(), *d_y = take(), *weight = has_weight_ ? take() : nullptr, *d_sum = has_sum_ ? take() : nullptr;
    const long k = inputs[0].shape(-1), rows = long(inputs[0].size()) / k;
    float* d_weight = outputs.size() > 1 ? outputs[1].data<float>() : nullptr;
    encoder.dispatch([=, eps = eps_, d_x = outputs[0].data<float>()] {
      const long step = task_rows(k);
      parallel_for((rows + step - 1) / step, [&](long task) {
        const long at = task * step * k;
        float* own = d_weight ? d_weight + task * k : nullptr;
        if (own) std::memset(own, 0, k * sizeof(float));
        kernels().training->rms_norm_gradient(x + at, weight, d_y + at, d_sum ? d_sum + at : nullptr, eps,
                                              std::min(step, rows - task * step), k, d_x + at, own);
      });
    });
  }

 private:
  float eps_;
  bool has_weight_, has_sum_;
};

class GatedGradient : public CpuPrimitive {
 public:
  GatedGradient(mx::Stream stream, Activation activation) : CpuPrimitive(stream), activation_(activation) {}

  const char* name() const override { return "MlxserveGatedGradient"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (mx::array& out : outputs) allocate(out);
    mx::array gate = dense(inputs[0], encoder), up = dense(inputs[1], encoder), d_y = dense(inputs[2], encoder);
    encoder.dispatch([f = activation_, g = gate.data<float>(), u = up.data<float>(), d = d_y.data<float>(),
                      d_gate = outputs[0].data<float>(), d_up = outputs[1].data<float>(), size = long(gate.size())] {
      parallel_for((size + kTaskElements - 1) / kTaskElements, [&](long task) {
        const long at = task * kTaskElements, count = std::min(kTaskElements, size - at);
        kernels().training->gated_gradient(f, g + at, u + at, d + at, count, d_gate + at, d_up + at);
      });
    });
  }

 private:
  Activation activation_;
};

}  // namespace

std::pair<mx::array, std::optional<mx::array>> rms_norm_gradient(const mx::array& x,
                                                                 const std::optional<mx::array>& weight,
                                                                 const mx::array& d_y,
                                                                 const std::optional<mx::array>& d_sum, float eps,
                                                                 bool is_weight_wanted) {
  const int k = x.shape(-1);
  const long rows = long(x.size()) / k, step = RmsNormGradient::task_rows(k);
  std::vector<mx::array> inputs{x, d_y};
  if (weight) inputs.push_back(*weight);
  if (d_sum) inputs.push_back(*d_sum);
  std::vector<mx::Shape> shapes{x.shape()};
  if (weight && is_weight_wanted) shapes.push_back({int((rows + step - 1) / step), k});
  auto outputs = mx::array::make_arrays(
      shapes, std::vector<mx::Dtype>(shapes.size(), mx::float32),
      std::make_shared<RmsNormGradient>(cpu_stream(), eps, weight.has_value(), d_sum.has_value()), inputs);
  if (shapes.size() == 1) return {outputs[0], std::nullopt};
  return {outputs[0], mx::sum(outputs[1], 0, false, cpu_stream())};
}

std::pair<mx::array, mx::array> gated_gradient(const mx::array& gate, const mx::array& up, const mx::array& d_y,
                                               Activation activation) {
  auto outputs = mx::array::make_arrays({gate.shape(), gate.shape()}, {mx::float32, mx::float32},
                                        std::make_shared<GatedGradient>(cpu_stream(), activation), {gate, up, d_y});
  return {outputs[0], outputs[1]};
}

}  // namespace mlxserve
