#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.h"
#include "mlx/compile_impl.h"
#include "ops.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_cpu, m) {
  m.doc() = "The CPU kernels. Use them through mlxserve_kernels.ops, which documents them.";
  m.def("available_isas", &mlxserve::available_isas, "Instruction sets that this CPU can run, from the plainest.");
  m.def("isa", [] { return std::string(mlxserve::kernels().name); }, "The instruction set in use.");
  m.def(
      "configure",
      [](int threads, const std::string& isa) {
        mlxserve::select_isa(isa);
        mlxserve::set_threads(threads);
      },
      "threads"_a, "isa"_a, "Call once, before any kernel.");
  m.def(
      "clear_compile_cache",
      [] { mlx::core::detail::compile_clear_cache(mlx::core::detail::compile_cache()); },
      "Drop what mx.compile keeps for this thread.");
  m.def("quantized_matmul", &mlxserve::quantized_matmul, "x"_a, "w"_a, "scales"_a, "biases"_a, "group_size"_a,
        "bits"_a);
  m.def("linear", &mlxserve::linear, "x"_a, "w"_a);
  m.def("rms_norm", &mlxserve::rms_norm, "x"_a, "weight"_a.none(), "eps"_a);
  m.def("silu_mul", &mlxserve::silu_mul, "gate"_a, "up"_a);
  m.def("write_pages", &mlxserve::write_pages, "k_pool"_a, "v_pool"_a, "k"_a, "v"_a, "slot_mapping"_a);
  m.def("copy_pages", &mlxserve::copy_pages, "k_pool"_a, "v_pool"_a, "source_ids"_a, "target_ids"_a);
  m.def("paged_attention", &mlxserve::paged_attention, "q"_a, "k_pool"_a, "v_pool"_a, "block_tables"_a, "q_starts"_a,
        "kv_lens"_a, "scale"_a, "window"_a, "softcap"_a, "sinks"_a.none());
}
