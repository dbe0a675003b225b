// KV pools: keys [pages, heads, dim, page], values [pages, heads, page, dim]. Keys are transposed so that attention
// reads a dimension of neighbouring keys as one vector.
#pragma once

#include "primitive.h"

namespace mlxserve {

struct KvPool {
  char* data;
  Format format;
  long pages, heads, page, dim;
  bool is_transposed;

  long page_bytes() const { return heads * page * dim * (format == Format::float32 ? 4 : 2); }

  // Writes one row [heads, dim] to a slot, rounded to the format of the pool.
  void write(long slot, const float* from) const {
    if (format == Format::float32) write_as<float>(slot, from);
    else if (format == Format::float16) write_as<mx::float16_t>(slot, from);
    else write_as<mx::bfloat16_t>(slot, from);
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
};

// Views of arrays that require_pools has accepted; without data, their shapes.
KvPool key_pool(const mx::array& pool, char* data = nullptr);
KvPool value_pool(const mx::array& pool, char* data = nullptr);

// Throws std::invalid_argument unless these are a key pool and a value pool of one layer.
void require_pools(const char* op, const mx::array& k_pool, const mx::array& v_pool);

}  // namespace mlxserve
