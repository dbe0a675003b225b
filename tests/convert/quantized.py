"""Checkpoints as AutoAWQ, GPTQModel, llm-compressor and the authors of FP8 and MXFP4 releases write them, by
their published layouts. Each writer gives the stored tensors and the floats that the method defines for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.convert.checkpoints import Arrays, write_tokenizer

Parts = dict[str, tuple[str, np.ndarray]]
"""Name of a part, then safetensors' name of its type and its numbers (bits, for types that numpy lacks)."""
Quantizer = Callable[[np.ndarray], tuple[Parts, np.ndarray]]

_TYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
}


def typed(values: np.ndarray) -> tuple[str, np.ndarray]:
    return _TYPES[values.dtype], values


def bf16(values: np.ndarray) -> tuple[str, np.ndarray]:
    return "BF16", (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: Parts) -> None:
    """A file with types that numpy does not have."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (kind, values) in tensors.items():
        header[name] = {
            "dtype": kind,
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
    raw = json.dumps(header).encode()
    body = b"".join(np.ascontiguousarray(values).tobytes() for _, values in tensors.values())
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + body)


def write_quantized(
    folder: Path,
    config: dict[str, Any],
    weights: Arrays,
    quantizer: Quantizer,
    *,
    is_wanted: Callable[[str], bool] = lambda name: ".layers." in name,
    floats: Callable[[np.ndarray], tuple[str, np.ndarray]] = bf16,
) -> Arrays:
    """Writes a folder of which the matrices that ``is_wanted`` are quantized; gives the float32 weights that
    it stands for."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors: Parts = {}
    exact: Arrays = {}
    for name, values in weights.items():
        if values.ndim > 1 and is_wanted(name):
            parts, exact[name] = quantizer(values)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{kind}": part for kind, part in parts.items()}
        else:
            kind, stored = tensors[name] = floats(values)
            wide = stored.astype(np.uint32) << 16 if kind == "BF16" else stored.astype(np.float32)
            exact[name] = wide.view(np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    write_tokenizer(folder)
    return exact


def bits_in_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers along the last axis, packed into int32 words from the lowest bit on, across words."""
    stream = ((numbers[..., None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(*numbers.shape[:-1], -1)
    stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)])
    return np.packbits(stream, axis=-1, bitorder="little").view(np.int32)


def integers(
    values: np.ndarray, bits: int, group: np.ndarray, *, is_symmetric: bool, dtype: type = np.float16
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned integers [out, in], scales and zero points [out, groups] of inputs in the groups ``group``."""
    count = int(group.max()) + 1
    scales = np.zeros((values.shape[0], count), dtype)
    zeros = np.zeros((values.shape[0], count), np.int64)
    numbers = np.zeros(values.shape, np.int64)
    top = 2**bits - 1
    for index in range(count):
        part = values[:, group == index]
        if is_symmetric:
            scale = np.abs(part).max(axis=1) / (top / 2)
            zero = np.full(len(part), 2 ** (bits - 1))
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scale = (high - low) / top
            zero = np.clip(np.round(-low / scale), 0, top).astype(np.int64)
        scales[:, index], zeros[:, index] = scale.astype(dtype), zero
        wide = scales[:, index].astype(np.float32)[:, None]
        numbers[:, group == index] = np.clip(np.round(part / wide) + zero[:, None], 0, top)
    return numbers, scales, zeros


def affine_values(
    numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group: np.ndarray
) -> np.ndarray:
    return (numbers - zeros[:, group]).astype(np.float32) * scales.astype(np.float32)[:, group]


def gptq(
    bits: int,
    group_size: int,
    *,
    is_symmetric: bool = True,
    is_v2: bool = False,
    order: str = "plain",
) -> Quantizer:
    """``order``: "plain" has g_idx in order, "none" no g_idx, "act" inputs in shuffled groups."""

    def quantize(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        num_inputs = values.shape[1]
        group = np.arange(num_inputs) // (group_size if group_size > 0 else num_inputs)
        if order == "act":
            group = group[np.random.default_rng(num_inputs).permutation(num_inputs)]
        numbers, scales, zeros = integers(values, bits, group, is_symmetric=is_symmetric)
        stored = (zeros.T - (0 if is_v2 else 1)) % 2**bits
        parts = {
            "qweight": typed(np.ascontiguousarray(bits_in_words(numbers, bits).T)),
            "qzeros": typed(bits_in_words(stored, bits)),
            "scales": typed(np.ascontiguousarray(scales.T)),
        }
        if order != "none":
            parts["g_idx"] = typed(group.astype(np.int32))
        return parts, affine_values(numbers, scales, zeros, group)

    return quantize


def awq(group_size: int, *, has_zeros: bool = True) -> Quantizer:
    def packed(numbers: np.ndarray) -> np.ndarray:
        eights = numbers.reshape(numbers.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return bits_in_words(eights.reshape(numbers.shape), 4)

    def quantize(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        group = np.arange(values.shape[1]) // group_size
        numbers, scales, zeros = integers(values, 4, group, is_symmetric=not has_zeros)
        parts = {"qweight": typed(packed(numbers.T)), "scales": typed(np.ascontiguousarray(scales.T))}
        if has_zeros:
            parts["qzeros"] = typed(packed(zeros.T))
        return parts, affine_values(numbers, scales, zeros, group)

    return quantize


def ct_packed(bits: int, group_size: int | None, *, is_symmetric: bool = True, order: str = "") -> Quantizer:
    def quantize(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        num_inputs = values.shape[1]
        group = np.arange(num_inputs) // (group_size or num_inputs)
        if order:
            group = group[np.random.default_rng(num_inputs).permutation(num_inputs)]
        numbers, scales, zeros = integers(values, bits, group, is_symmetric=is_symmetric)
        parts = {
            "weight_packed": typed(bits_in_words(numbers, bits)),
            "weight_scale": typed(scales),
            "weight_shape": typed(np.array(values.shape, np.int64)),
        }
        if not is_symmetric:
            packed = bits_in_words(np.ascontiguousarray(zeros.T), bits)
            parts["weight_zero_point"] = typed(np.ascontiguousarray(packed.T))
        if order:
            parts["weight_g_idx"] = typed(group.astype(np.int32))
        return parts, affine_values(numbers, scales, zeros, group)

    return quantize


def ct_int8(group_size: int | None, *, is_symmetric: bool = True, shape: str = "[out,1]") -> Quantizer:
    def quantize(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        group = np.arange(values.shape[1]) // (group_size or values.shape[1])
        numbers, scales, zeros = integers(values, 8, group, is_symmetric=is_symmetric, dtype=np.float32)
        scales = scales.view(np.uint32) & 0xFFFF0000
        scales = scales.view(np.float32)
        parts = {
            "weight": typed((numbers - 128).astype(np.int8)),
            "weight_scale": bf16(scales[:, 0] if shape == "[out]" else scales),
        }
        if not is_symmetric:
            parts["weight_zero_point"] = typed((zeros - 128).astype(np.int8))
        return parts, affine_values(numbers, scales, zeros, group)

    return quantize


def float8_table(*, is_e5m2: bool = False) -> np.ndarray:
    """The value of each byte, from sign, exponent and mantissa (OCP 8-bit floating point specification)."""
    mantissa_bits, bias = (2, 15) if is_e5m2 else (3, 7)
    table = np.zeros(256)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (2**mantissa_bits - 1)
        if exponent == 0:
            table[code] = sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            table[code] = sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
        if is_e5m2 and exponent == 31:
            table[code] = np.nan if mantissa else sign * np.inf
        if not is_e5m2 and code & 0x7F == 0x7F:
            table[code] = np.nan
    return table.astype(np.float32)


def to_codes(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The nearest code of each value."""
    finite = np.flatnonzero(np.isfinite(table))
    order = finite[np.argsort(table[finite], kind="stable")]
    middles = (table[order][1:] + table[order][:-1]) / 2
    return order[np.searchsorted(middles, values)].astype(np.uint8)


def float8(
    grain: str,
    *,
    suffix: str = "weight_scale_inv",
    is_e5m2: bool = False,
    has_two_powers: bool = False,
    block: int = 128,
    shape: str = "",
) -> Quantizer:
    """``grain``: "tensor", "channel" or "block". ``shape``: "[]", "[1]", "[out]" or "[out,1]"."""
    table = float8_table(is_e5m2=is_e5m2)

    def quantize(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        rows, columns = values.shape
        height = {"tensor": rows, "channel": 1, "block": block}[grain]
        width = block if grain == "block" else columns
        grid = np.zeros((-(-rows // height), -(-columns // width)), np.float32)
        spread = np.zeros_like(values)
        for y in range(grid.shape[0]):
            for x in range(grid.shape[1]):
                place = (slice(y * height, (y + 1) * height), slice(x * width, (x + 1) * width))
                scale = np.abs(values[place]).max() / (448 if not is_e5m2 else 57344)
                grid[y, x] = 2.0 ** np.ceil(np.log2(scale)) if has_two_powers else scale
                spread[place] = grid[y, x]
        codes = to_codes(values / spread, table)
        stored = {"[]": lambda: grid.reshape(()), "[1]": lambda: grid.reshape(1), "[out]": lambda: grid[:, 0]}
        scale = stored.get(shape, lambda: grid)()
        parts = {
            "weight": ("F8_E5M2" if is_e5m2 else "F8_E4M3", codes),
            suffix: typed(np.ascontiguousarray(scale)),
            "input_scale": typed(np.ones((), np.float32)),
        }
        return parts, table[codes] * spread

    return quantize


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4_parts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes two a byte [..., columns / 2], exponents [..., columns / 32], and the values."""
    groups = values.reshape(*values.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=-1))) - 2
    scales = np.float32(2.0) ** exponents[..., None].astype(np.float32)
    codes = np.abs((groups / scales)[..., None] - E2M1).argmin(axis=-1).astype(np.uint8)
    exact = (E2M1[codes] * scales).reshape(values.shape)
    flat = codes.reshape(*values.shape[:-1], -1)
    return flat[..., ::2] | (flat[..., 1::2] << 4), (exponents + 127).astype(np.uint8), exact


def ct_mxfp4() -> Quantizer:
    def quantize(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        codes, exponents, exact = mxfp4_parts(values)
        return {"weight_packed": typed(codes), "weight_scale": typed(exponents)}, exact

    return quantize


def ct_mxfp8() -> Quantizer:
    table = float8_table()

    def quantize(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        groups = values.reshape(values.shape[0], -1, 32)
        exponents = np.floor(np.log2(np.abs(groups).max(axis=-1))) - 8
        scales = np.float32(2.0) ** exponents[..., None].astype(np.float32)
        codes = to_codes(np.clip(groups / scales, -448, 448), table)
        parts = {
            "weight": ("F8_E4M3", codes.reshape(values.shape)),
            "weight_scale": typed((exponents + 127).astype(np.uint8)),
        }
        return parts, (table[codes] * scales).reshape(values.shape)

    return quantize


def ct_nvfp4(global_scale: float) -> Quantizer:
    table = float8_table()

    def quantize(values: np.ndarray) -> tuple[Parts, np.ndarray]:
        groups = values.reshape(values.shape[0], -1, 16)
        codes8 = to_codes(np.abs(groups).max(axis=-1) / 6 * global_scale, table)
        scales = table[codes8][..., None] / np.float32(global_scale)
        codes = np.abs((groups / scales)[..., None] - E2M1).argmin(axis=-1).astype(np.uint8)
        flat = codes.reshape(values.shape)
        parts = {
            "weight_packed": typed(flat[:, ::2] | (flat[:, 1::2] << 4)),
            "weight_scale": ("F8_E4M3", codes8),
            "weight_global_scale": typed(np.array([global_scale], np.float32)),
        }
        return parts, (E2M1[codes] * scales).reshape(values.shape)

    return quantize
