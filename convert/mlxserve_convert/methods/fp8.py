"""Float8 weights with a scale a tensor, a row or a block: ``w = float8 * scale``, whatever its name says.

DeepSeek's releases name the factor ``weight_scale_inv`` and keep one for each block of 128 rows and columns;
others write ``weight_scale`` of shape [], [1], [out] or [out, 1]
(https://huggingface.co/docs/transformers/quantization/finegrained_fp8). Where all scales are powers of two
this is MLX's mxfp8, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from mlxserve.errors import ConversionError
from mlxserve_convert.methods.method import (
    NOT_WEIGHTS,
    Method,
    ScaleGrid,
    Settings,
    refused,
)
from mlxserve_convert.weights import Layout, Packed, Weight

_FORMATS = ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2")
_SUFFIXES = ("_scale_inv", "_scale")
_GROUP_SIZE = 32
_LAYOUT = Layout("mxfp8", 8, _GROUP_SIZE, mx.uint8)


def is_float8(weight: Weight) -> bool:
    return bool(weight.source_types & {"f8_e4m3", "f8_e5m2"})


class Float8Weight(Weight):
    """``codes`` are the stored bytes, ``grid`` their scales."""

    def __init__(self, codes: Weight, grid: ScaleGrid) -> None:
        super().__init__(codes.shape, mx.float32, codes.source_types, is_quantized=True)
        self._codes = codes
        self._grid = grid
        self._is_e5m2 = "f8_e5m2" in codes.source_types
        fits = codes.num_columns % _GROUP_SIZE == 0 and grid.group_size % _GROUP_SIZE == 0
        if fits and not self._is_e5m2 and _are_powers_of_two(np.array(grid.all())):
            self.layout = _LAYOUT

    def read(self, start: int, stop: int) -> mx.array:
        codes = self._codes.read(start, stop)
        if self._is_e5m2:
            # The upper byte of a float16.
            values = (codes.astype(mx.uint16) << 8).view(mx.float16).astype(mx.float32)
        else:
            values = mx.from_fp8(codes, mx.float32)
        return values * spread(self._grid, start, stop, self.num_columns)

    def read_packed(self, start: int, stop: int) -> Packed:
        words = self._codes.read(start, stop).view(mx.uint32)
        _, exponents = np.frexp(np.array(self._grid.rows(start, stop)))
        stored = mx.array((exponents + 126).astype(np.uint8))
        # Blocks may reach over the last column.
        repeated = mx.repeat(stored, self._grid.group_size // _GROUP_SIZE, axis=1)
        return Packed(words, mx.contiguous(repeated[:, : self.num_columns // _GROUP_SIZE]), None)

    def prefetch(self, start: int, stop: int) -> None:
        self._codes.prefetch(start, stop)


def spread(grid: ScaleGrid, start: int, stop: int, columns: int) -> mx.array:
    """The scale of each column, or one a row: [stop - start, columns or 1] float32."""
    scales = grid.rows(start, stop)
    return scales if grid.num_groups == 1 else mx.repeat(scales, grid.group_size, axis=1)[:, :columns]


def _are_powers_of_two(scales: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bool:
    mantissas, exponents = np.frexp(scales)
    return bool(np.all(mantissas == 0.5) and np.all((exponents >= -126) & (exponents <= 128)))


def _check(settings: Settings, where: str) -> None:
    form = settings.get("fmt", "e4m3")
    if form not in _FORMATS:
        raise refused(settings, where, f"only: {', '.join(_FORMATS)}", form)
    _blocks(settings, where)


def _blocks(settings: Settings, where: str) -> list[tuple[int, int]]:
    block = settings.get("weight_block_size")
    if block is None:
        return []
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise refused(settings, where, f"weight_block_size {block!r} is no pair of numbers")
    return [(block[0], block[1])]


def _decode(weights: Mapping[str, Weight], settings: Settings, where: str) -> dict[str, Weight]:
    """All float8 tensors with their scales; what scales activations and caches is left out."""
    blocks = _blocks(settings, where)
    decoded: dict[str, Weight] = {}
    used: set[str] = set()
    for name, weight in weights.items():
        if is_float8(weight):
            scale = next((name + suffix for suffix in _SUFFIXES if name + suffix in weights), None)
            if scale is None:
                raise ConversionError(f"{where}: tensor '{name}{_SUFFIXES[0]}' is missing")
            used.add(scale)
            grid = ScaleGrid(weights[scale], weight.shape, where, scale, blocks)
            decoded[name] = Float8Weight(weight, grid)
        elif not name.endswith(NOT_WEIGHTS):
            decoded[name] = weight
    for name in list(decoded):
        base = next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)
        if name in used:
            del decoded[name]
        elif base != name and base.endswith(".weight") and base in weights:
            raise ConversionError(f"{where}: tensor {name!r} scales {base!r}, which is not float8")
    return decoded


FP8 = Method(_check, _decode)
