"""mlx-lm's layers with experts on our kernels. As the standard layers do (``layers``), they change their
class in place and keep weights, names and attributes.

What the kernels do not read (other formats, other activations) takes mlx-lm's own path; where neither the
extension nor a stack op by op runs, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve_kernels import ops
from mlxserve_kernels.dispatch import decoder_kind, extension
from mlxserve_kernels.experts import Activation, ExpertWeights

_ACTIVATIONS: dict[str, Activation] = {"switch_layers.SwiGLU": "silu", "gemma4_text.GeGLU": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Router:
    """How a block chooses: ``ops.route`` on the outputs of ``layer``."""

    layer: nn.Module
    top_k: int
    is_normalized: bool


_ROUTERS: dict[str, Callable[[Any], Router]] = {
    "granitemoe.GraniteMoeMoE": lambda block: Router(block.router.layer, block.router.top_k, True),
    "mixtral.MixtralSparseMoeBlock": lambda block: Router(block.gate, block.num_experts_per_tok, True),
    "olmoe.OlmoeSparseMoeBlock": lambda block: Router(block.gate, block.top_k, block.norm_topk_prob),
    "qwen2_moe.Qwen2MoeSparseMoeBlock": lambda block: Router(block.gate, block.top_k, False),
    "qwen3_moe.Qwen3MoeSparseMoeBlock": lambda block: Router(block.gate, block.top_k, block.norm_topk_prob),
}
"""Blocks that are a router, ``switch_mlp`` and at most a shared expert. Mixtral and Granite take the softmax
over the chosen logits, which is the normalised one over all."""


def use_expert_kernels(module: nn.Module) -> None:
    """Put a layer with experts on our kernels; every other module stays as it is."""
    call = _CALLS.get(mlx_lm_name(type(module)))
    if call is not None and (extension() is not None or decoder_kind() == "ops"):
        module.__class__ = _kernel_class(type(module), call)


def is_switch_linear(module: nn.Module) -> bool:
    """Whether this is a dense layer of experts on our kernels, which may be narrower than activations."""
    return _original_name(module) == "switch_layers.SwitchLinear"


def is_quantized_switch_linear(module: nn.Module) -> bool:
    """Whether this is a quantized layer of experts on our kernels."""
    return _original_name(module) == "switch_layers.QuantizedSwitchLinear"


def expert_weights(layer: nn.Module) -> ExpertWeights | None:
    """The weights of a layer of experts; None for another kind of layer."""
    if is_switch_linear(layer):
        return ExpertWeights(layer["weight"], bias=layer.get("bias"))
    if not is_quantized_switch_linear(layer):
        return None
    if "tiles" in layer:
        return ExpertWeights(
            layer["tiles"],
            group_size=layer.group_size,
            bits=layer.bits,
            bias=layer.get("bias"),
            scale_dtype=layer.scale_dtype,
        )
    return ExpertWeights(
        layer["weight"],
        layer["scales"],
        layer.get("biases"),
        layer.group_size,
        layer.bits,
        layer.mode,
        layer.get("bias"),
    )


def put_in_tiles(layer: nn.Module) -> bool:
    """Replace the affine weights of a quantized layer, of experts or not, by tiles where the kernels take
    them so. Needs float32 activations; the layer's own arrays are let go."""
    weight, scales, biases = layer["weight"], layer["scales"], layer.get("biases")
    if not ops.can_tile(
        scales, biases, weight.shape[-2], group_size=layer.group_size, bits=layer.bits, mode=layer.mode
    ):
        return False
    rows = (part.reshape(-1, part.shape[-1]) for part in (weight, scales, biases))
    tiles = ops.pack_tiles(*rows, group_size=layer.group_size, bits=layer.bits)
    layer["tiles"] = tiles.reshape(*weight.shape[:-2], -1, *tiles.shape[1:])
    object.__setattr__(layer, "scale_dtype", scales.dtype)
    for name in ("weight", "scales", "biases"):
        del layer[name]
    return True


