"""GGUF block formats as MLX arrays, without requantization.

A Q4_0, Q4_1 or Q8_0 block holds 32 weights and one scale, which is MLX's affine layout with groups of
32: ``w = scale * q + bias``. MLX keeps q unsigned, so the signed formats get a derived bias:

    Q4_1   q in 0..15, scale d, bias m
    Q4_0   q in 0..15, scale d, bias -8 d
    Q8_0   q + 128 in 0..255, scale d, bias -128 d

Scales and biases are float32. All products and sums above are exact in float32 (d and m have 11
significant bits, q at most 8), while MLX computes in the dtype of the scales, where float16 would round.
Formats: ggml's ``ggml-common.h``.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve_convert.gguf_file import GGUFFile, GGUFTensor
from mlxserve_convert.weights import Layout, Packed, Weight

GROUP_SIZE = 32

_FLOATS = {"F32": (np.float32, mx.float32), "F16": (np.float16, mx.float16), "BF16": (np.uint16, mx.bfloat16)}
_AFFINE_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
SUPPORTED_TYPES = (*_FLOATS, *_AFFINE_BITS)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def gguf_weight(file: GGUFFile, tensor: GGUFTensor) -> Weight:
    """A tensor of a supported type."""
    if tensor.type_name in _FLOATS:
        return _FloatBlocks(file, tensor)
    return _AffineBlocks(file, tensor)


class _Blocks(Weight):
    """Rows of a tensor as they lie in the file."""

    def __init__(self, file: GGUFFile, tensor: GGUFTensor, dtype: mx.Dtype, *, is_quantized: bool) -> None:
        super().__init__(tensor.shape, dtype, frozenset({tensor.type_name}), is_quantized=is_quantized)
        self._file = file
        self._tensor = tensor
        self._row_bytes = tensor.num_bytes // max(self.num_rows, 1)

    def _raw(self, start: int, stop: int) -> Bytes:
        """Bytes [rows, bytes of a row], a view of the file."""
        data = self._file.data(self._tensor.name)[start * self._row_bytes : stop * self._row_bytes]
        return data.reshape(stop - start, self._row_bytes)

    def prefetch(self, start: int, stop: int) -> None:
        first = self._tensor.offset + start * self._row_bytes
        self._file.prefetch(first, (stop - start) * self._row_bytes)


class _FloatBlocks(_Blocks):
    def __init__(self, file: GGUFFile, tensor: GGUFTensor) -> None:
        self._numpy_type, dtype = _FLOATS[tensor.type_name]
        super().__init__(file, tensor, dtype, is_quantized=False)

    def read(self, start: int, stop: int) -> mx.array:
        array = mx.array(self._raw(start, stop).view(self._numpy_type))
        # numpy has no bfloat16.
        return array.view(mx.bfloat16) if self.dtype == mx.bfloat16 else array


class _AffineBlocks(_Blocks):
    """Q4_0, Q4_1 or Q8_0, bit by bit what the file holds."""

    def __init__(self, file: GGUFFile, tensor: GGUFTensor) -> None:
        super().__init__(file, tensor, mx.float32, is_quantized=True)
        self.layout = Layout("affine", _AFFINE_BITS[tensor.type_name], GROUP_SIZE, mx.float32)

    def read(self, start: int, stop: int) -> mx.array:
        packed = self.read_packed(start, stop)
        assert self.layout is not None
        assert packed.biases is not None
        return mx.dequantize(
            packed.words, packed.scales, packed.biases, group_size=GROUP_SIZE, bits=self.layout.bits
        )

    def read_packed(self, start: int, stop: int) -> Packed:
        num_rows = stop - start
        blocks = self._raw(start, stop).reshape(num_rows, self.num_columns // GROUP_SIZE, -1)
        scales = _half(blocks, 0)
        type_name = self._tensor.type_name
        if type_name == "Q8_0":
            # Flipping the sign bit of an int8 adds 128 to it.
            return _packed(blocks[..., 2:] ^ np.uint8(0x80), scales, scales * np.float32(-128))
        if type_name == "Q4_0":
            return _packed(_nibbles_in_order(blocks[..., 2:]), scales, scales * np.float32(-8))
        return _packed(_nibbles_in_order(blocks[..., 4:]), scales, _half(blocks, 2))


def _packed(data: Bytes, scales: np.ndarray[Any, Any], biases: np.ndarray[Any, Any]) -> Packed:
    words = np.ascontiguousarray(data).reshape(data.shape[0], -1).view(np.uint32)
    return Packed(mx.array(words), mx.array(scales), mx.array(biases))


def _half(blocks: Bytes, at: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    halves = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]
    return halves.astype(np.float32)


def _nibbles_in_order(packed: Bytes) -> Bytes:
    """ggml keeps weights 0..15 in the low nibbles and 16..31 in the high ones, MLX keeps neighbours in
    one byte."""
    low, high = packed & 15, packed >> 4
    halves = [half[..., 0::2] | (half[..., 1::2] << 4) for half in (low, high)]
    return np.concatenate(halves, axis=-1)
