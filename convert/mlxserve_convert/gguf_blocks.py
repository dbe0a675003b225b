"""GGUF block formats as MLX arrays: without requantization where MLX has a layout, else as floats.

A block's weights are ``scale * code`` for whole numbers in groups that share a scale. Where such a group has
at least 32 columns and the codes fit into 8 bits, that is MLX's affine layout ``w = scale * q + bias`` (q is
unsigned there, so signed codes get an offset and a bias of minus offset times scale):

    Q4_0, Q5_0, Q8_0   4, 5, 8 bits, groups of 32: scale d, bias -8 d, -16 d, -128 d
    Q4_1, Q5_1         4, 5 bits, groups of 32: scale d, bias m
    Q4_K, Q5_K         4, 5 bits, groups of 32: scale d*sc, bias -dmin*m
    Q3_K               8 bits, groups of 128: q = sc*code + 127, scale d, bias -127 d
    IQ4_NL, IQ4_XS     8 bits, groups of 32: q = the table's value + 128, scale d or d*sc
    TQ1_0, TQ2_0       2 bits, groups of 128: scale d, bias -d
    MXFP4, NVFP4       the same numbers in MLX's order: mxfp4 (groups of 32), nvfp4 (groups of 16)

Scales and biases are float32. Each product above is exact there (d has 11 significant bits, sc at most 6,
q at most 8) and the sum is rounded once, as it is in ggml, so that the dequantized weights are the same
bits; MLX computes in the dtype of the scales, where float16 would round. Q2_K, Q6_K and the other IQ types
have groups of 8 or 16, or more codes than 8 bits hold: they are read as float32.
Formats: ggml's ``ggml-common.h`` and ``ggml-quants.c``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from mlxserve_convert.gguf_file import GGUFFile, GGUFTensor
from mlxserve_convert.options import Mode
from mlxserve_convert.weights import Layout, Packed, Weight

Bytes = np.ndarray[Any, Any]
"""uint8."""
Floats = np.ndarray[Any, np.dtype[np.float32]]
Array = np.ndarray[Any, Any]

_FLOATS = {
    "F32": (np.float32, mx.float32),
    "F16": (np.float16, mx.float16),
    "BF16": (np.uint16, mx.bfloat16),
    "F64": (np.float64, mx.float32),
}


def gguf_weight(file: GGUFFile, tensor: GGUFTensor) -> Weight:
    """A tensor of a supported type."""
    if tensor.type_name in _FLOATS:
        return _FloatBlocks(file, tensor)
    if tensor.type_name in _PACKED:
        return _PackedBlocks(file, tensor, _PACKED[tensor.type_name])
    return _DecodedBlocks(file, tensor)


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
        view = self._raw(start, stop).view(self._numpy_type)
        if self._numpy_type is np.float64:
            return mx.array(view.astype(np.float32))
        # numpy has no bfloat16.
        return mx.array(view).view(mx.bfloat16) if self.dtype == mx.bfloat16 else mx.array(view)


@dataclass(frozen=True, slots=True)
class _Format:
    """A type that has a layout. ``unpack`` takes its blocks [N, bytes of a block] and gives the words' bytes
    [N, …], the scales and (for affine) the biases [N, groups of a block]."""

    mode: Mode
    bits: int
    group_size: int
    block: int
    unpack: Callable[[Bytes], tuple[Bytes, Array, Array | None]]

    @property
    def layout(self) -> Layout:
        scale_dtype = mx.float32 if self.mode == "affine" else mx.uint8
        return Layout(self.mode, self.bits, self.group_size, scale_dtype)


class _PackedBlocks(_Blocks):
    """A type that has a layout in MLX, bit by bit what the file holds."""

    def __init__(self, file: GGUFFile, tensor: GGUFTensor, form: _Format) -> None:
        super().__init__(file, tensor, mx.float32, is_quantized=True)
        self._form = form
        self.layout = form.layout

    def read(self, start: int, stop: int) -> mx.array:
        packed = self.read_packed(start, stop)
        form = self._form
        return mx.dequantize(
            packed.words,
            packed.scales,
            packed.biases,
            group_size=form.group_size,
            bits=form.bits,
            mode=form.mode,
            dtype=mx.float32,
        )

    def read_packed(self, start: int, stop: int) -> Packed:
        num_rows = stop - start
        blocks = self._raw(start, stop).reshape(num_rows * (self.num_columns // self._form.block), -1)
        # The scales of a damaged file may be anything.
        with np.errstate(invalid="ignore", over="ignore"):
            data, scales, biases = self._form.unpack(blocks)
        words = np.ascontiguousarray(data).reshape(num_rows, -1).view(np.uint32)
        own_biases = None if biases is None else mx.array(biases.reshape(num_rows, -1))
        return Packed(mx.array(words), mx.array(scales.reshape(num_rows, -1)), own_biases)


class _DecodedBlocks(_Blocks):
    """A type that MLX has no layout for, as float32."""

    def __init__(self, file: GGUFFile, tensor: GGUFTensor) -> None:
        super().__init__(file, tensor, mx.float32, is_quantized=True)
        self._decode = _DECODED.get(tensor.type_name)
        self._kind = GGMLQuantizationType[tensor.type_name]

    def read(self, start: int, stop: int) -> mx.array:
        raw = self._raw(start, stop)
        # The scales of a damaged file may be anything.
        with np.errstate(invalid="ignore", over="ignore"):
            if self._decode is None:
                return mx.array(quants.dequantize(raw, self._kind))
            _, block_bytes = GGML_QUANT_SIZES[self._kind]
            values = self._decode(raw.reshape(-1, block_bytes))
        return mx.array(values.reshape(stop - start, self.num_columns))


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at a place of each block [N, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _pack_4_bits(codes: Bytes) -> Bytes:
    """Bytes [N, 8 k] of which the low four bits count, two to a byte [N, 4 k]. What the high bits hold is
    dropped. Works on eight codes at a time in a 64-bit word."""
    x = np.ascontiguousarray(codes).view(np.uint64) & np.uint64(0x0F0F0F0F0F0F0F0F)
    x |= x >> np.uint64(4)
    x &= np.uint64(0x00FF00FF00FF00FF)
    x |= x >> np.uint64(8)
    x &= np.uint64(0x0000FFFF0000FFFF)
    x |= x >> np.uint64(16)
    words: Bytes = x.astype(np.uint32).view(np.uint8)
    return words


def _pack_5_bits(codes: Bytes) -> Bytes:
    """Codes below 32 [N, 8 k], eight to five bytes [N, 5 k], the first in the lowest bits."""
    x = np.ascontiguousarray(codes).view(np.uint64)
    x = (x & np.uint64(0x001F001F001F001F)) | (x & np.uint64(0x1F001F001F001F00)) >> np.uint64(3)
    x = (x & np.uint64(0x000003FF000003FF)) | (x & np.uint64(0x03FF000003FF0000)) >> np.uint64(6)
    x = (x & np.uint64(0x00000000000FFFFF)) | (x & np.uint64(0x000FFFFF00000000)) >> np.uint64(12)
    eights: Bytes = x.view(np.uint8).reshape(codes.shape[0], -1, 8)
    packed: Bytes = eights[..., :5].reshape(codes.shape[0], -1)
    return packed


def _pack_2_bits(codes: Bytes) -> Bytes:
    """Codes below 4 [N, 4 k], four to a byte [N, k]."""
    x = np.ascontiguousarray(codes).view(np.uint32)
    x = (x | x >> np.uint32(6) | x >> np.uint32(12) | x >> np.uint32(18)) & np.uint32(0xFF)
    narrow: Bytes = x.astype(np.uint8)
    return narrow


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Of every ``run`` bytes first the low nibbles, then the high ones (not cleared above): [N, 2 n]."""
    parts = packed.reshape(packed.shape[0], -1, run)
    both: Bytes = np.stack([parts, parts >> 4], axis=2).reshape(packed.shape[0], -1)
    return both


