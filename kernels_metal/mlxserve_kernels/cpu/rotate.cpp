// Rotary positions of whole batches (Su et al., 2021, arXiv:2104.09864).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "heads_view.h"
#include "isa.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"

namespace mlxserve {
namespace {

struct Turn {
  float position_scale, input_scale;
  bool is_interleaved, is_inverse;
};

class RotateHeads : public CpuPrimitive {
 public:
  RotateHeads(mx::Stream stream, Turn turn) : CpuPrimitive(stream), turn_(turn) {}

  const char* name() const override { return "MlxserveRotateHeads"; }

  // inputs: x [B, H, L, D], positions [L] or [B, L], inverse frequencies.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate_heads(outputs[0]);
    if (outputs[0].size() == 0) return;
    HeadsView x = heads_view(inputs[0], encoder), y = heads_view(outputs[0]);
    mx::array positions = dense(inputs[1], encoder), frequencies = dense(inputs[2], encoder);
    encoder.dispatch([x, y, turn = turn_, at = positions.data<int>(), is_shared = positions.ndim() == 1,
                      f = frequencies.data<float>(), half = long(frequencies.size())] {
      constexpr long kTaskRows = 16;
      const long parts = (x.length + kTaskRows - 1) / kTaskRows;
      parallel_for(parts, [&](long part) {
        float* angles = scratch(0, 2 * half);
        for (long l = part * kTaskRows; l < std::min((part + 1) * kTaskRows, x.length); ++l)
          for (long b = 0; b < x.batch; ++b) {
            if (b == 0 || !is_shared) set_angles(turn, at[(is_shared ? 0 : b * x.length) + l], f, half, angles);
            float* to = y.data + b * y.batch_stride + l * y.row_stride;
            for (long h = 0; h < x.heads; ++h)
              std::memcpy(to + h * x.dim, x.head(b, h) + l * x.row_stride, x.dim * sizeof(float));
            kernels().rotate(to, x.heads, x.dim, angles, half, turn.is_interleaved, turn.input_scale);
          }
      });
    });
  }

  // The same, turned back.
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>&) override {
    std::vector<mx::array> gradients;
    for (int argnum : argnums) {
      require(argnum == 0, "rotate_heads: there is no gradient of positions and frequencies");
      Turn back = turn_;
      back.is_inverse = !back.is_inverse;
      gradients.push_back(mx::array(primals[0].shape(), mx::float32, std::make_shared<RotateHeads>(stream(), back),
                                    {cotangents[0], primals[1], primals[2]}));
    }
    return gradients;
  }

 private:
  static void set_angles(const Turn& turn, int position, const float* frequencies, long half, float* angles) {
    for (long i = 0; i < half; ++i) {
      const float angle = float(position) * turn.position_scale * frequencies[i];
      angles[i] = std::cos(angle);
      angles[half + i] = turn.is_inverse ? -std::sin(angle) : std::sin(angle);
    }
  }

  Turn turn_;
};

}  // namespace

mx::array rotate_heads(const mx::array& x, const mx::array& positions, const mx::array& inverse_frequencies,
                       float position_scale, float input_scale, bool is_interleaved) {
  const char* op = "rotate_heads";
  require_heads(op, "x", x);
  require(inverse_frequencies.dtype() == mx::float32 && inverse_frequencies.ndim() == 1 &&
              2 * inverse_frequencies.shape(0) <= x.shape(3),
          op, ": inverse_frequencies must be float32 [up to D / 2], D is ", x.shape(3));
  require(positions.dtype() == mx::int32 &&
              (positions.shape() == mx::Shape{x.shape(2)} || positions.shape() == mx::Shape{x.shape(0), x.shape(2)}),
          op, ": positions must be int32 [", x.shape(2), "] or [", x.shape(0), ", ", x.shape(2), "]");
  return mx::array(x.shape(), mx::float32,
                   std::make_shared<RotateHeads>(cpu_stream(), Turn{position_scale, input_scale, is_interleaved, false}),
                   {x, positions, inverse_frequencies});
}

}  // namespace mlxserve
