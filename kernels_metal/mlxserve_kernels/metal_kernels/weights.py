"""Quantized matrices and row tiles as kernels of products take them."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import mlx.core as mx

from mlxserve_kernels.decoder import Projection
from mlxserve_kernels.dispatch import reads_quantized
from mlxserve_kernels.experts import Activation, ExpertWeights
from mlxserve_kernels.metal_kernels.maker import FLOAT_TYPES, MIN_DEVICE_SIZE, SIMD_SIZE

MAX_TILE_ROWS = 16
"""Rows of x that one pass over the weights serves."""

Template = list[tuple[str, Any]]

_LINE = 64
_OUTPUTS = 4
"""Rows of weights that a simdgroup has."""
_STAGED_ROWS = 4
_STEP = 256
_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu")


class ScaleSource(IntEnum):
    """As matmul.h has it."""

    OWN_LINES = 0
    ONE_RANGE = 1
    SHARED_RANGE = 2


class QuantizedWeight(NamedTuple):
    """A matrix as ``ops.quantized_matmul`` has it, or one an expert, of a format that the kernels read."""

    w: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str = "affine"

    @classmethod
    def of(cls, name: str, part: Projection | ExpertWeights) -> QuantizedWeight:
        """The matrix of ``part``, of a projection its rows; ValueError where it is dense or in tiles."""
        if part.scales is None or part.scale_dtype is not None:
            raise ValueError(f"{name}: no kernel for dense weights or tiles")
        whole = cls(part.w, part.scales, part.biases, part.group_size, part.bits, part.mode)
        if isinstance(part, ExpertWeights):
            return whole
        return whole.rows(part.begin, part.begin + part.num_outputs)

    @property
    def inputs(self) -> list[mx.array]:
        """w, scales and biases as kernels take them; zeros behind all where one is too small."""
        parts = [self.w, self.scales, self.scales if self.biases is None else self.biases]
        count = max(-(-MIN_DEVICE_SIZE * self.w.shape[0] // part.size) for part in parts)
        return [padded(part, count) for part in parts]

    @property
    def template(self) -> Template:
        return [
            ("MODE", _MODES.index(self.mode)),
            ("S", self.scales.dtype),
            ("GROUP", self.group_size),
            ("BITS", self.bits),
        ]

    @property
    def is_ragged(self) -> bool:
        """Whether rows end inside a line of memory."""
        return self.w.shape[-1] * self.w.itemsize % _LINE != 0

    @property
    def scale_source(self) -> ScaleSource:
        """Scales of rows that end inside a line are read together: by a threadgroup where they are few."""
        groups = self.scales.shape[-1]
        if groups * self.scales.itemsize % _LINE == 0:
            return ScaleSource.OWN_LINES
        return ScaleSource.SHARED_RANGE if groups <= SIMD_SIZE else ScaleSource.ONE_RANGE

    def rows(self, begin: int, end: int) -> QuantizedWeight:
        """Rows ``begin`` to ``end - 1``: views, which kernels read where they are."""
        if (begin, end) == (0, self.w.shape[0]):
            return self
        biases = None if self.biases is None else self.biases[begin:end]
        return self._replace(w=self.w[begin:end], scales=self.scales[begin:end], biases=biases)

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


class Tiling(NamedTuple):
    """How many rows and simdgroups a threadgroup has."""

    rows: int
    simdgroups: int

    @classmethod
    def of(cls, rows: int) -> Tiling:
        """For ``rows`` rows: where x is shared through threadgroup memory, more outputs share it."""
        size = tile_rows(rows)
        return cls(size, 2 if size < _STAGED_ROWS else 8)

    def template_of(self, weight: QuantizedWeight) -> Template:
        """For products with ``weight``."""
        tile = 1 if self.rows < _STAGED_ROWS else self.rows * _STEP // 4
        source = weight.scale_source
        shared = 2 * SIMD_SIZE * self.simdgroups * _OUTPUTS if source is ScaleSource.SHARED_RANGE else 1
        return [
            ("ROWS", self.rows), ("SIMDGROUPS", self.simdgroups), ("TILE", tile),
            ("RAGGED", weight.is_ragged), ("SCALES", int(source)), ("SHARED", shared),
        ]  # fmt: skip

    def launch(self, outputs: int, width: int, parts: int) -> dict[str, Any]:
        """Grid and threadgroup for ``outputs`` outputs, ``width`` a simdgroup, ``parts`` times."""
        threads = self.simdgroups * SIMD_SIZE
        groups = -(-outputs // (self.simdgroups * width))
        return {"grid": (threads * groups, parts, 1), "threadgroup": (threads, 1, 1)}


def tile_rows(rows: int) -> int:
    """Rows of the smallest tile that holds ``rows``: 1, 2, 4, 8 or MAX_TILE_ROWS."""
    return min(1 << max(rows - 1, 0).bit_length(), MAX_TILE_ROWS)


def padded(a: mx.array, count: int) -> mx.array:
    """With zeros behind along the first axis, where that is shorter than ``count``."""
    missing = count - a.shape[0]
    return mx.pad(a, [(0, missing), *[(0, 0)] * (a.ndim - 1)]) if missing > 0 else a


def activation_index(activation: Activation) -> int:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    return _ACTIVATIONS.index(activation)


def check_rows(name: str, x: mx.array) -> None:
    if x.dtype not in FLOAT_TYPES or x.ndim < 1:
        raise ValueError(
            f"{name}: x must have rows of float32, float16 or bfloat16, got {x.dtype} {list(x.shape)}"
        )


def check_bias(name: str, bias: mx.array | None, shape: tuple[int, ...]) -> None:
    if bias is not None and (bias.shape != shape or bias.dtype not in FLOAT_TYPES):
        raise ValueError(f"{name}: bias {bias.dtype} {list(bias.shape)}, but outputs {list(shape)}")


def check_pair(
    name: str,
    gate: QuantizedWeight,
    up: QuantizedWeight,
    gate_bias: mx.array | None,
    up_bias: mx.array | None,
) -> None:
    """ValueError unless gate and up have one format and shape, and biases that fit, or none."""
    up.check(name, up.scales.shape[-1] * up.group_size, gate.w.ndim)
    if gate.template != up.template or gate.w.shape != up.w.shape or (gate_bias is None) != (up_bias is None):
        has = [("a" if bias is not None else "no") + " bias" for bias in (gate_bias, up_bias)]
        raise ValueError(
            f"{name}: gate and up must be alike, got {dict(gate.template)} {list(gate.w.shape)} with "
            f"{has[0]} and {dict(up.template)} {list(up.w.shape)} with {has[1]}"
        )
    if gate_bias is not None and up_bias is not None and gate_bias.dtype != up_bias.dtype:
        raise ValueError(f"{name}: biases must have one dtype, got {gate_bias.dtype} and {up_bias.dtype}")
    for bias in (gate_bias, up_bias):
        check_bias(name, bias, gate.w.shape[:-1])
