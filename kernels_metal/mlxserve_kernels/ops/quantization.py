"""Floats to quantized weights."""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels import reference
from mlxserve_kernels.dispatch import FLOAT_TYPES, extension

SEARCH_EFFORT = 6
"""Ranges tried for each group: more of them win little."""


def quantize(
    x: mx.array,
    *,
    group_size: int,
    bits: int,
    mode: str = "affine",
    effort: int = 0,
    importance: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Words, scales and biases of x [..., K], K a multiple of the group, in MLX's layout of the mode: uint32
    [..., K * bits / 32], then [..., K / group_size] in the dtype of x (uint8 and no biases but for affine).

    With an effort of 0 the bits are those of ``mx.quantize``, where x is finite; in affine modes also
    where it is not: NaN becomes code 0, a group with an infinity gets NaN for a scale. Scales of the mx modes
    below ``2 ** -126`` become that (``mx.quantize`` wraps what a byte has no room for).

    With an effort (affine only) each group takes, of so many ranges and the lines of least squares that they
    lead to, the one whose stored numbers have the least sum of squared errors, never more than without;
    ``importance``, float32 [K] and not negative, weighs the columns, by the mean square of what they meet for
    example.

    >>> w, scales, biases = quantize(mx.arange(64.0).reshape(2, 32), group_size=32, bits=8)
    >>> mx.dequantize(w, scales, biases, group_size=32, bits=8)[1, -1].item()
    63.0
    """
    if importance is not None and not effort:
        raise ValueError("quantize: importance is for searches alone, effort is 0")
    if effort and mode != "affine":
        raise ValueError(f"quantize: only affine modes are searched, mode is {mode}")
    cpu = extension()
    if cpu is None or x.dtype not in FLOAT_TYPES:
        return reference.quantize(
            x, group_size=group_size, bits=bits, mode=mode, effort=effort, importance=importance
        )
    words, scales, *biases = cpu.quantize(x, group_size, bits, mode, effort, importance)
    return words, scales, biases[0] if biases else None
