"""Products with dense and quantized weights."""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels import reference
from mlxserve_kernels.dispatch import FLOAT_TYPES, extension, metal, reads_quantized
from mlxserve_kernels.metal_kernels import MetalKernels
from mlxserve_kernels.metal_kernels.weights import MAX_TILE_ROWS


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    *,
    group_size: int,
    bits: int,
    mode: str = "affine",
    transpose: bool = True,
) -> mx.array:
    """``x @ dequantize(w).T``, or ``x @ dequantize(w)`` without ``transpose``.

    x [..., K], or [..., N]; w uint32 [N, K * bits / 32], the first value in the lowest bits; scales, biases
    [N, K / group_size]. Returns [..., N], or [..., K], in the dtype of x. A weight is ``scale * q + bias``,
    both steps in float32, as ``mx.dequantize`` gives it; sums are exact float32 fma. Each form is the other's
    gradient; neither makes a dequantized copy of w.
    Other bits, groups, modes and activation dtypes run ``mx.quantized_matmul``, whatever is selected.

    >>> w, scales, biases = mx.quantize(mx.random.normal((64, 128)), group_size=32, bits=4)
    >>> quantized_matmul(mx.ones((3, 128)), w, scales, biases, group_size=32, bits=4).shape
    (3, 64)
    >>> quantized_matmul(mx.ones((3, 64)), w, scales, biases, group_size=32, bits=4, transpose=False).shape
    (3, 128)
    """
    is_read = reads_quantized(scales, biases, group_size=group_size, bits=bits, mode=mode)
    is_read = is_read and x.dtype in FLOAT_TYPES and w.ndim == 2
    kernels = metal_for("quantized_matmul", x) if is_read and transpose else None
    if kernels is not None:
        return kernels.matmul.quantized_matmul(
            x, w, scales, biases, group_size=group_size, bits=bits, mode=mode
        )
    cpu = extension()
    if cpu is None or not is_read:
        return reference.quantized_matmul(
            x, w, scales, biases, group_size=group_size, bits=bits, mode=mode, transpose=transpose
        )
    y: mx.array = cpu.quantized_matmul(x, w, scales, biases, group_size, bits, mode, transpose)
    return y


def has_few_rows(x: mx.array) -> bool:
    """Whether there are 1 to MAX_TILE_ROWS rows of x [..., K]: what one pass over the weights serves."""
    return 0 < x.size <= MAX_TILE_ROWS * x.shape[-1]


def metal_for(name: str, x: mx.array) -> MetalKernels | None:
    """The Metal kernels, where the product called ``name`` may run for the rows of x. More than a tile of
    them are a matter of speed alone: for these ``many_rows`` must be allowed instead."""
    if x.size == 0:
        return None
    return metal(name if has_few_rows(x) else "many_rows")


def linear(x: mx.array, w: mx.array) -> mx.array:
    """``x @ w.T``: x [..., K], w [N, K]; returns [..., N] in the dtype of x. What is narrower is widened.

    >>> linear(mx.ones((3, 8)), mx.ones((5, 8), dtype=mx.bfloat16)).shape
    (3, 5)
    """
    cpu = extension()
    if cpu is None or x.dtype not in FLOAT_TYPES or w.dtype not in FLOAT_TYPES or w.ndim != 2:
        return reference.linear(x, w)
    y: mx.array = cpu.linear(x, w)
    return y


def embed_rows(
    ids: mx.array,
    w: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    group_size: int = 0,
    bits: int = 0,
    mode: str = "affine",
) -> mx.array:
    """Rows ``ids`` of a table, float32 [..., K]: dense w [N, K], or quantized as in ``quantized_matmul``.

    ids int32 of any shape, from -N (negative ones count from the end, as mlx has it) to N - 1.

    >>> embed_rows(mx.array([[1]], dtype=mx.int32), mx.array([[1.0], [2.0]], dtype=mx.float16)).tolist()
    [[[2.0]]]
    """
    cpu = extension()
    is_dense = scales is None and w.dtype in FLOAT_TYPES
    is_read = reads_quantized(scales, biases, group_size=group_size, bits=bits, mode=mode)
    if cpu is None or ids.dtype != mx.int32 or w.ndim != 2 or not (is_dense or is_read):
        return reference.embed_rows(ids, w, scales, biases, group_size=group_size, bits=bits, mode=mode)
    rows: mx.array = cpu.embed_rows(ids, w, scales, biases, group_size, bits, mode)
    return rows
