// Parts of a weight, on the same memory.
#pragma once

#include "kernels.h"

namespace mlxserve {

inline long float_bytes(Format f) { return f == Format::float32 ? 4 : 2; }

inline long row_bytes(const Weight& w) {
  if (w.format == Format::affine4) return w.k / 2;
  if (w.format == Format::affine8) return w.k;
  return w.k * float_bytes(w.format);
}

// `count` rows from `begin` on. Experts follow each other: expert e is rows e * n to (e + 1) * n - 1.
// Of tiled weights both are whole tiles.
inline Weight rows_of(Weight w, long begin, long count) {
  w.n = count;
  if (is_tiled(w.format)) {
    w.data = static_cast<const char*>(w.data) + begin / kTile * (w.k / w.group) * tile_group_bytes(w);
    return w;
  }
  w.data = static_cast<const char*>(w.data) + begin * row_bytes(w);
  if (!w.group) return w;
  long offset = begin * (w.k / w.group) * float_bytes(w.scale_format);
  w.scales = static_cast<const char*>(w.scales) + offset;
  w.biases = static_cast<const char*>(w.biases) + offset;
  return w;
}

}  // namespace mlxserve
