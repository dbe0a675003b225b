// Memory of one call of a primitive, counted by MLX and freed at its end.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mlx/allocator.h"
#include "pool.h"

namespace mlxserve {

class Room {
 public:
  explicit Room(std::size_t floats) : memory_(mlx::core::allocator::malloc(floats * sizeof(float) + 64)) {
    auto address = reinterpret_cast<std::uintptr_t>(memory_.buffer().raw_ptr());
    next_ = reinterpret_cast<float*>((address + 63) / 64 * 64);
  }

  // The next so many floats of it.
  float* take(std::size_t floats) {
    float* taken = next_;
    next_ += floats;
    return taken;
  }

 private:
  mlx::core::allocator::Data memory_;
  float* next_;
};

}  // namespace mlxserve
