#include <algorithm>

#include "isa.h"
#include "mlx/ops.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"

namespace mlxserve {
namespace {

// Elements that are worth a second thread.
constexpr long kTaskElements = 1 << 15;

class RmsNorm : public CpuPrimitive {
 public:
  RmsNorm(mx::Stream stream, float eps) : CpuPrimitive(stream), eps_(eps) {}

  const char* name() const override { return "MlxserveRmsNorm"; }

  // inputs: x and perhaps a weight.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    mx::array x = dense(inputs[0], encoder);
    const void* weight = nullptr;
    Format format = Format::float32;
    if (inputs.size() > 1) {
      mx::array w = dense(inputs[1], encoder);
      weight = w.data<char>(), format = format_of(w, "rms_norm", "weight");
    }
    long k = x.shape(-1);
    encoder.dispatch([=, eps = eps_, from = x.data<float>(), to = outputs[0].data<float>(), rows = x.size() / k] {
      long step = std::max(kTaskElements / k, 1L), count = long(rows);
      parallel_for((count + step - 1) / step, [&](long task) {
        long begin = task * step;
        kernels().rms_norm(from + begin * k, weight, format, eps, std::min(step, count - begin), k, to + begin * k);
      });
    });
  }

  // With r = 1 / sqrt(mean(x ** 2) + eps) and g = dy * weight: dx = r g - x r ** 3 mean(g x).
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>&) override {
    const mx::array &x = primals[0], &dy = cotangents[0];
    mx::Stream s = stream();
    mx::array r = mx::rsqrt(mx::add(mx::mean(mx::square(x, s), -1, true, s), mx::array(eps_), s), s);
    mx::array normed = mx::multiply(x, r, s);
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      if (argnum == 0) {
        mx::array g = primals.size() > 1 ? mx::multiply(dy, mx::astype(primals[1], mx::float32, s), s) : dy;
        mx::array along = mx::mean(mx::multiply(g, normed, s), -1, true, s);
        gradients.push_back(mx::multiply(r, mx::subtract(g, mx::multiply(normed, along, s), s), s));
        continue;
      }
      mx::Shape rows{int(x.size() / x.shape(-1)), x.shape(-1)};
      mx::array sums = mx::sum(mx::reshape(mx::multiply(dy, normed, s), rows, s), 0, false, s);
      gradients.push_back(mx::astype(sums, primals[1].dtype(), s));
    }
    return gradients;
  }

 private:
  float eps_;
};

class SiluMul : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  const char* name() const override { return "MlxserveSiluMul"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs[0]);
    mx::array gate = dense(inputs[0], encoder), up = dense(inputs[1], encoder);
    encoder.dispatch([g = gate.data<float>(), u = up.data<float>(), to = outputs[0].data<float>(),
                      size = long(gate.size())] {
      parallel_for((size + kTaskElements - 1) / kTaskElements, [&](long task) {
        long begin = task * kTaskElements;
        kernels().silu_mul(g, u, to, begin, std::min(begin + kTaskElements, size));
      });
    });
  }

  // d silu(g) = sigmoid(g) (1 + g (1 - sigmoid(g)))
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>&) override {
    const mx::array &gate = primals[0], &up = primals[1], &dy = cotangents[0];
    mx::Stream s = stream();
    mx::array one(1.0f), sigmoid = mx::sigmoid(gate, s);
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      if (argnum == 1) {
        gradients.push_back(mx::multiply(dy, mx::multiply(gate, sigmoid, s), s));
        continue;
      }
      mx::array inner = mx::add(one, mx::multiply(gate, mx::subtract(one, sigmoid, s), s), s);
      gradients.push_back(mx::multiply(mx::multiply(dy, up, s), mx::multiply(sigmoid, inner, s), s));
    }
    return gradients;
  }
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

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps) {
  require(x.dtype() == mx::float32 && x.ndim() >= 1 && x.shape(-1) > 0, "rms_norm: x must be float32 [..., K]");
  std::vector<mx::array> inputs{x};
  if (weight) {
    format_of(*weight, "rms_norm", "weight");
    require(weight->ndim() == 1 && weight->shape(0) == x.shape(-1), "rms_norm: weight must be [", x.shape(-1), "]");
    inputs.push_back(*weight);
  }
  return mx::array(x.shape(), mx::float32, std::make_shared<RmsNorm>(cpu_stream(), eps), std::move(inputs));
}

mx::array silu_mul(const mx::array& gate, const mx::array& up) {
  require(gate.dtype() == mx::float32 && up.dtype() == mx::float32, "silu_mul: gate and up must be float32");
  require(gate.shape() == up.shape(), "silu_mul: gate and up must have one shape");
  return mx::array(gate.shape(), mx::float32, std::make_shared<SiluMul>(cpu_stream()), {gate, up});
}

mx::array greedy_tokens(const mx::array& logits) {
  require(logits.dtype() == mx::float32 && logits.ndim() == 2 && logits.shape(1) > 0,
          "greedy_tokens: logits must be float32 [R, V]");
  return mx::array({logits.shape(0)}, mx::int32, std::make_shared<GreedyTokens>(cpu_stream()), {logits});
}

}  // namespace mlxserve
