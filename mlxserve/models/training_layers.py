"""The layers of a model that trains, on kernels with gradients. As in ``layers``, a layer changes its class
in place: parameters, names and attributes stay, so that adapters and optimizers find them."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from mlxserve.models.experts import expert_weights, mlx_lm_name, use_expert_kernels
from mlxserve.models.layers import (
    KERNEL_CLASSES,
    KernelEmbedding,
    KernelQuantizedEmbedding,
    KernelQuantizedLinear,
    TiledEmbedding,
    TiledLinear,
)
from mlxserve.models.rope_table import rope_table
from mlxserve_kernels import ops
from mlxserve_kernels.decoder import Rope
from mlxserve_kernels.experts import Activation, ExpertWeights

_GATED: dict[str, Activation] = {
    "gemma.MLP": "gelu",
    "gemma2.MLP": "gelu_tanh",
    "gemma3_text.MLP": "gelu_tanh",
    "granite.MLP": "silu",
    "llama.MLP": "silu",
    "olmo2.MLP": "silu",
    "phi3.MLP": "silu",
    "qwen2.MLP": "silu",
    "qwen2_moe.MLP": "silu",
    "qwen3.MLP": "silu",
    "qwen3_moe.MLP": "silu",
}
"""Gated blocks by file and class: gate_proj and up_proj, or gate_up_proj, then down_proj."""

_OFFSET_NORMS = ("gemma.RMSNorm", "gemma2.RMSNorm", "gemma3_text.RMSNorm")
"""Norms whose weight is an offset from 1."""

_EXPERT_ACTIVATIONS: dict[str, Activation] = {
    "switch_layers.SwiGLU": "silu",
    "gemma4_text.GeGLU": "gelu_tanh",
}


def use_training_layers(model: nn.Module) -> None:
    """Put every layer of ``model`` that we know on kernels with gradients; the others stay as they are."""
    for _, module in model.named_modules():
        _untile(module)
        original = getattr(type(module), "expert_class", None)
        if original is not None:
            # Serving's routing has no gradient.
            module.__class__ = original
        if mlx_lm_name(type(module)) in ("switch_layers.SwitchLinear", "switch_layers.QuantizedSwitchLinear"):
            use_expert_kernels(module)
            continue
        replacement = _replacement(module)
        if replacement is not None:
            module.__class__ = replacement
        if isinstance(module, KernelEmbedding | KernelQuantizedEmbedding):
            object.__setattr__(module, "activation_dtype", mx.float32)


def _replacement(module: nn.Module) -> type[nn.Module] | None:
    kind: Any = type(module)
    if kind in KERNEL_CLASSES:
        return KERNEL_CLASSES[kind]
    if kind in _TRAINING_CLASSES:
        return _TRAINING_CLASSES[kind]
    name = mlx_lm_name(kind)
    if name in _GATED:
        return _gated_class(kind, _GATED[name])
    if name in _OFFSET_NORMS:
        return _offset_norm_class(kind)
    table = rope_table(module)
    if table is not None:
        object.__setattr__(module, "rope_table", table)
        return _rope_class(kind)
    return None


def _untile(layer: nn.Module) -> None:
    """Weights in tiles, which have no fast gradient, become plain ones again."""
    if "tiles" not in layer:
        return
    tiles = layer["tiles"]
    parts = ops.unpack_tiles(
        tiles.reshape(-1, *tiles.shape[-2:]),
        group_size=layer.group_size,
        bits=layer.bits,
        scale_dtype=layer.scale_dtype,
    )
    del layer["tiles"]
    if type(layer) is TiledLinear:
        layer.__class__ = KernelQuantizedLinear
    elif type(layer) is TiledEmbedding:
        layer.__class__ = KernelQuantizedEmbedding
    for name, part in zip(("weight", "scales", "biases"), parts, strict=True):
        layer[name] = part.reshape(*tiles.shape[:-3], -1, part.shape[-1])


class TrainingDropout(nn.Dropout):
    """``Dropout`` whose mask ``draw_dropout`` decides, so that blocks that are computed again in the backward
    drop the same values."""

    def __call__(self, x: mx.array) -> mx.array:
        if self._p_1 == 1 or not self.training:
            return x
        key: mx.array | None = getattr(self, "key", None)
        mask = mx.random.bernoulli(self._p_1, x.shape, key=key)
        return (mask * x * (1 / self._p_1)).astype(x.dtype)


def draw_dropout(model: nn.Module) -> None:
    """A new mask for every dropout in use, from mlx's random state."""
    layers = [m for m in model.modules() if isinstance(m, TrainingDropout) and m.training and m._p_1 < 1]
    if not layers:
        return
    keys = mx.random.randint(0, 1 << 31, (len(layers), 2), dtype=mx.int64).astype(mx.uint32)
    for layer, key in zip(layers, keys, strict=True):
        # No parameter: neither saved nor trained.
        object.__setattr__(layer, "key", key)


class TrainingLoRALinear(LoRALinear):
    """``LoRALinear``: base and adapter are one operation, but with dropout."""

    def __call__(self, x: mx.array) -> mx.array:
        y = _adapted(self.linear, x, self.lora_a, self.lora_b, self.scale, self.dropout)
        return y + self.linear["bias"] if "bias" in self.linear else y


class TrainingDoRALinear(DoRALinear):
    """``DoRALinear`` (Liu et al. 2024, arXiv:2402.09353)."""

    def __call__(self, x: mx.array) -> mx.array:
        y = _adapted(self.linear, x, self.lora_a, self.lora_b, self.scale, self.dropout)
        change = ops.matmul(self.lora_b.T, self.lora_a.T)
        norms = mx.linalg.norm(self._dequantized_weight() + self.scale * change, axis=1)
        y = (self.m / mx.stop_gradient(norms)).astype(x.dtype) * y
        return y + self.linear["bias"] if "bias" in self.linear else y


