#include <algorithm>
#include <cstring>

#include "floats.h"
#include "isa.h"
#include "mlx/ops.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"
#include "row_gradients.h"

namespace mlxserve {
namespace {

// Elements that are worth a second thread.
constexpr long kTaskElements = 1 << 15;

struct NormCall {
  Input x, residual;  // residual.data: null for none
  Output y, sum;
  const void* weight;
  Format weight_format;
  float eps;
};

void norm_rows(const NormCall& call, long begin, long end) {
  const Kernels& use = kernels();
  const long k = call.x.width;
  const Format format = call.x.format;
  const bool is_wide = format == Format::float32;
  float *room = scratch(0, 2 * aligned(k)), *other = room + aligned(k);
  for (long row = begin; row < end; ++row) {
    const float* x = is_wide ? reinterpret_cast<const float*>(call.x.at(row)) : room;
    if (call.residual.data) {
      float* sum = is_wide ? reinterpret_cast<float*>(call.sum.at(row)) : room;
      use.widen(format, call.x.at(row), k, sum);
      use.widen(format, call.residual.at(row), k, other);
      use.add_scaled(sum, other, 1, k);
      if (!is_wide) {
        // The norm is that of the sum which is given back.
        use.narrow(format, sum, k, call.sum.at(row));
        use.widen(format, call.sum.at(row), k, sum);
      }
      x = sum;
    } else if (!is_wide) {
      use.widen(format, call.x.at(row), k, room);
    }
    float* y = is_wide ? reinterpret_cast<float*>(call.y.at(row)) : room;
    use.rms_norm(x, call.weight, call.weight_format, call.eps, 1, k, y);
    if (!is_wide) use.narrow(format, y, k, call.y.at(row));
  }
}

class RmsNorm : public CpuPrimitive {
 public:
  RmsNorm(mx::Stream stream, float eps, bool has_residual)
      : CpuPrimitive(stream), eps_(eps), has_residual_(has_residual) {}

  const char* name() const override { return "MlxserveRmsNorm"; }

  // inputs: x, perhaps a residual, perhaps a weight; outputs: the norm and, with a residual, the sum.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (mx::array& out : outputs) allocate(out);
    auto next = inputs.begin();
    auto take = [&] {
      mx::array a = dense(*next++, encoder);
      return input_rows(a, a.shape(-1));
    };
    NormCall call{};
    call.x = take();
    call.y = output_rows(outputs[0], call.x.width);
    if (has_residual_) call.residual = take(), call.sum = output_rows(outputs[1], call.x.width);
    if (next != inputs.end()) {
      Input weight = take();
      call.weight = weight.data, call.weight_format = weight.format;
    }
    call.eps = eps_;
    encoder.dispatch([call, count = long(outputs[0].size()) / call.x.width] {
      long step = std::max(kTaskElements / call.x.width, 1L);
      parallel_for((count + step - 1) / step,
                   [&](long task) { norm_rows(call, task * step, std::min((task + 1) * step, count)); });
    });
  }

  // With s = x + residual, r = 1 / sqrt(mean(s ** 2) + eps) and g = dy * weight: ds = r g - s r ** 3 mean(g s), and
  // what comes back through the sum.
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>& outputs) override {
    auto wide = [&](const mx::array& a) { return mx::astype(a, mx::float32, stream()); };
    const int weight_at = has_residual_ ? 2 : 1;
    std::optional<mx::array> weight, d_sum;
    if (int(primals.size()) > weight_at) weight = wide(primals[weight_at]);
    if (has_residual_) d_sum = wide(cotangents[1]);
    const bool is_weight_wanted = std::find(argnums.begin(), argnums.end(), weight_at) != argnums.end();
    auto [d_x, d_weight] = rms_norm_gradient(wide(has_residual_ ? outputs[1] : primals[0]), weight, wide(cotangents[0]),
                                             d_sum, eps_, is_weight_wanted);
    std::vector<mx::array> gradients;
    for (int argnum : argnums)
      gradients.push_back(mx::astype(argnum == weight_at ? *d_weight : d_x, primals[argnum].dtype(), stream()));
    return gradients;
  }

 private:
  float eps_;
  bool has_residual_;
};

class Gated : public CpuPrimitive {
 public:
  Gated(mx::Stream stream, Activation activation) : CpuPrimitive(stream), activation_(activation) {}

  const char* name() const override { return "MlxserveGated"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    mx::array gate = dense(inputs[0], encoder), up = dense(inputs[1], encoder);
    encoder.dispatch([f = activation_, format = format_of(gate.dtype()), g = gate.data<char>(), u = up.data<char>(),
                      to = outputs[0].data<char>(), size = long(gate.size())] {
      parallel_for((size + kTaskElements - 1) / kTaskElements, [&](long task) {
        const long end = std::min((task + 1) * kTaskElements, size);
        for (long at = task * kTaskElements; at < end; at += kSome)
          some(f, format, g, u, to, at, std::min(kSome, end - at));
      });
    });
  }

  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>&) override {
    auto wide = [&](const mx::array& a) { return mx::astype(a, mx::float32, stream()); };
    auto [d_gate, d_up] = gated_gradient(wide(primals[0]), wide(primals[1]), wide(cotangents[0]), activation_);
    std::vector<mx::array> gradients;
    for (int argnum : argnums)
      gradients.push_back(mx::astype(argnum == 0 ? d_gate : d_up, primals[argnum].dtype(), stream()));
    return gradients;
  }

 private:
  static constexpr long kSome = 1024;  // elements that stay in the first cache

  static void some(Activation f, Format format, const char* gate, const char* up, char* y, long at, long count) {
    const Kernels& use = kernels();
    const long offset = at * size_of(format);
    if (format == Format::float32) {
      float* to = reinterpret_cast<float*>(y + offset);
      use.widen(format, gate + offset, count, to);
      return use.activate(f, to, reinterpret_cast<const float*>(up + offset), count);
    }
    float gates[kSome], ups[kSome];
    use.widen(format, gate + offset, count, gates);
    use.widen(format, up + offset, count, ups);
    use.activate(f, gates, ups, count);
    use.narrow(format, gates, count, y + offset);
  }

  Activation activation_;
};

