// Kernels take floats; rows of 16-bit values become floats and back beside them, some rows at a time.
#pragma once

#include <algorithm>

#include "isa.h"
#include "kernels.h"
#include "pool.h"
#include "primitive.h"

namespace mlxserve {

inline long size_of(Format format) { return format == Format::float32 ? 4 : 2; }

// Rows of an array of floats or of 16-bit values.
template <class Pointer>
struct Rows {
  Pointer data;
  Format format;
  long width;

  Pointer at(long row) const { return data + row * width * size_of(format); }
};
using Input = Rows<const char*>;
using Output = Rows<char*>;

inline Input input_rows(const mlx::core::array& a, long width) { return {a.data<char>(), format_of(a.dtype()), width}; }
inline Output output_rows(mlx::core::array& a, long width) { return {a.data<char>(), format_of(a.dtype()), width}; }

// Calls part(first, last) for ranges that cover begin to end.
template <class Part>
void each_part(long begin, long end, Part&& part) {
  constexpr long kTaskRows = 16;
  if (end - begin <= kTaskRows) return part(begin, end);
  parallel_for((end - begin + kTaskRows - 1) / kTaskRows, [&](long task) {
    long first = begin + task * kTaskRows;
    part(first, std::min(first + kTaskRows, end));
  });
}

// Rows begin to end - 1.
inline void widen(const Input& from, long begin, long end, float* to) {
  each_part(begin, end, [&](long first, long last) {
    kernels().widen(from.format, from.at(first), (last - first) * from.width, to + (first - begin) * from.width);
  });
}
inline void narrow(const float* from, const Output& to, long begin, long end) {
  each_part(begin, end, [&](long first, long last) {
    kernels().narrow(to.format, from + (first - begin) * to.width, (last - first) * to.width, to.at(first));
  });
}

constexpr long kWideRows = 512;

// Calls run(x, y, first row, rows) with floats until `rows` rows are done. Of 16-bit values it is `most` rows at a
// time, which are in a slot of scratch: weights are read once for all of them.
template <class Run>
void in_floats(const Input& x, const Output& y, long rows, Run&& run, int slot = 2, long most = kWideRows) {
  if (x.format == Format::float32 && y.format == Format::float32)
    return run(reinterpret_cast<const float*>(x.data), reinterpret_cast<float*>(y.data), 0L, rows);
  for (long begin = 0; begin < rows; begin += most) {
    const long end = std::min(begin + most, rows);
    float* from = scratch(slot, aligned((end - begin) * x.width) + (end - begin) * y.width);
    float* to = from + aligned((end - begin) * x.width);
    widen(x, begin, end, from);
    run(from, to, begin, end - begin);
    narrow(to, y, begin, end);
  }
}

}  // namespace mlxserve
