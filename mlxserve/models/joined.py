"""Layers that read the same rows, as one product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.models.layers import KernelLinear, KernelQuantizedLinear

_ARRAYS = ("weight", "scales", "biases", "bias")


def join_layers(layers: Sequence[nn.Module]) -> dict[str, mx.array] | None:
    """The arrays of all layers behind each other, by name, evaluated; those of the layers become slices of
    them, on the same memory. None, and nothing has changed, where the layers are not ours or differ in more
    than their number of outputs."""
    first = layers[0]
    if type(first) not in (KernelLinear, KernelQuantizedLinear):
        return None
    if any(_format(layer) != _format(first) for layer in layers):
        return None
    ends = list(accumulate(int(layer["weight"].shape[0]) for layer in layers))
    joined = {}
    for name in _ARRAYS:
        if name not in first:
            continue
        joined[name] = mx.concatenate([layer[name] for layer in layers])
        parts = mx.split(joined[name], ends[:-1])
        mx.eval(joined[name], parts)
        for layer, part in zip(layers, parts, strict=True):
            layer[name] = part
    mx.clear_cache()
    return joined


def _format(layer: nn.Module) -> tuple[Any, ...]:
    arrays = [(name, layer[name].dtype, layer[name].shape[1:]) for name in _ARRAYS if name in layer]
    return (type(layer), arrays, *(getattr(layer, name, None) for name in ("group_size", "bits", "mode")))
