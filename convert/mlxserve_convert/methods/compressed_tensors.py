"""compressed-tensors, the format of llm-compressor: one container, several ways of packing.

    pack-quantized         weight_packed int32: q + 2^(bits - 1) along the input from the lowest bit on, which
                           are MLX's words; weight_scale; weight_zero_point packed along the output
    int-quantized          weight int8; weight_scale; weight_zero_point as it is
    float-quantized        weight float8; weight_scale a tensor, a row or a block
    naive-quantized        either of the two above
    mxfp4-pack-quantized   weight_packed uint8, two e2m1 a byte; weight_scale uint8, powers of two
    mxfp8-quantized        weight float8; weight_scale uint8, powers of two
    nvfp4-pack-quantized   weight_packed uint8; weight_scale float8, divided by weight_global_scale
    mixed-precision        each group of modules in a format of its own
    dense                  plain floats

The tensors of a module tell its format, the settings are checked to know it. Activations stay unquantized
(https://github.com/vllm-project/compressed-tensors).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.errors import ConversionError
from mlxserve_convert.methods.affine import AffineWeight
from mlxserve_convert.methods.fp8 import Float8Weight, is_float8
from mlxserve_convert.methods.method import (
    NOT_WEIGHTS,
    Method,
    ScaleGrid,
    Settings,
    check_type,
    fields_between_rows,
    part,
    refused,
)
from mlxserve_convert.methods.mxfp4 import Mxfp4Weight
from mlxserve_convert.weights import Layout, Packed, Weight

_INTEGERS = {"pack-quantized": (2, 3, 4, 5, 6, 8), "int-quantized": (8,), "naive-quantized": (8,)}
_FLOATS = {
    "float-quantized": (8,),
    "naive-quantized": (8,),
    "mxfp8-quantized": (8,),
    "mxfp4-pack-quantized": (4,),
    "nvfp4-pack-quantized": (4,),
}
_FORMATS = (*dict.fromkeys((*_INTEGERS, *_FLOATS)), "mixed-precision", "dense")
_PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
)
_NVFP4 = Layout("nvfp4", 4, 16, mx.uint8)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the settings say of weights: the first width, and all blocks of rows and columns that share a
    scale (a group is one of a single row). Which of them a module has, its tensors tell.
    ``has_zero_points``: all of them must."""

    num_bits: int
    blocks: tuple[tuple[int, int], ...]
    has_zero_points: bool


class PackedIntWeight(AffineWeight):
    """``zero_points`` [ceil(out * bits / 32), groups] are packed along the first axis."""

    def __init__(
        self,
        packed: Weight,
        scales: ScaleGrid,
        zero_points: Weight | None,
        shape: tuple[int, ...],
        bits: int,
        groups: np.ndarray[tuple[int], np.dtype[np.int64]] | None,
    ) -> None:
        super().__init__(shape, bits, scales.group_size, f"compressed-tensors int{bits}", groups)
        self._packed, self._grid, self._zero_points = packed, scales, zero_points

    def words(self, start: int, stop: int) -> mx.array:
        return self._packed.read(start, stop).view(mx.uint32)

    def scales(self, start: int, stop: int) -> mx.array:
        return self._grid.rows(start, stop)

    def zeros(self, start: int, stop: int) -> mx.array:
        if self._zero_points is None:
            return mx.array(float(1 << (self.bits - 1)))
        return fields_between_rows(self._zero_points, self.bits, start, stop).astype(mx.float32)

    def prefetch(self, start: int, stop: int) -> None:
        self._packed.prefetch(start, stop)


class Int8Weight(AffineWeight):
    """Signed bytes; as unsigned ones they and their zero points are 128 more."""

    def __init__(self, codes: Weight, scales: ScaleGrid, zero_points: ScaleGrid | None) -> None:
        super().__init__(codes.shape, 8, scales.group_size, "compressed-tensors int8")
        self._codes, self._grid, self._zero_points = codes, scales, zero_points

    def words(self, start: int, stop: int) -> mx.array:
        return (self._codes.read(start, stop).view(mx.uint8) ^ 0x80).view(mx.uint32)

    def integers(self, start: int, stop: int) -> mx.array:
        return self._codes.read(start, stop).astype(mx.float32) + 128

    def scales(self, start: int, stop: int) -> mx.array:
        return self._grid.rows(start, stop)

    def zeros(self, start: int, stop: int) -> mx.array:
        return mx.array(128.0) if self._zero_points is None else self._zero_points.rows(start, stop) + 128

    def prefetch(self, start: int, stop: int) -> None:
        self._codes.prefetch(start, stop)


