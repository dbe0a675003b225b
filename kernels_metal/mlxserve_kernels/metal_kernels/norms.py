"""RMS norms."""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels.metal_kernels import maker
from mlxserve_kernels.metal_kernels.maker import (
    FLOAT_TYPES,
    MAX_THREADS,
    MIN_DEVICE_SIZE,
    SIMD_SIZE,
    KernelMaker,
)

_ADD_RMS_NORM = """
threadgroup float partial[32];
add_rms_norm<T, W, SIZE, THREADS>(
    x, residual, weight, eps, y, sum, partial, threadgroup_position_in_grid.y, thread_index_in_threadgroup);
"""


class NormKernels:
    """Kernels made by `make`."""

    def __init__(self, make: KernelMaker) -> None:
        self._add_rms_norm = make(
            "add_rms_norm",
            ["x", "residual", "weight", "eps"],
            ["y", "sum"],
            _ADD_RMS_NORM,
            maker.source("rms_norm.h"),
        )

    def add_rms_norm(
        self, x: mx.array, residual: mx.array, weight: mx.array, eps: float
    ) -> tuple[mx.array, mx.array]:
        """RMS norm of ``x + residual`` over the last axis, and the sum.

        x, residual: [..., K], one dtype of FLOAT_TYPES; weight: [K] of FLOAT_TYPES; K at least 8. Returns
        (y, sum), both as x. Where K is a multiple of 4, arrays start at a multiple of 4 elements of their
        buffer.
        Raises ValueError for other shapes and dtypes.
        """
        size = x.shape[-1]
        if residual.shape != x.shape or residual.dtype != x.dtype or weight.shape != (size,):
            raise ValueError(
                f"add_rms_norm: x {x.shape} {x.dtype}, residual {residual.shape} {residual.dtype} and weight "
                f"{weight.shape} do not fit together"
            )
        if not takes_add_rms_norm(x, weight):
            raise ValueError(f"add_rms_norm: rows of {size} {x.dtype} with a weight of {weight.dtype}")
        threads = _row_threads(size)
        rows = x.size // size
        y, total = self._add_rms_norm(
            inputs=[x, residual, weight, mx.array(eps, dtype=mx.float32)],
            template=[("T", x.dtype), ("W", weight.dtype), ("SIZE", size), ("THREADS", threads)],
            grid=(threads, rows, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[x.shape, x.shape],
            output_dtypes=[x.dtype, x.dtype],
        )
        return y, total


def takes_add_rms_norm(x: mx.array, weight: mx.array) -> bool:
    """Whether rows of this size and dtype are such that the kernel has, and there are any."""
    is_float = x.dtype in FLOAT_TYPES and weight.dtype in FLOAT_TYPES
    return is_float and x.size > 0 and x.shape[-1] >= MIN_DEVICE_SIZE


def _row_threads(size: int) -> int:
    """Whole simdgroups that cover a row with 4 values a thread, at most a full threadgroup."""
    simdgroups = -(-size // (4 * SIMD_SIZE))
    return min(simdgroups * SIMD_SIZE, MAX_THREADS)
