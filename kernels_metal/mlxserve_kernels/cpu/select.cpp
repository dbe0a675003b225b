#include <atomic>
#include <stdexcept>

#include "isa.h"

namespace mlxserve {

namespace portable {
extern const Kernels kernels;
}
#if defined(MLXSERVE_X86)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

namespace {

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> all{&portable::kernels};
#if defined(MLXSERVE_X86)
  __builtin_cpu_init();
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx2) all.push_back(&avx2::kernels);
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vnni"))
    all.push_back(&avx512::kernels);
#endif
  return all;
}

std::atomic<const Kernels*> selected{nullptr};

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* each : available()) names.emplace_back(each->name);
  return names;
}

void select_isa(const std::string& name) {
  for (const Kernels* each : available())
    if (name == each->name) return selected.store(each);
  throw std::invalid_argument("no such instruction set on this CPU: " + name);
}

const Kernels& kernels() {
  if (!selected.load()) selected.store(available().back());
  return *selected.load();
}

}  // namespace mlxserve
