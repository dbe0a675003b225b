// The instruction sets that were compiled in and that this CPU has.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace mlxserve {

// From the plainest to the best.
std::vector<std::string> available_isas();
// Throws std::invalid_argument for a name that is not available.
void select_isa(const std::string& name);
const Kernels& kernels();

}  // namespace mlxserve
