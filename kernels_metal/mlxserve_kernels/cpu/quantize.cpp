// Floats to quantized weights, on all threads.
#include <algorithm>

#include "isa.h"
#include "ops.h"
#include "pool.h"
#include "primitive.h"
#include "weight.h"

namespace mlxserve {
namespace {

class Quantize : public CpuPrimitive {
 public:
  Quantize(mx::Stream stream, Quantization shape) : CpuPrimitive(stream), shape_(shape) {}

  const char* name() const override { return "MlxserveQuantize"; }

  // inputs: x, and the importance of its columns where it is given.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (mx::array& out : outputs) allocate(out);
    mx::array x = dense(inputs[0], encoder);
    Quantization job = shape_;
    job.x = x.data<char>();
    if (inputs.size() > 1) job.importance = dense(inputs[1], encoder).data<float>();
    job.words = outputs[0].data<uint32_t>();
    job.scales = outputs[1].data<char>();
    job.biases = job.is_affine ? outputs[2].data<char>() : nullptr;
    encoder.dispatch([job, groups = long(x.size() / job.group)] {
      // A multiple of every number of lanes; long enough to be worth handing out.
      constexpr long kSome = 512;
      parallel_for((groups + kSome - 1) / kSome, [&](long part) {
        kernels().quantize(job, part * kSome, std::min((part + 1) * kSome, groups));
      });
    });
  }

 private:
  Quantization shape_;
};

}  // namespace

std::vector<mx::array> quantize(const mx::array& x, int group_size, int bits, const std::string& mode, int effort,
                                const std::optional<mx::array>& importance) {
  const char* op = "quantize";
  Quantization job{};
  job.x_format = format_of(x, op, "x");
  job.is_affine = is_affine(quantized_format(op, group_size, bits, mode));
  job.bits = bits;
  job.group = group_size;
  job.effort = effort;
  require(x.ndim() >= 2 && x.shape(-1) > 0 && x.shape(-1) % group_size == 0, op,
          ": x must be [..., K], K a multiple of ", group_size);
  require(effort >= 0 && (job.is_affine || effort == 0), op, ": only affine modes are searched");
  job.groups_per_row = x.shape(-1) / group_size;
  std::vector<mx::array> inputs{x};
  if (importance) {
    require(effort > 0, op, ": importance is for searches alone");
    require(importance->dtype() == mx::float32 && importance->shape() == mx::Shape{x.shape(-1)}, op,
            ": importance must be float32 [", x.shape(-1), "]");
    inputs.push_back(*importance);
  }
  mx::Shape words = x.shape(), scales = x.shape();
  words.back() = static_cast<mx::ShapeElem>(long(x.shape(-1)) * bits / 32);
  scales.back() = static_cast<mx::ShapeElem>(job.groups_per_row);
  std::vector<mx::Shape> shapes{words, scales};
  std::vector<mx::Dtype> types{mx::uint32, job.is_affine ? x.dtype() : mx::uint8};
  if (job.is_affine) shapes.push_back(scales), types.push_back(x.dtype());
  return mx::array::make_arrays(shapes, types, std::make_shared<Quantize>(cpu_stream(), job), inputs);
}

}  // namespace mlxserve