class GreedyTokens : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  const char* name() const override { return "MlxserveGreedyTokens"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    mx::array logits = dense(inputs[0], encoder);
    encoder.dispatch([from = logits.data<float>(), to = outputs[0].data<int>(), rows = long(logits.shape(0)),
                      size = long(logits.shape(1))] {
      parallel_for(rows, [&](long row) { to[row] = int(kernels().argmax(from + row * size, size)); });
    });
  }
};

// Copies `a` in row-major order; items of Size bytes.
template <class Item>
void gather(const Item* from, Item* to, const mx::Shape& shape, const mx::Strides& strides, int axis) {
  thread_local long written;
  if (axis == 0) written = 0;
  if (axis + 1 == int(shape.size()) && strides[axis] == 1) {
    std::memcpy(to + written, from, shape[axis] * sizeof(Item));
    written += shape[axis];
    return;
  }
  if (axis == int(shape.size())) {
    to[written++] = *from;
    return;
  }
  for (long i = 0; i < shape[axis]; ++i) gather(from + i * strides[axis], to, shape, strides, axis + 1);
}

template <class Item>
void dispatch_gather(const mx::array& a, mx::array& out, mx::cpu::CommandEncoder& encoder) {
  encoder.dispatch([from = a.data<Item>(), to = out.data<Item>(), shape = a.shape(), strides = a.strides()] {
    gather(from, to, shape, strides, 0);
  });
}

}  // namespace

mx::array dense(const mx::array& a, mx::cpu::CommandEncoder& encoder) {
  if (a.flags().row_contiguous || a.size() == 0) return a;
  mx::array out(a.shape(), a.dtype(), nullptr, {});
  allocate(out);
  if (a.itemsize() == 4) dispatch_gather<uint32_t>(a, out, encoder);
  else if (a.itemsize() == 2) dispatch_gather<uint16_t>(a, out, encoder);
  else dispatch_gather<uint8_t>(a, out, encoder);
  encoder.add_temporary(out);
  return out;
}

mx::array ready(const mx::array& a) {
  mx::array whole = mx::contiguous(a);
  whole.eval();
  return whole;
}

namespace {

std::vector<mx::array> norm_inputs(const mx::array& x, const std::optional<mx::array>& residual,
                                   const std::optional<mx::array>& weight) {
  format_of(x, "rms_norm", "x");
  require(x.ndim() >= 1 && x.shape(-1) > 0, "rms_norm: x must be [..., K]");
  std::vector<mx::array> inputs{x};
  if (residual) {
    require(residual->shape() == x.shape() && residual->dtype() == x.dtype(),
            "rms_norm: residual must have the shape and dtype of x");
    inputs.push_back(*residual);
  }
  if (weight) {
    format_of(*weight, "rms_norm", "weight");
    require(weight->ndim() == 1 && weight->shape(0) == x.shape(-1), "rms_norm: weight must be [", x.shape(-1), "]");
    inputs.push_back(*weight);
  }
  return inputs;
}

}  // namespace

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps) {
  return mx::array(x.shape(), x.dtype(), std::make_shared<RmsNorm>(cpu_stream(), eps, false),
                   norm_inputs(x, std::nullopt, weight));
}

std::pair<mx::array, mx::array> add_rms_norm(const mx::array& x, const mx::array& residual,
                                             const std::optional<mx::array>& weight, float eps) {
  auto outputs = mx::array::make_arrays({x.shape(), x.shape()}, {x.dtype(), x.dtype()},
                                        std::make_shared<RmsNorm>(cpu_stream(), eps, true),
                                        norm_inputs(x, residual, weight));
  return {outputs[0], outputs[1]};
}

mx::array gated(const mx::array& gate, const mx::array& up, Activation activation) {
  format_of(gate, "gated", "gate");
  require(gate.dtype() == up.dtype(), "gated: gate and up must have one dtype");
  require(gate.shape() == up.shape(), "gated: gate and up must have one shape");
  return mx::array(gate.shape(), gate.dtype(), std::make_shared<Gated>(cpu_stream(), activation), {gate, up});
}

mx::array greedy_tokens(const mx::array& logits) {
  require(logits.dtype() == mx::float32 && logits.ndim() == 2 && logits.shape(1) > 0,
          "greedy_tokens: logits must be float32 [R, V]");
  return mx::array({logits.shape(0)}, mx::int32, std::make_shared<GreedyTokens>(cpu_stream()), {logits});
}

}  // namespace mlxserve
