// The KV pools of a stack of decoder layers.
#pragma once

#include <memory>
#include <vector>

#include "decoder.h"
#include "kv_pool.h"

namespace mlxserve {

// Evaluated, checked against the layers, and held: a call of the stack then finds them in one place. As inputs of
// their own, 60 arrays cost a step more than all its other nodes, since the kernels drive them from the caches.
struct StackPools {
  // Throws std::invalid_argument unless these are the pools of the layers. kv_bits: see kv_pool.h.
  StackPools(std::shared_ptr<const DecoderStack> stack, Arrays k_pools, Arrays v_pools, int kv_bits);

  std::shared_ptr<const DecoderStack> stack;
  Arrays k_arrays, v_arrays;
  std::vector<KvPools> pools;
};

}  // namespace mlxserve
