// What all our primitives share.
#pragma once

#include <memory>
#include <sstream>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace mlxserve {

namespace mx = mlx::core;

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

template <class Integer>
constexpr Integer round_up(Integer value, std::type_identity_t<Integer> step) {
  return (value + step - 1) / step * step;
}

// Of a dtype that was checked before.
inline Format format_of(mx::Dtype dtype) {
  return dtype == mx::float32 ? Format::float32 : dtype == mx::float16 ? Format::float16 : Format::bfloat16;
}
inline Format format_of(mx::Dtype dtype, const char* op, const char* name) {
  require(dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16, op, ": ", name,
          " must be float32, float16 or bfloat16, got ", dtype);
  return format_of(dtype);
}
inline Format format_of(const mx::array& a, const char* op, const char* name) { return format_of(a.dtype(), op, name); }

// A primitive that runs on the CPU.
class CpuPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string(name()) + " runs on the CPU only");
  }
};

inline mx::Stream cpu_stream() { return mx::to_stream({}, mx::Device::cpu); }

// `a` itself where its rows are contiguous, else a copy made on the stream, alive until its tasks are done.
mx::array dense(const mx::array& a, mx::cpu::CommandEncoder& encoder);

// `a` with contiguous rows, evaluated.
mx::array ready(const mx::array& a);

// A zeroed array in memory of large pages.
mx::array placed(mx::Shape shape, mx::Dtype dtype);

inline void allocate(mx::array& out) { out.set_data(mx::allocator::malloc(out.nbytes())); }

}  // namespace mlxserve
