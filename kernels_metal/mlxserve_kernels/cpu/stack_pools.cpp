#include "stack_pools.h"

#include "mlx/transforms.h"
#include "primitive.h"

namespace mlxserve {
namespace {

constexpr const char* kOp = "StackPools";

KvPools placed(const DecoderLayer& l, const mx::array& keys, const mx::array& values, int kv_bits) {
  KvPools pools = kv_pools(kOp, keys, values, kv_bits, l.dim, l.value_dim);
  const auto& [k, v] = pools;
  require(k.pages > 0 && k.page > 0, kOp, ": a pool has no pages");
  require(k.heads == l.kv_heads && k.dim == l.dim && v.dim == l.value_dim, kOp, ": a layer has ", l.kv_heads,
          " kv heads of ", l.dim, " and ", l.value_dim, ", its pools ", k.heads, " of ", k.dim, " and ", v.dim);
  require(keys.flags().row_contiguous && values.flags().row_contiguous, kOp, ": a pool must be contiguous");
  require(keys.data<char>() != values.data<char>(), kOp, ": k_pool and v_pool must be two buffers");
  return {k.at(keys), v.at(values)};
}

}  // namespace

StackPools::StackPools(std::shared_ptr<const DecoderStack> stack_, Arrays k_pools, Arrays v_pools, int kv_bits)
    : stack(std::move(stack_)), k_arrays(std::move(k_pools)), v_arrays(std::move(v_pools)) {
  std::size_t count = stack->layers.size();
  require(k_arrays.size() == count && v_arrays.size() == count, kOp, ": ", count, " layers need as many pools, got ",
          k_arrays.size(), " and ", v_arrays.size());
  mx::eval(k_arrays);
  mx::eval(v_arrays);
  for (std::size_t i = 0; i < count; ++i) pools.push_back(placed(stack->layers[i], k_arrays[i], v_arrays[i], kv_bits));
}

}  // namespace mlxserve
