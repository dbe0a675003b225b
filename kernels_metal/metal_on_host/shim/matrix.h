// simdgroup_matrix of 8x8: two neighbouring elements of a row in each lane, where Apple's GPUs keep them.
#pragma once
#include "simd.h"
#include "sync.h"

extern "C" __attribute__((convergent, const)) metal::float2 mtl_simd_mma(
    float a0, float a1, float b0, float b1, float c0, float c1, int line, const constant char* file);
extern "C" __attribute__((const)) uint mtl_lane();

namespace metal {

template <typename T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "Metal has simdgroup matrices of 8x8");
  vec<T, 2> mtl_elements;
  simdgroup_matrix() thread = default;
  explicit simdgroup_matrix(T diagonal) thread {
    mtl_elements[0] = row() == column() ? diagonal : T(0);
    mtl_elements[1] = row() == column() + 1 ? diagonal : T(0);
  }
  thread vec<T, 2>& thread_elements() thread { return mtl_elements; }
  const thread vec<T, 2>& thread_elements() const thread { return mtl_elements; }
  static uint row() {
    uint lane = mtl_lane();
    return (lane / 4 & 4) + (lane / 2) % 4;
  }
  static uint column() {
    uint lane = mtl_lane();
    return (lane / 4 & 2) * 2 + (lane % 2) * 2;
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int C, int R = C>
simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, C> m;
  m.mtl_elements[0] = m.mtl_elements[1] = value;
  return m;
}

#define MTL_MATRIX_MEMORY(space)                                                                                    \
  template <typename T, int R, int C>                                                                               \
  MTL_CONVERGENT void simdgroup_load(                                                                               \
      thread simdgroup_matrix<T, R, C>& m, const space T* from, ulong elements_per_row = C, ulong2 origin = ulong2{0, 0}, \
      bool transpose = false, MTL_SITE) {                                                                           \
    mtl_simd_sync(line, file);                                                                                      \
    ulong row = m.row(), column = m.column();                                                                       \
    for (int i = 0; i < 2; i++)                                                                                     \
      m.mtl_elements[i] = transpose ? from[(origin.y + column + i) * elements_per_row + origin.x + row]             \
                                    : from[(origin.y + row) * elements_per_row + origin.x + column + i];            \
  }                                                                                                                 \
  template <typename T, int R, int C>                                                                               \
  MTL_CONVERGENT void simdgroup_store(                                                                              \
      const thread simdgroup_matrix<T, R, C>& m, space T* to, ulong elements_per_row = C,                           \
      ulong2 origin = ulong2{0, 0}, bool transpose = false, MTL_SITE) {                                             \
    mtl_simd_sync(line, file);                                                                                      \
    ulong row = m.row(), column = m.column();                                                                       \
    for (int i = 0; i < 2; i++) {                                                                                   \
      if (transpose) to[(origin.y + column + i) * elements_per_row + origin.x + row] = m.mtl_elements[i];           \
      else to[(origin.y + row) * elements_per_row + origin.x + column + i] = m.mtl_elements[i];                     \
    }                                                                                                               \
  }
MTL_MATRIX_MEMORY(device)
MTL_MATRIX_MEMORY(threadgroup)
#undef MTL_MATRIX_MEMORY

template <typename D, typename A, typename B, typename C>
MTL_CONVERGENT void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>& d, const thread simdgroup_matrix<A, 8, 8>& a,
    const thread simdgroup_matrix<B, 8, 8>& b, const thread simdgroup_matrix<C, 8, 8>& c, MTL_SITE) {
  float2 r = mtl_simd_mma(
      float(a.mtl_elements[0]), float(a.mtl_elements[1]), float(b.mtl_elements[0]), float(b.mtl_elements[1]),
      float(c.mtl_elements[0]), float(c.mtl_elements[1]), line, file);
  d.mtl_elements[0] = D(r[0]);
  d.mtl_elements[1] = D(r[1]);
}
template <typename D, typename A, typename B>
MTL_CONVERGENT void simdgroup_multiply(
    thread simdgroup_matrix<D, 8, 8>& d, const thread simdgroup_matrix<A, 8, 8>& a,
    const thread simdgroup_matrix<B, 8, 8>& b, MTL_SITE) {
  simdgroup_matrix<D, 8, 8> zero = make_filled_simdgroup_matrix<D, 8>(D(0));
  simdgroup_multiply_accumulate(d, a, b, zero, line, file);
}
}  // namespace metal
