"""GGUF block formats as MLX arrays, without requantization.

A Q4_0, Q4_1 or Q8_0 block holds 32 weights and one scale, which is MLX's affine layout with groups of
32: ``w = scale * q + bias``. MLX keeps q unsigned, so the signed formats get a derived bias:

    Q4_1   q in 0..15, scale d, bias m
    Q4_0   q in 0..15, scale d, bias -8 d
    Q8_0   q + 128 in 0..255, scale d, bias -128 d

Scales and biases are returned as float32. All products and sums above are exact in float32 (d and m
have 11 significant bits, q at most 8), while MLX computes in the dtype of the scales, where float16
would round. Formats: ggml's ``ggml-common.h``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxserve_convert.gguf_file import GGUFFile, GGUFTensor

GROUP_SIZE = 32

FLOAT_TYPES = ("F32", "F16", "BF16")
QUANTIZED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
SUPPORTED_TYPES = (*FLOAT_TYPES, *QUANTIZED_BITS)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint32]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class AffineRows:
    """A quantized matrix in MLX's layout: ``weight[rows, columns * bits / 32]`` of uint32, lowest bits
    first; ``scales`` and ``biases`` ``[rows, columns / 32]`` of float32."""

    weight: Words
    scales: Floats
    biases: Floats
    bits: int

    def take_rows(self, order: np.ndarray[Any, np.dtype[np.int64]]) -> AffineRows:
        return AffineRows(self.weight[order], self.scales[order], self.biases[order], self.bits)


def read_float(file: GGUFFile, tensor: GGUFTensor) -> np.ndarray[Any, Any]:
    """A float tensor as stored. BF16 comes as uint16, since numpy has no such type."""
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[tensor.type_name]
    return file.data(tensor.name).view(dtype).reshape(tensor.shape)


def read_affine(file: GGUFFile, tensor: GGUFTensor) -> AffineRows:
    """A Q4_0, Q4_1 or Q8_0 matrix, bit by bit what the file holds."""
    rows = tensor.num_elements // tensor.shape[-1]
    blocks = file.data(tensor.name).reshape(rows, tensor.shape[-1] // GROUP_SIZE, -1)
    scales = _half(blocks, 0)
    if tensor.type_name == "Q8_0":
        # Flipping the sign bit of an int8 adds 128 to it.
        packed = blocks[..., 2:] ^ np.uint8(0x80)
        return AffineRows(_words(packed, rows), scales, scales * np.float32(-128), 8)
    if tensor.type_name == "Q4_0":
        return AffineRows(
            _words(_nibbles_in_order(blocks[..., 2:]), rows), scales, scales * np.float32(-8), 4
        )
    return AffineRows(_words(_nibbles_in_order(blocks[..., 4:]), rows), scales, _half(blocks, 2), 4)


def dequantize(rows: AffineRows) -> Floats:
    """The float32 weights, exactly."""
    packed = rows.weight.view(np.uint8)
    if rows.bits == 4:
        packed = np.stack((packed & 15, packed >> 4), axis=-1)
    values = packed.reshape(*rows.scales.shape, GROUP_SIZE).astype(np.float32)
    values *= rows.scales[..., None]
    values += rows.biases[..., None]
    return values.reshape(rows.weight.shape[0], -1)


def _half(blocks: Bytes, at: int) -> Floats:
    halves = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]
    return halves.astype(np.float32)


def _nibbles_in_order(packed: Bytes) -> Bytes:
    """ggml keeps weights 0..15 in the low nibbles and 16..31 in the high ones, MLX keeps neighbours in
    one byte."""
    low, high = packed & 15, packed >> 4
    halves = [half[..., 0::2] | (half[..., 1::2] << 4) for half in (low, high)]
    return np.concatenate(halves, axis=-1)


def _words(packed: Bytes, rows: int) -> Words:
    return np.ascontiguousarray(packed).reshape(rows, -1).view(np.uint32)