class Nvfp4Weight(Weight):
    """MLX's nvfp4 has no scale for the whole: with one that is not 1 there is no layout."""

    def __init__(self, codes: Weight, scales: Weight, global_scale: float, shape: tuple[int, ...]) -> None:
        super().__init__(shape, mx.float32, frozenset({"nvfp4"}), is_quantized=True)
        self._codes, self._scales = codes, scales
        self._global_scale = global_scale
        if global_scale == 1:
            self.layout = _NVFP4

    def read(self, start: int, stop: int) -> mx.array:
        packed = self.read_packed(start, stop)
        values = mx.dequantize(
            packed.words, packed.scales, group_size=16, bits=4, mode="nvfp4", dtype=mx.float32
        )
        return values / self._global_scale

    def read_packed(self, start: int, stop: int) -> Packed:
        return Packed(self._codes.read(start, stop).view(mx.uint32), self._scales.read(start, stop), None)

    def prefetch(self, start: int, stop: int) -> None:
        self._codes.prefetch(start, stop)


def _check(settings: Settings, where: str) -> None:
    form = settings.get("format")
    _check_format(settings, where, form)
    for key in ("sparsity_config", "transform_config"):
        value = settings.get(key)
        if isinstance(value, dict) and value.get("format", "") != "dense" and any(value.values()):
            raise refused(settings, where, f"{key} {value.get('format') or sorted(value)!r}", form)
    if settings.get("quantization_status", "compressed") != "compressed":
        raise refused(settings, where, f"quantization_status {settings['quantization_status']!r}", form)
    for group in _groups(settings, where):
        _check_group(settings, where, group)


def _check_format(settings: Settings, where: str, form: object) -> None:
    if form not in _FORMATS:
        raise refused(settings, where, f"only: {', '.join(_FORMATS)}", str(form))


def _groups(settings: Settings, where: str) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise refused(settings, where, "config_groups is no object of objects")
    return list(groups.values())


def _check_group(settings: Settings, where: str, group: Mapping[str, Any]) -> None:
    form = group.get("format") or settings.get("format")
    _check_format(settings, where, form)
    weights = group.get("weights")
    if not isinstance(weights, dict) or form in ("mixed-precision", "dense"):
        return
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    known = (_FLOATS if kind == "float" else _INTEGERS).get(str(form), ())
    if bits not in known:
        raise refused(settings, where, f"weights of type {kind} with {bits!r} bits", form)
    if weights.get("dynamic"):
        raise refused(settings, where, f"weights with dynamic {weights['dynamic']!r}", form)


def _sizes(settings: Settings, where: str) -> _Sizes:
    widths: list[int] = []
    blocks: list[tuple[int, int]] = []
    symmetries: list[bool] = []
    for group in _groups(settings, where):
        weights = group.get("weights")
        if isinstance(weights, dict):
            bits, size = weights.get("num_bits", 8), weights.get("group_size")
            widths += [bits] if isinstance(bits, int) and bits > 0 else []
            blocks += [(1, size)] if isinstance(size, int) and size > 0 else []
            blocks += _block(weights.get("block_structure"))
            symmetries.append(weights.get("symmetric", True) is not False)
    return _Sizes((*widths, 8)[0], tuple(blocks), bool(symmetries) and not any(symmetries))


def _block(structure: Any) -> list[tuple[int, int]]:
    """Rows and columns of a block: a pair, or as older versions have it "128x128"."""
    parts = structure.split("x") if isinstance(structure, str) else structure
    if not isinstance(parts, list) or len(parts) != 2 or not all(str(part).isdecimal() for part in parts):
        return []
    height, width = int(parts[0]), int(parts[1])
    return [(height, width)] if height and width else []


def _decode(weights: Mapping[str, Weight], settings: Settings, where: str) -> dict[str, Weight]:
    sizes = _sizes(settings, where)
    decoded: dict[str, Weight] = {}
    modules = {name.removesuffix(".weight_scale") for name in weights if name.endswith(".weight_scale")}
    modules |= {name.removesuffix(".weight_packed") for name in weights if name.endswith(".weight_packed")}
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        is_part = module in modules and (kind in _PARTS or kind == "weight")
        if not is_part and not name.endswith(NOT_WEIGHTS):
            decoded[name] = weight
    for module in sorted(modules):
        decoded[f"{module}.weight"] = _matrix(weights, module, sizes, where)
    return decoded


