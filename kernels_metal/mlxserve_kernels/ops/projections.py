"""Products with the projections of decoder layers."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlxserve_kernels.decoder import Projection
from mlxserve_kernels.dispatch import TILE_ROWS
from mlxserve_kernels.experts import Activation
from mlxserve_kernels.metal_kernels.weights import QuantizedWeight
from mlxserve_kernels.ops.products import linear, metal_for, quantized_matmul
from mlxserve_kernels.ops.rows import gated
from mlxserve_kernels.ops.tiles import tiled_matmul

ALIGNMENT = 16
"""Bytes at a multiple of which the arrays of Metal kernels start."""


def project(x: mx.array, projection: Projection) -> mx.array:
    """``x @ dequantize(w).T + bias``, x [..., K]: ``quantized_matmul``, ``linear`` or ``tiled_matmul`` with
    the rows of the weight that the projection names; returns [..., N] in the dtype of x.

    >>> project(mx.ones((3, 8)), Projection(mx.ones((6, 8)), begin=2, end=6)).shape
    (3, 4)
    """
    part = own_rows(projection)
    kernels = metal_for("quantized_matmul", x)
    if kernels is not None and part.scales is not None and part.is_supported:
        return kernels.matmul.quantized_matmul(
            x,
            part.w,
            part.scales,
            part.biases,
            group_size=part.group_size,
            bits=part.bits,
            mode=part.mode,
            bias=part.bias,
        )
    y = _without_bias(x, part)
    return y if part.bias is None else y + part.bias.astype(x.dtype)


def _without_bias(x: mx.array, part: Projection) -> mx.array:
    if part.scale_dtype is not None:
        return tiled_matmul(
            x, part.w, group_size=part.group_size, bits=part.bits, scale_dtype=part.scale_dtype
        )
    if part.scales is None:
        return linear(x, part.w)
    return quantized_matmul(
        x,
        part.w,
        part.scales,
        part.biases,
        group_size=part.group_size,
        bits=part.bits,
        mode=part.mode,
    )


def own_rows(projection: Projection) -> Projection:
    """The same with arrays that are just its rows: slices of those of the whole weight, on their memory where
    they start as Metal kernels want it."""
    begin, end = projection.begin, projection.begin + projection.num_outputs
    if begin == 0 and end == projection.num_rows:
        return projection
    unit = 1 if projection.scale_dtype is None else TILE_ROWS

    def rows(array: mx.array | None) -> mx.array | None:
        if array is None:
            return None
        part = array[begin // unit : end // unit]
        offset = begin // unit * array.nbytes // array.shape[0]
        is_copied = offset % ALIGNMENT != 0 and part.shape[0] > 1
        return mx.concatenate([part[:1], part[1:]]) if is_copied else part

    w = rows(projection.w)
    assert w is not None
    return replace(
        projection,
        w=w,
        scales=rows(projection.scales),
        biases=rows(projection.biases),
        bias=None if projection.bias is None else projection.bias[begin:end],
        begin=0,
        end=None,
    )


def gate_up(x: mx.array, gate: Projection, up: Projection, *, activation: Activation) -> mx.array:
    """``activation(project(x, gate)) * project(x, up)``: x [..., K], returns [..., N] in the dtype of x.

    >>> ones = Projection(mx.ones((4, 8)))
    >>> gate_up(mx.zeros((3, 8)), ones, ones, activation="silu").shape
    (3, 4)
    """
    kernels = metal_for("gate_up", x)
    if kernels is not None:
        parts = [own_rows(gate), own_rows(up)]
        weights = [_quantized(part) for part in parts]
        if weights[0] is not None and weights[1] is not None and _are_alike(*parts):
            return kernels.matmul.gate_up(
                x,
                weights[0],
                weights[1],
                activation=activation,
                gate_bias=parts[0].bias,
                up_bias=parts[1].bias,
            )
    return gated(project(x, gate), project(x, up), activation)


def _quantized(part: Projection) -> QuantizedWeight | None:
    """As the Metal kernels take it; None where they do not."""
    if part.scales is None or not part.is_supported:
        return None
    return QuantizedWeight(part.w, part.scales, part.biases, part.group_size, part.bits, part.mode)


def _are_alike(gate: Projection, up: Projection) -> bool:
    """Whether one kernel reads both."""
    first, second = (
        (p.w.shape, p.scales is None or p.scales.dtype, p.group_size, p.bits, p.mode, p.bias is None)
        for p in (gate, up)
    )
    return first == second