@dataclass(frozen=True, slots=True)
class GatedExperts:
    """The parts of a SwitchGLU, all of them readable by the kernels."""

    gate: ExpertWeights
    up: ExpertWeights
    down: ExpertWeights
    activation: Activation


def gated_experts(layer: nn.Module) -> GatedExperts | None:
    """The parts of a SwitchGLU that the kernels run; None where they do not."""
    if _original_name(layer) != "switch_layers.SwitchGLU":
        return None
    activation = _ACTIVATIONS.get(mlx_lm_name(type(layer.activation)))
    gate, up, down = (expert_weights(layer[name]) for name in ("gate_proj", "up_proj", "down_proj"))
    if activation is None or gate is None or up is None or down is None:
        return None
    if not (gate.is_supported and up.is_supported and down.is_supported):
        return None
    if (gate.scale_dtype is None) != (up.scale_dtype is None):
        return None
    return GatedExperts(gate, up, down, activation)


def router(block: nn.Module) -> Router | None:
    """How a block with experts chooses; None for blocks of other kinds."""
    find = _ROUTERS.get(_original_name(block))
    if find is None or block.get("sharding_group") is not None:
        return None
    return find(block)


def mlx_lm_name(kind: type) -> str:
    """File and class of an mlx-lm class: ``mixtral.MixtralSparseMoeBlock``; empty for others."""
    prefix = "mlx_lm.models."
    if not kind.__module__.startswith(prefix):
        return ""
    return f"{kind.__module__.removeprefix(prefix)}.{kind.__name__}"


_Call = Callable[..., mx.array]


def _kernel_class(original: type[nn.Module], call: Callable[[_Call], _Call]) -> type[nn.Module]:
    return type(
        original.__name__, (original,), {"__call__": call(original.__call__), "expert_class": original}
    )


def _original_name(module: nn.Module) -> str:
    original = getattr(type(module), "expert_class", None)
    return "" if original is None else mlx_lm_name(original)


def _switch_linear(plain: _Call) -> _Call:
    def call(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        weights = expert_weights(self)
        if weights is None or not weights.is_supported or x.dtype != mx.float32:
            return plain(self, x, indices, sorted_indices)
        # x [..., M, K] goes with ids [...]; the kernel takes a row for the last axis of ids or for each id.
        if x.shape[-2] == 1 and x.shape[:-2] == (*indices.shape[:-1], 1):
            return ops.gather_matmul(x.squeeze((-2, -3)), indices, weights)[..., None, :]
        shape = (*mx.broadcast_shapes(x.shape[:-2], indices.shape), x.shape[-2])
        rows = mx.broadcast_to(x, (*shape, x.shape[-1]))
        return ops.gather_matmul(rows, mx.broadcast_to(indices[..., None], shape), weights)

    return call


def _switch_glu(plain: _Call) -> _Call:
    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        parts = gated_experts(self)
        if parts is None or x.dtype != mx.float32:
            return plain(self, x, indices)
        return ops.gated_experts(x, indices, parts.gate, parts.up, parts.down, activation=parts.activation)

    return call


def _routed_block(plain: _Call) -> _Call:
    def call(self: Any, x: mx.array) -> mx.array:
        parts, how = gated_experts(self.switch_mlp), router(self)
        if parts is None or how is None or x.dtype != mx.float32:
            return plain(self, x)
        ids, shares = ops.route(how.layer(x), how.top_k, is_normalized=how.is_normalized)
        y = ops.gated_experts(
            x, ids, parts.gate, parts.up, parts.down, activation=parts.activation, shares=shares
        )
        if "shared_expert" in self:
            y = y + mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return y

    return call


_CALLS: dict[str, Callable[[_Call], _Call]] = {
    "switch_layers.SwitchLinear": _switch_linear,
    "switch_layers.QuantizedSwitchLinear": _switch_linear,
    "switch_layers.SwitchGLU": _switch_glu,
    **dict.fromkeys(_ROUTERS, _routed_block),
}
