"""Custom Metal kernels behind one function each: templates, grid, threadgroup and output shapes are here.

`MetalKernels()` runs them on the Mac's GPU. Given another maker with the signature of mx.fast.metal_kernel,
as metal_on_host has, the same Python runs elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

KernelCall = Callable[..., list[mx.array]]
KernelMaker = Callable[..., KernelCall]

SIMD_SIZE = 32
MAX_THREADS = 1024
MIN_DEVICE_SIZE = 8
"""Smaller inputs arrive in the `constant` address space, which the kernels do not take."""

FLOAT_TYPES = (mx.float32, mx.float16, mx.bfloat16)

_ADD_RMS_NORM = """
threadgroup float partial[32];
add_rms_norm<T, W, SIZE, THREADS>(
    x, residual, weight, eps, y, sum, partial, threadgroup_position_in_grid.y, thread_index_in_threadgroup);
"""


@cache
def source(name: str) -> str:
    """The text of `metal/<name>`, complete functions that stand alone."""
    return files("mlxserve_kernels").joinpath("metal", name).read_text()


class MetalKernels:
    """The kernels, made by `make`: a callable of mx.fast.metal_kernel's signature; by default that."""

    def __init__(self, make: KernelMaker | None = None) -> None:
        make = make or _mlx_maker()
        self._add_rms_norm = make(
            "add_rms_norm",
            ["x", "residual", "weight", "eps"],
            ["y", "sum"],
            _ADD_RMS_NORM,
            source("rms_norm.h"),
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
        if size < MIN_DEVICE_SIZE or x.dtype not in FLOAT_TYPES or weight.dtype not in FLOAT_TYPES:
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


def _mlx_maker() -> KernelMaker:
    maker: Any = mx.fast.metal_kernel
    return maker  # type: ignore[no-any-return]


def _row_threads(size: int) -> int:
    """Whole simdgroups that cover a row with 4 values a thread, at most a full threadgroup."""
    simdgroups = -(-size // (4 * SIMD_SIZE))
    return min(simdgroups * SIMD_SIZE, MAX_THREADS)
