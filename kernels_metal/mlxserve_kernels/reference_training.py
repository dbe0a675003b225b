"""The twins of ``ops.training`` in plain mlx ops. Shapes, dtypes and errors are those of the ops."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlxserve_kernels import reference
from mlxserve_kernels.decoder import Rope


def matmul(x: mx.array, w: mx.array) -> mx.array:
    return (x @ w).astype(x.dtype)


def adapted_linear(
    x: mx.array,
    a: mx.array,
    b: mx.array,
    scale: float,
    w: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    group_size: int = 0,
    bits: int = 0,
    mode: str = "affine",
) -> mx.array:
    if scales is None:
        y = reference.linear(x, w)
    else:
        y = reference.quantized_matmul(x, w, scales, biases, group_size=group_size, bits=bits, mode=mode)
    return y + (scale * ((x @ a) @ b)).astype(x.dtype)


def rotate_heads(x: mx.array, positions: mx.array, rope: Rope) -> mx.array:
    rows, heads, length, dim = x.shape
    flat = x.transpose(0, 2, 1, 3).reshape(rows * length, heads, dim)
    at = mx.broadcast_to(positions, (rows, length)).reshape(-1)
    return reference.rotate(flat, at, rope).reshape(rows, length, heads, dim).transpose(0, 2, 1, 3)


def causal_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    segments: mx.array | None = None,
) -> mx.array:
    rows, heads, length, dim = q.shape
    groups = heads // k.shape[1]
    scores = (q * scale).reshape(rows, -1, groups, length, dim) @ k[:, :, None].swapaxes(-1, -2)
    if softcap is not None:
        scores = mx.tanh(scores / softcap) * softcap
    at = mx.arange(length)
    is_seen = at[:, None] >= at
    if window is not None:
        is_seen = is_seen & (at[:, None] < at + window)
    if segments is not None:
        is_new = segments[:, 1:] != segments[:, :-1]
        run = mx.cumsum(mx.concatenate([mx.zeros((rows, 1)), is_new.astype(mx.float32)], axis=1), axis=1)
        is_seen = (is_seen & (run[:, :, None] == run[:, None]))[:, None, None]
    shares = mx.softmax(mx.where(is_seen, scores, -mx.inf), axis=-1, precise=True)
    return (shares @ v[:, :, None]).reshape(rows, heads, length, v.shape[-1])


def cross_entropy_head(
    hidden: mx.array,
    targets: mx.array,
    weights: mx.array,
    w: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    group_size: int = 0,
    bits: int = 0,
    mode: str = "affine",
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> mx.array:
    if scales is None:
        logits = reference.linear(hidden, w)
    else:
        logits = reference.quantized_matmul(
            hidden, w, scales, biases, group_size=group_size, bits=bits, mode=mode
        )
    logits = logits.astype(mx.float32) * logit_scale
    if softcap is not None:
        logits = mx.tanh(logits / softcap) * softcap
    return mx.sum(nn.losses.cross_entropy(logits, targets) * weights)
