"""Layers of experts."""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels import reference
from mlxserve_kernels.dispatch import FLOAT_TYPES, extension, metal
from mlxserve_kernels.experts import Activation, ExpertWeights
from mlxserve_kernels.metal_kernels.weights import MAX_TILE_ROWS


def gather_matmul(x: mx.array, ids: mx.array, weights: ExpertWeights) -> mx.array:
    """The product of each row with the matrix of each of its experts: ``y[..., j, :]`` is that with expert
    ``ids[..., j]``.

    ids int32 or uint32 [..., top_k], from 0 to E - 1; x [..., K], or one row a choice, [..., top_k, K].
    Returns [..., top_k, N] in the dtype of x; with the extension the bits of ``quantized_matmul`` and
    ``linear``. Each expert's weights are read once, whatever the number of its rows.

    >>> experts = ExpertWeights(mx.ones((4, 2, 8)) * mx.arange(4)[:, None, None])
    >>> gather_matmul(mx.ones((1, 8)), mx.array([[3, 0]], dtype=mx.int32), experts).tolist()
    [[[24.0, 24.0], [0.0, 0.0]]]
    """
    kernels = metal("gather_matmul")
    if kernels is not None and _has_kernels(x, ids, weights):
        return kernels.experts.gather_matmul(x, ids, weights)
    cpu = extension()
    if cpu is None or x.dtype not in FLOAT_TYPES or not weights.is_supported:
        return reference.gather_matmul(x, ids, weights)
    y: mx.array = cpu.gather_matmul(x, ids, weights.native(cpu))
    return y


def gated_experts(
    x: mx.array,
    ids: mx.array,
    gate: ExpertWeights,
    up: ExpertWeights,
    down: ExpertWeights,
    *,
    activation: Activation = "silu",
    shares: mx.array | None = None,
) -> mx.array:
    """``down(activation(gate(x)) * up(x))`` by each expert of each row: [..., top_k, N]. With ``shares``
    (float32, of the shape of ids) their sum times these, in the order of ids: [..., N].

    x [..., K], ids as in ``gather_matmul``; gate and up [E, M, K], down [E, N, M]. ``silu`` is
    ``z * sigmoid(z)``, ``gelu_tanh`` as ``nn.gelu_approx`` has it, ``gelu`` as ``nn.gelu``. Returns the dtype
    of x.

    >>> ones = ExpertWeights(mx.ones((2, 4, 4)))
    >>> gated_experts(mx.ones((3, 4)), mx.zeros((3, 2), dtype=mx.int32), ones, ones, ones).shape
    (3, 2, 4)
    """
    kernels = metal("gated_experts")
    if kernels is not None and _has_kernels(x, ids, gate, up, down) and _are_alike(gate, up):
        return kernels.experts.gated_experts(x, ids, gate, up, down, activation=activation, shares=shares)
    cpu = extension()
    is_read = gate.is_supported and up.is_supported and down.is_supported
    is_float = x.dtype in FLOAT_TYPES and (shares is None or shares.dtype == mx.float32)
    if cpu is None or not is_float or not is_read:
        return reference.gated_experts(x, ids, gate, up, down, activation=activation, shares=shares)
    y: mx.array = cpu.gated_experts(
        x,
        ids,
        shares,
        gate.native(cpu),
        up.native(cpu),
        down.native(cpu),
        getattr(cpu.Activation, activation),
    )
    return y


def _has_kernels(x: mx.array, ids: mx.array, *weights: ExpertWeights) -> bool:
    """Whether the Metal kernels, for few rows and quantized weights, take these."""
    is_few = 0 < ids.size <= MAX_TILE_ROWS * ids.shape[-1]
    is_quantized = all(w.is_supported and w.scales is not None and w.scale_dtype is None for w in weights)
    return x.dtype in FLOAT_TYPES and is_few and is_quantized


def _are_alike(gate: ExpertWeights, up: ExpertWeights) -> bool:
    """Whether one kernel reads both."""
    first, second = (
        (e.w.shape, e.scales is None or e.scales.dtype, e.group_size, e.bits, e.mode, e.bias is None)
        for e in (gate, up)
    )
    return first == second


def route(logits: mx.array, top_k: int, *, is_normalized: bool) -> tuple[mx.array, mx.array]:
    """The ``top_k`` largest of each row, largest first and of equal ones the first: their ids, int32
    [..., top_k], and shares, [..., top_k] in the dtype of logits [..., E]: their part of the softmax over the
    row, or, ``is_normalized``, over the chosen. The shares of a row with a NaN are NaN.

    >>> ids, shares = route(mx.array([[0.0, 3.0, 3.0]]), 2, is_normalized=True)
    >>> ids.tolist(), shares.tolist()
    ([[1, 2]], [[0.5, 0.5]])
    """
    cpu = extension()
    if cpu is None or logits.dtype != mx.float32:
        return reference.route(logits, top_k, is_normalized=is_normalized)
    result: tuple[mx.array, mx.array] = cpu.route(logits, top_k, is_normalized)
    return result
