#include "kv_pool.h"

namespace mlxserve {

KvPool key_pool(const mx::array& a, char* data) {
  return {data, format_of(a, "pages", "a pool"), a.shape(0), a.shape(1), a.shape(3), a.shape(2), true};
}

KvPool value_pool(const mx::array& a, char* data) {
  return {data, format_of(a, "pages", "a pool"), a.shape(0), a.shape(1), a.shape(2), a.shape(3), false};
}

void require_pools(const char* op, const mx::array& k_pool, const mx::array& v_pool) {
  format_of(k_pool, op, "k_pool");
  require(v_pool.dtype() == k_pool.dtype(), op, ": pools must have one dtype");
  require(k_pool.ndim() == 4 && v_pool.ndim() == 4, op,
          ": k_pool must be [pages, heads, D, page_size], v_pool [pages, heads, page_size, D]");
  for (auto [name, of_keys, of_values] : {std::tuple{"pages", k_pool.shape(0), v_pool.shape(0)},
                                          {"heads", k_pool.shape(1), v_pool.shape(1)},
                                          {"page_size", k_pool.shape(3), v_pool.shape(2)}})
    require(of_keys == of_values, op, ": pools differ in ", name, ": ", of_keys, " and ", of_values);
}

}  // namespace mlxserve
