// KV pools. Of floats: keys [pages, heads, dim, page], values [pages, heads, page, dim]. Quantized: kv_layout.h.
// Keys are transposed so that attention reads a dimension of neighbouring keys as one vector.
#pragma once

#include <optional>
#include <utility>

#include "kv_layout.h"
#include "primitive.h"

namespace mlxserve {

struct KvPool {
  char* data;
  Format format;
  long pages, heads, page, dim;
  bool is_transposed;

  // Of one head of a page.
  long head_bytes() const {
    if (is_quantized(format)) return page * kv_row_bytes(format, dim);
    return page * dim * (format == Format::float32 ? 4 : 2);
  }

  KvPool at(const mx::array& pool) const {
    KvPool placed = *this;
    placed.data = const_cast<char*>(pool.data<char>());
    return placed;
  }

  // Writes one row [heads, dim] to a slot, rounded to the format of the pool.
  void write(long slot, const float* from) const {
    if (format == Format::float32) write_as<float>(slot, from);
    else if (format == Format::float16) write_as<mx::float16_t>(slot, from);
    else if (format == Format::bfloat16) write_as<mx::bfloat16_t>(slot, from);
    else write_quantized(slot, from);
  }

 private:
  template <class Item>
  void write_as(long slot, const float* from) const {
    const long stride = is_transposed ? page : 1;
    for (long head = 0; head < heads; ++head, from += dim) {
      Item* to = reinterpret_cast<Item*>(data) + (slot / page * heads + head) * page * dim;
      to += is_transposed ? slot % page : slot % page * dim;
      for (long d = 0; d < dim; ++d) to[d * stride] = static_cast<Item>(from[d]);
    }
  }
  void write_quantized(long slot, const float* from) const;
};

struct KvPools {
  KvPool keys, values;
};

// The pools of one layer, without their data. kv_bits: 0 for pools of floats, else 8 or 4; quantized pools do not
// tell their dimensions, so key_dim is needed, and value_dim is taken from the size where it is 0.
// Throws std::invalid_argument unless these are a key pool and a value pool of such a layer.
KvPools kv_pools(const char* op, const mx::array& k_pool, const mx::array& v_pool, int kv_bits, long key_dim,
                 long value_dim);

}  // namespace mlxserve
