#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "adapters.h"
#include "decoder.h"
#include "isa.h"
#include "mlx/compile_impl.h"
#include "ops.h"
#include "pool.h"
#include "stack_pools.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using mlxserve::Activation;
using mlxserve::Adapters;
using mlxserve::Arrays;
using mlxserve::DecoderLayer;
using mlxserve::DecoderStack;
using mlxserve::Experts;
using mlxserve::Matrix;
using mlxserve::Norm;
using mlxserve::Rope;
using mlxserve::StackPools;
using Optional = std::optional<mlxserve::mx::array>;

void bind_decoder(nb::module_& m) {
  nb::class_<Matrix>(m, "Matrix")
      .def(nb::init<const mlxserve::mx::array&, const Optional&, const Optional&, int, int, const std::string&,
                    const Optional&>(),
           "w"_a, "scales"_a.none(), "biases"_a.none(), "group_size"_a, "bits"_a, "mode"_a, "bias"_a.none())
      .def(nb::init<const mlxserve::mx::array&, int, int, mlxserve::mx::Dtype, const Optional&>(), "tiles"_a,
           "group_size"_a, "bits"_a, "scale_dtype"_a, "bias"_a.none())
      .def("rows", &Matrix::rows, "begin"_a, "end"_a);
  nb::class_<Norm>(m, "Norm").def(nb::init<const mlxserve::mx::array&, float>(), "weight"_a, "eps"_a);
  nb::class_<Rope>(m, "Rope").def(nb::init<const mlxserve::mx::array&, float, float, bool>(),
                                  "inverse_frequencies"_a, "position_scale"_a, "input_scale"_a, "is_interleaved"_a);
  nb::enum_<Activation>(m, "Activation")
      .value("silu", Activation::silu)
      .value("gelu_tanh", Activation::gelu_tanh)
      .value("gelu", Activation::gelu);
  nb::class_<Experts>(m, "Experts")
      .def(nb::init<Matrix, Matrix, Matrix, Matrix, long, bool, std::optional<Matrix>>(), "router"_a, "gate"_a, "up"_a,
           "down"_a, "top_k"_a, "is_normalized"_a, "shared_gate"_a.none());
  nb::class_<DecoderLayer>(m, "DecoderLayer")
      .def(nb::init<>())
      .def_rw("heads", &DecoderLayer::heads)
      .def_rw("kv_heads", &DecoderLayer::kv_heads)
      .def_rw("dim", &DecoderLayer::dim)
      .def_rw("value_dim", &DecoderLayer::value_dim)
      .def_rw("scale", &DecoderLayer::scale)
      .def_rw("window", &DecoderLayer::window)
      .def_rw("softcap", &DecoderLayer::softcap)
      .def_rw("residual_multiplier", &DecoderLayer::residual_multiplier)
      .def_rw("activation", &DecoderLayer::activation)
      .def_rw("q", &DecoderLayer::q)
      .def_rw("k", &DecoderLayer::k)
      .def_rw("v", &DecoderLayer::v)
      .def_rw("o", &DecoderLayer::o)
      .def_rw("gate", &DecoderLayer::gate)
      .def_rw("up", &DecoderLayer::up)
      .def_rw("down", &DecoderLayer::down)
      .def_rw("experts", &DecoderLayer::experts)
      .def_rw("attention_norm", &DecoderLayer::attention_norm)
      .def_rw("q_norm", &DecoderLayer::q_norm)
      .def_rw("k_norm", &DecoderLayer::k_norm)
      .def_rw("post_attention_norm", &DecoderLayer::post_attention_norm)
      .def_rw("mlp_norm", &DecoderLayer::mlp_norm)
      .def_rw("post_mlp_norm", &DecoderLayer::post_mlp_norm)
      .def_rw("rope", &DecoderLayer::rope)
      .def_rw("sinks", &DecoderLayer::sinks);
  nb::class_<DecoderStack>(m, "DecoderStack").def(nb::init<std::vector<DecoderLayer>>(), "layers"_a);
  nb::class_<StackPools>(m, "StackPools")
      .def(nb::init<std::shared_ptr<const DecoderStack>, Arrays, Arrays, int>(), "stack"_a, "k_pools"_a, "v_pools"_a,
           "kv_bits"_a);
  nb::class_<Adapters>(m, "Adapters")
      .def(nb::init<std::shared_ptr<const DecoderStack>, long, const std::vector<Adapters::Change>&>(), "stack"_a,
           "slots"_a, "changes"_a);
  m.def("decoder_stack", &mlxserve::decoder_stack, "pools"_a, "hidden"_a, "positions"_a, "slot_mapping"_a,
        "block_tables"_a, "q_starts"_a, "kv_lens"_a, "order"_a, "adapters"_a.none(), "adapter_slots"_a.none());
}

