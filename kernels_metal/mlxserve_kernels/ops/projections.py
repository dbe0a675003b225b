"""Products with the projections of decoder layers."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlxserve_kernels.decoder import Projection
from mlxserve_kernels.dispatch import TILE_ROWS
from mlxserve_kernels.experts import Activation
from mlxserve_kernels.ops.products import linear, quantized_matmul
from mlxserve_kernels.ops.rows import gated
from mlxserve_kernels.ops.tiles import tiled_matmul


def project(x: mx.array, projection: Projection) -> mx.array:
    """``x @ dequantize(w).T + bias``, x [..., K]: ``quantized_matmul``, ``linear`` or ``tiled_matmul`` with
    the rows of the weight that the projection names; returns [..., N] in the dtype of x.

    >>> project(mx.ones((3, 8)), Projection(mx.ones((6, 8)), begin=2, end=6)).shape
    (3, 4)
    """
    part = own_rows(projection)
    if part.scale_dtype is not None:
        y = tiled_matmul(x, part.w, group_size=part.group_size, bits=part.bits, scale_dtype=part.scale_dtype)
    elif part.scales is None:
        y = linear(x, part.w)
    else:
        y = quantized_matmul(
            x,
            part.w,
            part.scales,
            part.biases,
            group_size=part.group_size,
            bits=part.bits,
            mode=part.mode,
        )
    return y if part.bias is None else y + part.bias.astype(x.dtype)


def own_rows(projection: Projection) -> Projection:
    """The same with arrays that are just its rows: slices of those of the whole weight, on their memory."""
    begin, end = projection.begin, projection.begin + projection.num_outputs
    if begin == 0 and end == projection.num_rows:
        return projection
    unit = 1 if projection.scale_dtype is None else TILE_ROWS

    def rows(array: mx.array | None) -> mx.array | None:
        return None if array is None else array[begin // unit : end // unit]

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
    return gated(project(x, gate), project(x, up), activation)