def _q4_0(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    scales = _half(blocks, 0)
    return _pack_4_bits(_nibbles(blocks[:, 2:], 16)), scales, scales * np.float32(-8)


def _q4_1(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    return _pack_4_bits(_nibbles(blocks[:, 4:], 16)), _half(blocks, 0), _half(blocks, 2)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """Q5_0 and Q5_1: bit i of four bytes is the fifth bit of code i."""
    fifth = np.unpackbits(high, axis=1, bitorder="little")
    return _pack_5_bits((_nibbles(low, 16) & 15) | fifth << 4)


def _q5_0(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    scales = _half(blocks, 0)
    return _five_bits(blocks[:, 2:6], blocks[:, 6:]), scales, scales * np.float32(-16)


def _q5_1(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    return _five_bits(blocks[:, 4:8], blocks[:, 8:]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    scales = _half(blocks, 0)
    # Flipping the sign bit of an int8 adds 128 to it.
    return blocks[:, 2:] ^ np.uint8(0x80), scales, scales * np.float32(-128)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases [N, 8] of Q4_K and Q5_K: twelve bytes hold eight scales and eight minima of six bits,
    the first four of each as they are, of the others four bits together and two in the tops of the first."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=1)
    return _half(blocks, 0) * scales.astype(np.float32), _half(blocks, 2) * -minima.astype(np.float32)


def _q4_k(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    return _pack_4_bits(_nibbles(blocks[:, 16:], 32)), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    # Bit g of byte i is the fifth bit of code i of group g.
    groups = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> groups & 1).reshape(blocks.shape[0], -1)
    codes = (_nibbles(blocks[:, 48:], 32) & 15) | fifth << 4
    return _pack_5_bits(codes), *_k_scales(blocks)


def _q3_k(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    """Sixteen scales of six bits: their low four bits in eight bytes, the high two in the next four. Codes
    have two bits in ``low`` and one in ``high``, which stands for -4 where it is not set."""
    count = blocks.shape[0]
    high, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    pairs = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    tops = (packed[:, None, 8:] >> pairs & 3).reshape(count, 16)
    scales = (_nibbles(packed[:, :8], 8) & 15 | tops << 4).astype(np.int16) - 32
    codes = (low.reshape(count, 2, 1, 32) >> pairs & 3).reshape(count, 256).astype(np.int16)
    bits = np.arange(8, dtype=np.uint8)[:, None]
    codes -= 4 - 4 * (high[:, None, :] >> bits & 1).reshape(count, 256).astype(np.int16)
    products = codes.reshape(count, 16, 16) * scales[:, :, None]
    # -124 … 128: shifted by 127, as 128 + 128 has no byte.
    scale = np.repeat(_half(blocks, 108), 2, axis=1)
    shifted = (products + 127).astype(np.uint8).reshape(count, 256)
    return shifted, scale, scale * np.float32(-127)


_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int16
)
_IQ4_CODES = (_IQ4_VALUES + 128).astype(np.uint8)


def _iq4_nl(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    scales = _half(blocks, 0)
    return _IQ4_CODES[_nibbles(blocks[:, 2:], 16) & 15], scales, scales * np.float32(-128)


def _iq4_xs(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    """Eight scales of six bits: low four bits in four bytes, high two in a 16-bit word."""
    count = blocks.shape[0]
    tops = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    lows = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(count, 8)
    steps = (lows | tops.astype(np.uint8) << 4).astype(np.float32) - 32
    scales = _half(blocks, 0) * steps
    return _IQ4_CODES[_nibbles(blocks[:, 8:], 16) & 15], scales, scales * np.float32(-128)


def _tq1_0(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    """Five base-3 digits a byte, the byte being the digits' value in 1/256 of 243, rounded up."""

    def digits(data: Bytes, run: int, count: int) -> Bytes:
        powers = np.array([1, 3, 9, 27, 81][:count], np.uint8)[:, None]
        spread = data.reshape(data.shape[0], -1, 1, run) * powers
        return ((spread.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(data.shape[0], -1)

    codes = [digits(blocks[:, :32], 32, 5), digits(blocks[:, 32:48], 16, 5), digits(blocks[:, 48:52], 4, 4)]
    scales = np.repeat(_half(blocks, 52), 2, axis=1)
    return _pack_2_bits(np.concatenate(codes, axis=1)), scales, -scales


def _tq2_0(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = (blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(blocks.shape[0], 256)
    scales = np.repeat(_half(blocks, 64), 2, axis=1)
    return _pack_2_bits(codes), scales, -scales


def _mxfp4(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    return _pack_4_bits(_nibbles(blocks[:, 1:], 16)), np.ascontiguousarray(blocks[:, :1]), None


def _nvfp4(blocks: Bytes) -> tuple[Bytes, Array, Array | None]:
    # Scales have no sign in ggml, and 0x7F stands for zero there, for not-a-number in MLX.
    scales = blocks[:, :4] & 0x7F
    scales[scales == 0x7F] = 0
    return _pack_4_bits(_nibbles(blocks[:, 4:], 8)), scales, None


_PACKED = {
    "Q4_0": _Format("affine", 4, 32, 32, _q4_0),
    "Q4_1": _Format("affine", 4, 32, 32, _q4_1),
    "Q5_0": _Format("affine", 5, 32, 32, _q5_0),
    "Q5_1": _Format("affine", 5, 32, 32, _q5_1),
    "Q8_0": _Format("affine", 8, 32, 32, _q8_0),
    "Q3_K": _Format("affine", 8, 128, 256, _q3_k),
    "Q4_K": _Format("affine", 4, 32, 256, _q4_k),
    "Q5_K": _Format("affine", 5, 32, 256, _q5_k),
    "IQ4_NL": _Format("affine", 8, 32, 32, _iq4_nl),
    "IQ4_XS": _Format("affine", 8, 32, 256, _iq4_xs),
    "TQ1_0": _Format("affine", 2, 128, 256, _tq1_0),
    "TQ2_0": _Format("affine", 2, 128, 256, _tq2_0),
    "MXFP4": _Format("mxfp4", 4, 32, 32, _mxfp4),
    "NVFP4": _Format("nvfp4", 4, 16, 64, _nvfp4),
}


def _decode_q2_k(blocks: Bytes) -> Floats:
    count = blocks.shape[0]
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = (blocks[:, 16:80].reshape(count, 2, 1, 32) >> shifts & 3).reshape(count, 16, 16)
    values = codes.astype(np.float32)
    values *= (_half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32))[..., None]
    values -= (_half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32))[..., None]
    return values


def _decode_q6_k(blocks: Bytes) -> Floats:
    """Four bits of a code in ``low`` (of every 64 bytes the low nibbles first), two in ``high``."""
    count = blocks.shape[0]
    codes = np.ascontiguousarray(_nibbles(blocks[:, :128], 64) & 15)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(count, 2, 1, 32) >> shifts
    codes |= ((high & 3) << 4).reshape(count, 256)
    codes -= np.uint8(32)
    scales = _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    values = codes.view(np.int8).astype(np.float32).reshape(count, 16, 16)
    values *= scales[..., None]
    return values


def _decode_q8_k(blocks: Bytes) -> Floats:
    scales = np.ascontiguousarray(blocks[:, :4]).view(np.float32)
    return np.ascontiguousarray(blocks[:, 4:260]).view(np.int8).astype(np.float32) * scales


_DECODED: dict[str, Callable[[Bytes], Floats]] = {
    "Q2_K": _decode_q2_k,
    "Q6_K": _decode_q6_k,
    "Q8_K": _decode_q8_k,
}
_DECODED_BY_GGUF = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
"""Their tables come with the ``gguf`` package."""

SUPPORTED_TYPES = (*_FLOATS, *_PACKED, *_DECODED, *_DECODED_BY_GGUF)