def _matrix(weights: Mapping[str, Weight], module: str, sizes: _Sizes, where: str) -> Weight:
    packed = weights.get(f"{module}.weight_packed")
    if packed is not None and packed.dtype == mx.uint8:
        return _packed_floats(weights, module, packed, where)
    if packed is not None:
        return _packed_integers(weights, module, packed, sizes, where)
    scale = part(weights, f"{module}.weight_scale", where)
    name = f"{module}.weight"
    weight = part(weights, name, where)
    grid = ScaleGrid(scale, weight.shape, where, f"{name}_scale", sizes.blocks)
    if is_float8(weight):
        return Float8Weight(weight, grid)
    check_type(weight, name, where, mx.int8)
    zero_points = _zero_points(weights, name, sizes, where)
    zeros = None
    if zero_points is not None:
        zeros = ScaleGrid(zero_points, weight.shape, where, f"{name}_zero_point", sizes.blocks)
    return Int8Weight(weight, grid, zeros)


def _zero_points(weights: Mapping[str, Weight], name: str, sizes: _Sizes, where: str) -> Weight | None:
    if sizes.has_zero_points:
        return part(weights, f"{name}_zero_point", where)
    return weights.get(f"{name}_zero_point")


def _packed_floats(weights: Mapping[str, Weight], module: str, packed: Weight, where: str) -> Weight:
    scale = part(weights, f"{module}.weight_scale", where)
    columns = packed.num_columns * 2
    shape = (*packed.shape[:-1], columns)
    global_scale = weights.get(f"{module}.weight_global_scale")
    is_nvfp4 = "f8_e4m3" in scale.source_types or global_scale is not None
    size = 16 if is_nvfp4 else 32
    part(weights, f"{module}.weight_scale", where, *packed.shape[:-1], columns // size)
    if columns % size:
        raise ConversionError(f"{where}: {module} has {columns} columns, which {size} does not divide")
    if not is_nvfp4:
        check_type(scale, f"{module}.weight_scale", where, mx.uint8)
        return Mxfp4Weight(packed, scale, shape)
    value = 1.0 if global_scale is None else float(global_scale.value().astype(mx.float32).reshape(-1)[0])
    return Nvfp4Weight(packed, scale, value, shape)


def _packed_integers(
    weights: Mapping[str, Weight], module: str, packed: Weight, sizes: _Sizes, where: str
) -> Weight:
    name = f"{module}.weight"
    check_type(packed, f"{name}_packed", where, mx.int32, mx.uint32)
    scale = part(weights, f"{name}_scale", where)
    stored_shape = weights.get(f"{name}_shape")
    if stored_shape is not None:
        columns = int(np.array(stored_shape.value()).reshape(-1)[-1])
    else:
        columns = packed.num_columns * 32 // sizes.num_bits
    # A module may have bits of its own: its width tells.
    bits = next(
        (
            bits
            for bits in (sizes.num_bits, *_INTEGERS["pack-quantized"])
            if -(-columns * bits // 32) == packed.num_columns
        ),
        None,
    )
    shape = (*packed.shape[:-1], columns)
    if bits is None:
        raise ConversionError(
            f"{where}: tensor '{name}_packed' of shape {packed.shape} does not hold {columns} columns of "
            f"{', '.join(map(str, _INTEGERS['pack-quantized']))} bits without gaps"
        )
    grid = ScaleGrid(scale, shape, where, f"{name}_scale", sizes.blocks)
    zero_points = _zero_points(weights, name, sizes, where)
    if zero_points is not None:
        words = -(-shape[-2] * bits // 32)
        part(weights, f"{name}_zero_point", where, words, grid.num_groups)
        check_type(zero_points, f"{name}_zero_point", where, mx.int32, mx.uint32)
    return PackedIntWeight(
        packed, grid, zero_points, shape, bits, _order(weights, name, grid, columns, where)
    )


def _order(
    weights: Mapping[str, Weight], name: str, grid: ScaleGrid, columns: int, where: str
) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    """The group of each column with act-order, None without."""
    if f"{name}_g_idx" not in weights:
        return None
    stored = part(weights, f"{name}_g_idx", where, columns)
    index = np.array(stored.value()).astype(np.int64).reshape(columns)
    # -1 everywhere stands for an order that was never set.
    if np.all(index == -1) or np.array_equal(index, np.arange(columns) // grid.group_size):
        return None
    if not 0 <= index.min() <= index.max() < grid.num_groups:
        raise ConversionError(f"{where}: tensor '{name}_g_idx' names a group beyond {grid.num_groups}")
    return index


COMPRESSED_TENSORS = Method(_check, _decode)
