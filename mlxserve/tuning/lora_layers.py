"""Layers with a trained low-rank change beside a frozen one, under mlx-lm's parameter names.

``lora_a`` [inputs, R] and ``lora_b`` [R, outputs]: ``y = W x + scale * (x A) B``
(https://arxiv.org/abs/2106.09685). Of experts, ``lora_a`` is [experts * R, inputs] and ``lora_b``
[experts, outputs, R], as mlx-lm keeps them. DoRA (https://arxiv.org/abs/2402.09353) adds ``m`` [outputs],
the length of each row of the changed weight. All are float32, whatever the base is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxserve.errors import UsageError
from mlxserve_kernels import ops

KINDS = {"lora_a", "lora_b", "m"}
"""Names of the parameters of an adapter."""


def layer_kinds(model: nn.Module) -> dict[str, str]:
    """Every layer that can get a low-rank change, by path: ``linear``, ``experts`` or ``embedding``."""
    kinds = {}
    for path, module in model.named_modules():
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
            kinds[path] = "experts"
        elif isinstance(module, nn.Linear | nn.QuantizedLinear):
            kinds[path] = "linear"
        elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            kinds[path] = "embedding"
    return kinds


def add_low_rank(
    model: nn.Module,
    paths: Sequence[str],
    *,
    rank: int,
    scale: float,
    dropout: float,
    is_dora: bool,
    seed: int,
) -> None:
    """Freezes a model and puts a trained change beside each of these layers. ``lora_a`` is uniform in
    ±1/sqrt(inputs), drawn from ``seed`` for each layer by itself; ``lora_b`` is zero.

    Raises UsageError for a kind of layer that has no such change.
    """
    model.freeze()
    modules = dict(model.named_modules())
    changed = []
    keys = mx.random.split(mx.random.key(seed), len(paths))
    for path, key in zip(paths, keys, strict=True):
        base = modules[path]
        make = _maker(path, base, is_dora=is_dora)
        changed.append((path, make(base, rank, scale, dropout, key)))
    model.update_modules(tree_unflatten(changed))
    for _, layer in changed:
        layer.unfreeze(keys=list(KINDS), recurse=False)


def _maker(path: str, base: nn.Module, *, is_dora: bool) -> type[Any]:
    if isinstance(base, SwitchLinear | QuantizedSwitchLinear):
        if is_dora:
            raise UsageError(f"{path}: type dora does not train experts, use lora or other targets")
        return LoRAExperts
    if isinstance(base, nn.Linear | nn.QuantizedLinear):
        return DoRALinear if is_dora else LoRALinear
    raise UsageError(f"{path}: a {type(base).__name__} is not trained by lora or dora, use type full")


def _dimensions(base: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer, quantized or not."""
    outputs, inputs = base.weight.shape
    if isinstance(base, nn.QuantizedLinear):
        inputs = inputs * 32 // base.bits
    return inputs, outputs


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Module, rank: int, scale: float, dropout: float, key: mx.array) -> None:
        super().__init__()
        inputs, outputs = _dimensions(base)
        bound = 1 / math.sqrt(inputs)
        self.linear = base
        self.dropout = nn.Dropout(p=dropout)
        self.scale = scale
        self.lora_a = mx.random.uniform(-bound, bound, (inputs, rank), key=key)
        self.lora_b = mx.zeros((rank, outputs))

    def change(self, x: mx.array) -> mx.array:
        """What the adapter adds, of the shape of the layer's output."""
        inner = ops.linear(self.dropout(x), self.lora_a.T)
        return self.scale * ops.linear(inner, self.lora_b.T)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        return y + self.change(x).astype(y.dtype)


class DoRALinear(LoRALinear):
    def __init__(self, base: nn.Module, rank: int, scale: float, dropout: float, key: mx.array) -> None:
        super().__init__(base, rank, scale, dropout, key)
        self._squares = mx.sum(mx.square(dense_weight(base)), axis=1)
        self.m = mx.sqrt(self._squares)

    def lengths(self) -> mx.array:
        """The length of each row of W + scale * (A B)^T, [outputs], from the product A^T W^T alone."""
        crossed = _without_bias(self.linear, self.lora_a.T) * self.lora_b
        own = self.lora_b * ((self.lora_a.T @ self.lora_a) @ self.lora_b)
        squares = self._squares + mx.sum(2 * self.scale * crossed + self.scale**2 * own, axis=0)
        return mx.sqrt(squares)

    def __call__(self, x: mx.array) -> mx.array:
        y = _without_bias(self.linear, x)
        changed = y + self.change(x).astype(y.dtype)
        # The lengths are constants for the gradient: section 4.3 of the paper.
        changed = (self.m / mx.stop_gradient(self.lengths())).astype(y.dtype) * changed
        return changed + self.linear.bias if "bias" in self.linear else changed


def _without_bias(base: Any, x: mx.array) -> mx.array:
    y = base(x)
    return y - base.bias if "bias" in base else y


def dense_weight(base: Any) -> mx.array:
    """The weight of a linear layer as float32 [outputs, inputs]."""
    if not isinstance(base, nn.QuantizedLinear | QuantizedSwitchLinear):
        return base.weight.astype(mx.float32)
    is_affine = base.get("biases") is not None
    values = mx.dequantize(
        base.weight,
        base.scales.astype(mx.float32) if is_affine else base.scales,
        base.biases.astype(mx.float32) if is_affine else None,
        group_size=base.group_size,
        bits=base.bits,
        mode=base.mode,
    )
    dense: mx.array = values.astype(mx.float32)
    return dense


class LoRAExperts(nn.Module):
    """Beside all experts of a projection: each token's change is that of the expert it is sent to."""

    def __init__(self, base: Any, rank: int, scale: float, dropout: float, key: mx.array) -> None:
        super().__init__()
        bound = 1 / math.sqrt(base.input_dims)
        self.linear = base
        self.dropout = nn.Dropout(p=dropout)
        self.scale = scale
        self.lora_a = mx.random.uniform(-bound, bound, (rank * base.num_experts, base.input_dims), key=key)
        self.lora_b = mx.zeros((base.num_experts, base.output_dims, rank))

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = self.linear(x, indices, sorted_indices=sorted_indices)
        num_experts, _, rank = self.lora_b.shape
        a = self.lora_a.reshape(num_experts, rank, -1)
        choice: dict[str, Any] = {"rhs_indices": indices, "sorted_indices": sorted_indices}
        z = mx.gather_mm(self.dropout(x), a.swapaxes(-1, -2), **choice)
        z = mx.gather_mm(z, self.lora_b.swapaxes(-1, -2), **choice)
        return y + (self.scale * z).astype(y.dtype)


def adapter_weights(model: nn.Module) -> dict[str, mx.array]:
    """The trained parameters by path."""
    return dict(tree_flatten(model.trainable_parameters()))


def load_adapter_weights(model: nn.Module, weights: Mapping[str, mx.array], where: str) -> None:
    """Puts trained parameters into a model that trains the very same. Raises UsageError with both names or
    shapes where they differ."""
    expected = adapter_weights(model)
    for name in sorted(expected.keys() - weights.keys()):
        raise UsageError(f"{where}: has no {name}, which this run trains: the layers or targets differ")
    for name in sorted(weights.keys() - expected.keys()):
        raise UsageError(f"{where}: has {name}, which this run does not train: the layers or targets differ")
    for name, value in weights.items():
        if value.shape != expected[name].shape:
            raise UsageError(
                f"{where}: {name} has shape {tuple(value.shape)}, this run's is {tuple(expected[name].shape)}"
            )
    model.load_weights(list(weights.items()), strict=False)