void bind_experts(nb::module_& m) {
  using mlxserve::ExpertArrays;
  nb::class_<ExpertArrays>(m, "ExpertArrays")
      .def("__init__", [](ExpertArrays* to, const mlxserve::mx::array& w, const Optional& scales,
                          const Optional& biases, int group_size, int bits, const std::string& mode,
                          const Optional& bias, const std::optional<mlxserve::mx::Dtype>& scale_dtype) {
        new (to) ExpertArrays{w, scales, biases, group_size, bits, mode, bias, scale_dtype};
      }, "w"_a, "scales"_a.none(), "biases"_a.none(), "group_size"_a, "bits"_a, "mode"_a, "bias"_a.none(),
         "scale_dtype"_a.none());
  m.def("gather_matmul", &mlxserve::gather_matmul, "x"_a, "ids"_a, "matrix"_a);
  m.def("gated_experts", &mlxserve::gated_experts, "x"_a, "ids"_a, "shares"_a.none(), "gate"_a, "up"_a, "down"_a,
        "activation"_a);
  m.def("route", [](const mlxserve::mx::array& logits, int top_k, bool is_normalized) {
    return mlxserve::route(logits, top_k, is_normalized);
  }, "logits"_a, "top_k"_a, "is_normalized"_a);
}

void bind_training(nb::module_& m) {
  m.def("matmul", &mlxserve::matmul, "x"_a, "w"_a);
  m.def("adapted_matmul", &mlxserve::adapted_matmul, "x"_a, "a"_a, "b"_a, "scale"_a, "w"_a, "scales"_a.none(),
        "biases"_a.none(), "group_size"_a, "bits"_a, "mode"_a);
  m.def("rotate_heads", &mlxserve::rotate_heads, "x"_a, "positions"_a, "inverse_frequencies"_a, "position_scale"_a,
        "input_scale"_a, "is_interleaved"_a);
  m.def("causal_attention", &mlxserve::causal_attention, "q"_a, "k"_a, "v"_a, "segments"_a.none(), "scale"_a,
        "window"_a, "softcap"_a);
  m.def("cross_entropy_head", &mlxserve::cross_entropy_head, "hidden"_a, "targets"_a, "weights"_a, "w"_a,
        "scales"_a.none(), "biases"_a.none(), "group_size"_a, "bits"_a, "mode"_a, "logit_scale"_a, "softcap"_a,
        "with_gradient"_a);
}

}  // namespace

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
  m.def("quantized_matmul", &mlxserve::quantized_matmul, "x"_a, "w"_a, "scales"_a, "biases"_a.none(), "group_size"_a,
        "bits"_a, "mode"_a, "is_transposed"_a);
  m.def("linear", &mlxserve::linear, "x"_a, "w"_a);
  m.def("embed_rows", &mlxserve::embed_rows, "ids"_a, "w"_a, "scales"_a.none(), "biases"_a.none(), "group_size"_a,
        "bits"_a, "mode"_a);
  m.def("quantize", &mlxserve::quantize, "x"_a, "group_size"_a, "bits"_a, "mode"_a, "effort"_a,
        "importance"_a.none());
  m.def("greedy_tokens", &mlxserve::greedy_tokens, "logits"_a);
  m.def("sample_tokens", &mlxserve::sample_tokens, "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a,
        "keys"_a);
  m.def("rms_norm", &mlxserve::rms_norm, "x"_a, "weight"_a.none(), "eps"_a);
  m.def("add_rms_norm", &mlxserve::add_rms_norm, "x"_a, "residual"_a, "weight"_a.none(), "eps"_a);
  m.def("gated", &mlxserve::gated, "gate"_a, "up"_a, "activation"_a);
  m.def("lora_delta", &mlxserve::lora_delta, "x"_a, "a"_a, "b"_a, "slots"_a, "scales"_a);
  m.def("has_tiles", &mlxserve::has_tiles, "Whether the instruction set in use computes with tiles.");
  m.def("set_digits", &mlxserve::set_digits, "digits"_a);
  m.def("pack_tiles", &mlxserve::pack_tiles, "w"_a, "scales"_a, "biases"_a, "group_size"_a, "bits"_a);
  m.def("unpack_tiles", &mlxserve::unpack_tiles, "tiles"_a, "group_size"_a, "bits"_a, "scale_dtype"_a);
  m.def("tiled_matmul", &mlxserve::tiled_matmul, "x"_a, "tiles"_a, "group_size"_a, "bits"_a, "scale_dtype"_a);
  m.def("tiled_rows", &mlxserve::tiled_rows, "ids"_a, "tiles"_a, "group_size"_a, "bits"_a, "scale_dtype"_a);
  m.def("resize_rows", &mlxserve::resize_rows, "a"_a, "rows"_a);
  m.def("write_pages", &mlxserve::write_pages, "k_pool"_a, "v_pool"_a, "k"_a, "v"_a, "slot_mapping"_a,
        "kv_bits"_a);
  m.def("copy_pages", &mlxserve::copy_pages, "k_pool"_a, "v_pool"_a, "source_ids"_a, "target_ids"_a);
  m.def("paged_attention", &mlxserve::paged_attention, "q"_a, "k_pool"_a, "v_pool"_a, "block_tables"_a, "q_starts"_a,
        "kv_lens"_a, "scale"_a, "window"_a, "softcap"_a, "sinks"_a.none(), "kv_bits"_a);
  bind_decoder(m);
  bind_experts(m);
  bind_training(m);
}
