"""MXFP4: numbers of 4 bits (e2m1) in groups of 32 with a power of two each, which MLX has, too.

gpt-oss keeps its experts as ``NAME_blocks`` [..., columns / 32, 16] uint8, lower halves first, and
``NAME_scales`` [..., columns / 32] uint8 (https://github.com/openai/gpt-oss, torch/weights.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from mlxserve.errors import ConversionError
from mlxserve_convert.methods.method import Method, Settings, check_type, part
from mlxserve_convert.mlx_checkpoint import dequantized
from mlxserve_convert.weights import Layout, Packed, Weight

_BLOCKS, _SCALES = "_blocks", "_scales"
_LAYOUT = Layout("mxfp4", 4, 32, mx.uint8)


class Mxfp4Weight(Weight):
    """``codes`` hold two numbers a byte; ``codes_per_row`` of its rows make a row of the matrix."""

    def __init__(self, codes: Weight, scales: Weight, shape: tuple[int, ...], codes_per_row: int = 1) -> None:
        super().__init__(shape, mx.float32, frozenset({"mxfp4"}), is_quantized=True)
        self.layout = _LAYOUT
        self._codes, self._scales = codes, scales
        self._codes_per_row = codes_per_row

    def read(self, start: int, stop: int) -> mx.array:
        return dequantized(self.read_packed(start, stop), _LAYOUT, mx.float32)

    def read_packed(self, start: int, stop: int) -> Packed:
        codes = self._codes.read(start * self._codes_per_row, stop * self._codes_per_row)
        words = codes.reshape(stop - start, self.num_columns // 2).view(mx.uint32)
        return Packed(words, self._scales.read(start, stop), None)

    def prefetch(self, start: int, stop: int) -> None:
        self._codes.prefetch(start * self._codes_per_row, stop * self._codes_per_row)
        self._scales.prefetch(start, stop)


def _decode(weights: Mapping[str, Weight], settings: Settings, where: str) -> dict[str, Weight]:
    decoded: dict[str, Weight] = {}
    for name, weight in weights.items():
        if name.endswith(_BLOCKS):
            module = name.removesuffix(_BLOCKS)
            scales = part(weights, module + _SCALES, where, *weight.shape[:-1])
            for tensor, own in ((weight, name), (scales, module + _SCALES)):
                check_type(tensor, own, where, mx.uint8)
            if len(weight.shape) < 3 or weight.shape[-1] != 16:
                raise ConversionError(
                    f"{where}: tensor {name!r} has shape {weight.shape}, expected rows of groups of 16 bytes"
                )
            *outer, num_groups, _ = weight.shape
            decoded[f"{module}.weight"] = Mxfp4Weight(weight, scales, (*outer, num_groups * 32), num_groups)
        elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in weights):
            decoded[name] = weight
    return decoded


def _check(settings: Settings, where: str) -> None:
    """There are no variants."""


MXFP4 = Method(_check, _decode)