class TrainingLoRAEmbedding(LoRAEmbedding):
    """``LoRAEmbedding``."""

    def __call__(self, x: mx.array) -> mx.array:
        y = self.embedding(x)
        return y + (self.scale * self.dropout(ops.matmul(self.lora_a[x], self.lora_b))).astype(y.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return _adapted(self.embedding, x, self.lora_b.T, self.lora_a.T, self.scale, self.dropout)


class TrainingLoRASwitchLinear(LoRASwitchLinear):
    """``LoRASwitchLinear``, for rows x [..., M, K] as mlx-lm's layers hand them on; ``of_pairs`` for a row of
    x [..., K], or one a choice [..., top_k, K]."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if x.shape[:-2] == (*indices.shape[:-1], 1) and x.shape[-2] == 1:
            return self.of_pairs(x.squeeze((-2, -3)), indices)[..., None, :]
        if x.shape[-2] == 1 and x.shape[:-2] == indices.shape:
            return self.of_pairs(x.squeeze(-2), indices)[..., None, :]
        return super().__call__(x, indices, sorted_indices)

    def of_pairs(self, x: mx.array, ids: mx.array) -> mx.array:
        inner = ops.gather_matmul(self.dropout(x), ids, ExpertWeights(self.lora_a))
        change = ops.gather_matmul(inner, ids, ExpertWeights(self.lora_b))
        return _expert_product(self.linear, x, ids) + (self.scale * change).astype(x.dtype)


class TrainingSwitchGLU(SwitchGLU):
    """``SwitchGLU``: no sorting of rows, which our kernels do."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        ids = mx.stop_gradient(indices)
        gate, up, down = (self[name] for name in ("gate_proj", "up_proj", "down_proj"))
        activation = _EXPERT_ACTIVATIONS.get(mlx_lm_name(type(self.activation)))
        weights = [expert_weights(layer) for layer in (gate, up, down)]
        # Weights that train have their gradients one product at a time.
        is_whole = not any("weight" in layer.trainable_parameters() for layer in (gate, up, down))
        if activation is not None and is_whole and all(w is not None and w.is_supported for w in weights):
            return ops.gated_experts(x, ids, *weights, activation=activation)  # type: ignore[arg-type]
        gates, ups = (_expert_product(layer, x, ids) for layer in (gate, up))
        if activation is None:
            inner = self.activation(ups, gates)
        elif activation == "silu":
            inner = ops.silu_mul(gates, ups)
        else:
            inner = ops.gelu_mul(gates, ups, approx="tanh")
        return _expert_product(down, inner, ids)


_TRAINING_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: TrainingDropout,
    LoRALinear: TrainingLoRALinear,
    DoRALinear: TrainingDoRALinear,
    LoRAEmbedding: TrainingLoRAEmbedding,
    LoRASwitchLinear: TrainingLoRASwitchLinear,
    SwitchGLU: TrainingSwitchGLU,
}


def _adapted(
    layer: nn.Module, x: mx.array, a: mx.array, b: mx.array, scale: float, dropout: nn.Dropout
) -> mx.array:
    """A frozen layer, without its bias, and what a low-rank adapter adds to it."""
    is_quantized = isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding)
    weights: dict[str, Any] = {}
    if is_quantized:
        weights = {
            "scales": layer["scales"],
            "biases": layer.get("biases"),
            "group_size": layer.group_size,
            "bits": layer.bits,
            "mode": layer.mode,
        }
    has_dropout = dropout.training and dropout._p_1 < 1
    if not has_dropout and "weight" not in layer.trainable_parameters():
        return ops.adapted_linear(x, a, b, scale, layer["weight"], **weights)
    if is_quantized:
        y = ops.quantized_matmul(x, layer["weight"], **weights)
    else:
        y = ops.linear(x, layer["weight"])
    return y + (scale * ops.matmul(ops.matmul(dropout(x), a), b)).astype(x.dtype)


def _expert_product(layer: nn.Module, x: mx.array, ids: mx.array) -> mx.array:
    """[..., top_k, N] of rows x [..., K], or one a choice [..., top_k, K]."""
    if isinstance(layer, TrainingLoRASwitchLinear):
        return layer.of_pairs(x, ids)
    weights = expert_weights(layer)
    if weights is not None:
        return ops.gather_matmul(x, ids, weights)
    rows = x[..., None, :] if x.ndim == ids.ndim + 1 else x[..., None, None, :]
    y: mx.array = layer(rows, ids).squeeze(-2)
    return y


@cache
def _gated_class(original: type[nn.Module], activation: Activation) -> type[nn.Module]:
    def call(self: Any, x: mx.array) -> mx.array:
        if "gate_up_proj" in self:
            gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        if activation == "silu":
            inner = ops.silu_mul(gate, up)
        else:
            inner = ops.gelu_mul(gate, up, approx="none" if activation == "gelu" else "tanh")
        y: mx.array = self.down_proj(inner)
        return y

    return type(original.__name__, (original,), {"__call__": call})


@cache
def _offset_norm_class(original: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, x: mx.array) -> mx.array:
        return ops.rms_norm(x, 1.0 + self["weight"], self.eps)

    return type(original.__name__, (original,), {"__call__": call})


@cache
def _rope_class(original: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, x: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        if options or not isinstance(offset, int) or x.ndim != 4:
            plain: mx.array = original.__call__(self, x, offset, **options)
            return plain
        table: Rope = self.rope_table
        return ops.rotate_heads(x, mx.arange(offset, offset + x.shape[2], dtype=mx.int32), table)

    return type(original.__name__, (original,), {"__call__": call})
