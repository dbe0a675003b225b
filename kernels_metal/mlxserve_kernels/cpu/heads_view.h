// Arrays [batch, heads, length, dim] whose memory may be in another order, as heads that were split off rows are.
#pragma once

#include "mlx/backend/cpu/encoder.h"
#include "primitive.h"

namespace mlxserve {

// Values of a head's row follow each other; all else has strides.
struct HeadsView {
  float* data;
  long batch, heads, length, dim;
  long batch_stride, head_stride, row_stride;

  float* head(long row, long head) const { return data + row * batch_stride + head * head_stride; }
};

inline HeadsView heads_view(const mx::array& a) {
  return {const_cast<float*>(a.data<float>()), a.shape(0), a.shape(1), a.shape(2), a.shape(3),
          a.strides(0), a.strides(1), a.strides(2)};
}

// Of an input; copied where the values of a row do not follow each other.
inline HeadsView heads_view(const mx::array& a, mx::cpu::CommandEncoder& encoder) {
  return heads_view(a.strides(3) == 1 || a.shape(3) == 1 ? a : dense(a, encoder));
}

// Memory in the order [batch, length, heads, dim]: what joins the heads again needs no copy.
inline void allocate_heads(mx::array& out) {
  const int64_t heads = out.shape(1), length = out.shape(2), dim = out.shape(3);
  mx::Strides strides{length * heads * dim, dim, heads * dim, 1};
  mx::array::Flags flags{};
  flags.contiguous = true;
  flags.row_contiguous = heads == 1 || length == 1 || out.size() == 0;
  flags.col_contiguous = out.size() <= 1;
  out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), std::move(strides), flags);
}

inline void require_heads(const char* op, const char* name, const mx::array& a) {
  require(a.dtype() == mx::float32 && a.ndim() == 4, op, ": ", name, " must be float32 [B, H, L, D]");
}

}  // namespace mlxserve
