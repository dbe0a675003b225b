"""Trained low-rank changes beside frozen layers: mlx-lm's own layers, made from our seeds.

``lora_a`` [inputs, R] and ``lora_b`` [R, outputs]: ``y = W x + scale * (x A) B``
(https://arxiv.org/abs/2106.09685). Of experts, ``lora_a`` is [experts, R, inputs] and ``lora_b``
[experts, outputs, R]. DoRA (https://arxiv.org/abs/2402.09353) adds ``m`` [outputs], the length of each row of
the changed weight. All are float32, whatever the base is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from mlxserve.errors import UsageError

KINDS = ("lora_a", "lora_b", "m")
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
    keys = mx.random.split(mx.random.key(seed), len(paths))
    changed = []
    for path, key in zip(paths, keys, strict=True):
        layer = _make(path, modules[path], rank, scale, dropout, is_dora=is_dora)
        bound = 1 / math.sqrt(layer.lora_a.shape[-1] if layer.lora_a.ndim == 3 else layer.lora_a.shape[0])
        layer.lora_a = mx.random.uniform(-bound, bound, layer.lora_a.shape, key=key)
        layer.freeze()
        changed.append((path, layer))
    model.update_modules(tree_unflatten(changed))
    for _, layer in changed:
        layer.unfreeze(keys=list(KINDS), recurse=False)


def _make(path: str, base: Any, rank: int, scale: float, dropout: float, *, is_dora: bool) -> Any:
    options = {"r": rank, "scale": scale, "dropout": dropout}
    if isinstance(base, SwitchLinear | QuantizedSwitchLinear):
        if is_dora:
            raise UsageError(f"{path}: type dora does not train experts, use lora or other targets")
        return LoRASwitchLinear.from_base(base, **options)
    if not isinstance(base, nn.Linear | nn.QuantizedLinear):
        raise UsageError(f"{path}: a {type(base).__name__} is not trained by lora or dora, use type full")
    if not is_dora:
        return LoRALinear.from_base(base, **options)
    layer = DoRALinear.from_base(base, **options)
    # mlx-lm's own sizes are wrong where 32 is no multiple of the bits.
    layer.lora_a = mx.zeros((input_size(base), rank))
    return layer


def input_size(base: Any) -> int:
    """Inputs of a linear layer, quantized or not."""
    columns = int(base.weight.shape[-1])
    return columns * 32 // base.bits if isinstance(base, nn.QuantizedLinear) else columns


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
