"""Products with quantized weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from mlxserve_kernels.dispatch import reads_quantized
from mlxserve_kernels.metal_kernels import maker
from mlxserve_kernels.metal_kernels.maker import FLOAT_TYPES, MIN_DEVICE_SIZE, SIMD_SIZE, KernelMaker

MAX_TILE_ROWS = 16
"""Rows of x that one pass over the weights serves."""
_STAGED_ROWS = 4
_STEP = 256
_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
_WEIGHT_OUTPUTS = 4

_QUANTIZED_MATMUL = """
threadgroup vec<T, 4> tile[TILE];
using Reader = typename ReaderOf<MODE, S, GROUP, BITS>::type;
quantized_matmul<Reader, ROWS, SIMDGROUPS, HAS_BIAS>(
    x, matrix<Reader>(w, scales, biases), bias, y, x_shape[0], w_shape[0], x_shape[1], tile,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


class QuantizedWeight(NamedTuple):
    """A matrix as ``ops.quantized_matmul`` has it, of a format that the kernels read."""

    w: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str = "affine"

    @property
    def inputs(self) -> list[mx.array]:
        """w, scales and biases as kernels take them; rows of zeros behind all where one is too small."""
        parts = [self.w, self.scales, self.scales if self.biases is None else self.biases]
        rows = max(-(-MIN_DEVICE_SIZE * self.w.shape[0] // part.size) for part in parts)
        return [padded(part, rows) for part in parts]

    @property
    def template(self) -> list[tuple[str, Any]]:
        return [
            ("MODE", _MODES.index(self.mode)),
            ("S", self.scales.dtype),
            ("GROUP", self.group_size),
            ("BITS", self.bits),
        ]

    def check(self, name: str, size: int, rank: int = 2) -> None:
        """ValueError unless kernels read this format and its rows have ``size`` values."""
        if not reads_quantized(
            self.scales, self.biases, group_size=self.group_size, bits=self.bits, mode=self.mode
        ):
            raise ValueError(
                f"{name}: no kernel for {self.mode} weights of {self.bits} bits in groups of "
                f"{self.group_size}, scales {self.scales.dtype}"
            )
        outer, groups = self.w.shape[:-1], size // self.group_size
        parts = [self.scales] if self.biases is None else [self.scales, self.biases]
        is_whole = size % self.group_size == 0 and size > 0 and self.w.dtype == mx.uint32
        fits = self.w.ndim == rank and self.w.shape[-1] * 32 == size * self.bits
        if not (is_whole and fits and all(part.shape == (*outer, groups) for part in parts)):
            raise ValueError(
                f"{name}: rows of {size} values do not fit weights {self.w.dtype} {list(self.w.shape)} with "
                f"scales {list(self.scales.shape)}"
            )


def padded(a: mx.array, rows: int) -> mx.array:
    """With rows of zeros behind, where there are fewer than ``rows``."""
    missing = rows - a.shape[0]
    return mx.pad(a, [(0, missing), *[(0, 0)] * (a.ndim - 1)]) if missing > 0 else a


def tile_rows(rows: int) -> int:
    """Rows of the smallest tile that holds ``rows``: 1, 2, 4, 8 or MAX_TILE_ROWS."""
    return min(1 << max(rows - 1, 0).bit_length(), MAX_TILE_ROWS)


class Tiling(NamedTuple):
    """How many rows and outputs a threadgroup has."""

    rows: int
    simdgroups: int

    @classmethod
    def of(cls, rows: int) -> Tiling:
        """For ``rows`` rows: where x is shared through threadgroup memory, more outputs share it."""
        size = tile_rows(rows)
        return cls(size, 2 if size < _STAGED_ROWS else 8)

    @property
    def template(self) -> list[tuple[str, Any]]:
        tile = 1 if self.rows < _STAGED_ROWS else self.rows * _STEP // 4
        return [("ROWS", self.rows), ("SIMDGROUPS", self.simdgroups), ("TILE", tile)]

    def launch(self, outputs: int, weights: int, parts: int) -> dict[str, Any]:
        """Grid and threadgroup for ``outputs`` outputs, ``weights`` a simdgroup, ``parts`` times."""
        threads = self.simdgroups * SIMD_SIZE
        groups = -(-outputs // (self.simdgroups * weights))
        return {"grid": (threads * groups, parts, 1), "threadgroup": (threads, 1, 1)}


class MatmulKernels:
    """Kernels made by `make`."""

    def __init__(self, make: KernelMaker) -> None:
        header = maker.source("unpack.h") + maker.source("matmul.h")
        self._quantized_matmul = make(
            "quantized_matmul", ["x", "w", "scales", "biases", "bias"], ["y"], _QUANTIZED_MATMUL, header
        )

    def quantized_matmul(
        self,
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        *,
        group_size: int,
        bits: int,
        mode: str = "affine",
        bias: mx.array | None = None,
    ) -> mx.array:
        """``x @ dequantize(w).T + bias``: ``ops.quantized_matmul`` with its formats.

        x [..., K] of FLOAT_TYPES; w uint32 [N, K * bits / 32]; scales, biases [N, K / group_size], of one
        dtype; bias [N] of FLOAT_TYPES. Arrays start at a multiple of 16 bytes of their buffer. Sums are
        float32, rounded once to the dtype of x. Up to MAX_TILE_ROWS rows read the weights once, more rows
        once for each MAX_TILE_ROWS; the bits of a row do not depend on the others.
        Raises ValueError for other shapes, dtypes and formats.
        """
        weight = QuantizedWeight(w, scales, biases, group_size, bits, mode)
        size, outputs = x.shape[-1], w.shape[0]
        check_rows("quantized_matmul", x)
        weight.check("quantized_matmul", size)
        if bias is not None and (bias.shape != (outputs,) or bias.dtype not in FLOAT_TYPES):
            raise ValueError(f"quantized_matmul: bias {bias.dtype} {list(bias.shape)} of {outputs} outputs")
        rows = x.size // size
        if not rows or not outputs:
            return mx.zeros((*x.shape[:-1], outputs), dtype=x.dtype)
        tiling = Tiling.of(rows)
        inputs = weight.inputs
        computed = inputs[0].shape[0]
        (y,) = self._quantized_matmul(
            inputs=[x.reshape(rows, size), *inputs, x if bias is None else padded(bias, MIN_DEVICE_SIZE)],
            template=[("T", x.dtype), *weight.template, *tiling.template, ("HAS_BIAS", bias is not None)],
            output_shapes=[(rows, computed)],
            output_dtypes=[x.dtype],
            **tiling.launch(computed, _WEIGHT_OUTPUTS, -(-rows // tiling.rows)),
        )
        return y[:, :outputs].reshape(*x.shape[:-1], outputs)


def check_rows(name: str, x: mx.array) -> None:
    if x.dtype not in FLOAT_TYPES or x.ndim < 1:
        raise ValueError(
            f"{name}: x must have rows of float32, float16 or bfloat16, got {x.dtype} {list(x.shape)}"
        )
