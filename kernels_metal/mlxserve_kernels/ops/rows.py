"""Norms and gated activations, row by row."""

from __future__ import annotations

from typing import Literal, overload

import mlx.core as mx

from mlxserve_kernels import reference
from mlxserve_kernels.dispatch import FLOAT_TYPES, extension, metal
from mlxserve_kernels.experts import Activation
from mlxserve_kernels.metal_kernels.norms import takes_add_rms_norm


@overload
def rms_norm(x: mx.array, weight: mx.array | None, eps: float, residual: None = None) -> mx.array: ...


@overload
def rms_norm(
    x: mx.array, weight: mx.array | None, eps: float, residual: mx.array
) -> tuple[mx.array, mx.array]: ...


def rms_norm(
    x: mx.array, weight: mx.array | None, eps: float, residual: mx.array | None = None
) -> mx.array | tuple[mx.array, mx.array]:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last axis: x [..., K], weight [K] or None (ones).
    With a residual, of the shape and dtype of x, the norm of ``x + residual``, and that sum as well.

    >>> rms_norm(mx.array([[3.0, 3.0]]), mx.array([1.0, 2.0]), 0.0).tolist()
    [[1.0, 2.0]]
    >>> normed, total = rms_norm(mx.array([[3.0, 3.0]]), None, 0.0, mx.array([[1.0, 1.0]]))
    >>> normed.tolist(), total.tolist()
    ([[1.0, 1.0]], [[4.0, 4.0]])
    """
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"rms_norm: residual must be {x.dtype} {list(x.shape)} as x is, "
            f"got {residual.dtype} {list(residual.shape)}"
        )
    if residual is not None and weight is not None:
        kernels = metal("add_rms_norm")
        if kernels is not None and takes_add_rms_norm(x, weight):
            return kernels.norms.add_rms_norm(x, residual, weight, eps)
    cpu = extension()
    is_read = x.dtype in FLOAT_TYPES and (weight is None or weight.dtype in FLOAT_TYPES)
    if cpu is None or not is_read:
        return reference.rms_norm(x, weight, eps, residual)
    y: mx.array | tuple[mx.array, mx.array] = (
        cpu.rms_norm(x, weight, eps) if residual is None else cpu.add_rms_norm(x, residual, weight, eps)
    )
    return y


def silu_mul(gate: mx.array, up: mx.array) -> mx.array:
    """``gate * sigmoid(gate) * up`` of equal shapes and dtypes.

    >>> silu_mul(mx.array([0.0]), mx.array([2.0])).tolist()
    [0.0]
    """
    return gated(gate, up, "silu")


def gelu_mul(gate: mx.array, up: mx.array, *, approx: Literal["none", "tanh"]) -> mx.array:
    """``gelu(gate) * up`` of equal shapes and dtypes: with ``none`` gelu is
    ``z * (1 + erf(z / sqrt(2))) / 2``, with ``tanh`` its approximation by tanh, as ``nn.gelu`` and
    ``nn.gelu_approx`` have them.

    >>> gelu_mul(mx.array([0.0, 100.0]), mx.array([2.0, 2.0]), approx="tanh").tolist()
    [0.0, 200.0]
    """
    if approx not in ("none", "tanh"):
        raise ValueError(f"gelu_mul: approx must be none or tanh, got {approx!r}")
    return gated(gate, up, "gelu" if approx == "none" else "gelu_tanh")


def gated(gate: mx.array, up: mx.array, activation: Activation) -> mx.array:
    """``activation(gate) * up`` by the activation's name."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate and up must have one shape and dtype, got {gate.dtype} {list(gate.shape)} and "
            f"{up.dtype} {list(up.shape)}"
        )
    cpu = extension()
    if cpu is None or gate.dtype not in FLOAT_TYPES:
        return reference.gated(gate, up, activation)
    y: mx.array = cpu.gated(gate, up, getattr(cpu.Activation, activation))
    return y
