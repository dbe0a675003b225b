"""Checkpoints in MLX's own quantized layouts: ``weight``, ``scales`` and ``biases`` as one weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxserve.errors import ConversionError
from mlxserve_convert.options import BITS, DEFAULT_GROUP_SIZE, GROUP_SIZES, MODES, Mode
from mlxserve_convert.weights import Layout, Packed, Weight

DEFAULT_GROUP_SIZES: dict[Mode, int] = {
    mode: DEFAULT_GROUP_SIZE if fixed is None else fixed[1] for mode, fixed in MODES.items()
}
FIXED_BITS: dict[Mode, int] = {mode: fixed[0] for mode, fixed in MODES.items() if fixed is not None}
"""Modes whose name says the bits; their group size is the default one, always."""
_GLOBAL_SCALE_UNIT = 448.0 * 6.0
"""The largest product of an e4m3 scale and an e2m1 number: MLX stores global scales in units of it."""


class PackedWeight(Weight):
    """A matrix of which the source holds packed words, scales and biases as tensors of their own.

    ``global_scale`` (nvfp4 experts of mlx-lm): float32 [experts], one for each matrix. It is applied by
    ``read`` alone, so such a weight shows no layout.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        words: Weight,
        scales: Weight,
        biases: Weight | None,
        layout: Layout,
        global_scale: Weight | None = None,
    ) -> None:
        name = f"{layout.mode} {layout.bits}-bit" if layout.mode == "affine" else layout.mode
        dtype = layout.scale_dtype if layout.has_biases else mx.bfloat16
        super().__init__(shape, dtype, frozenset({name}), is_quantized=True)
        self.layout = layout if global_scale is None else None
        self._layout = layout
        self._parts = (words, scales, biases)
        self._global_scale = global_scale

    def read(self, start: int, stop: int) -> mx.array:
        packed = self.read_packed(start, stop)
        if self._global_scale is None:
            return dequantized(packed, self._layout, self.dtype)
        values = dequantized(packed, self._layout, mx.float32)
        matrices = mx.arange(start, stop) // self.shape[-2]
        scales = self._global_scale.value().astype(mx.float32).reshape(-1) / _GLOBAL_SCALE_UNIT
        return (values * scales[matrices][:, None]).astype(self.dtype)

    def read_packed(self, start: int, stop: int) -> Packed:
        words, scales, biases = self._parts
        return Packed(
            words.read(start, stop),
            scales.read(start, stop),
            None if biases is None else biases.read(start, stop),
        )

    def prefetch(self, start: int, stop: int) -> None:
        for part in self._parts:
            if part is not None:
                part.prefetch(start, stop)


def dequantized(packed: Packed, layout: Layout, dtype: mx.Dtype) -> mx.array:
    """The floats of packed rows, computed in float32 where the layout allows it and then rounded once."""
    if layout.has_biases:
        assert packed.biases is not None
        values = mx.dequantize(
            packed.words,
            packed.scales.astype(mx.float32),
            packed.biases.astype(mx.float32),
            group_size=layout.group_size,
            bits=layout.bits,
        )
        return values.astype(dtype)
    return mx.dequantize(
        packed.words,
        packed.scales,
        group_size=layout.group_size,
        bits=layout.bits,
        mode=layout.mode,
        dtype=dtype,
    )


def mlx_quantization(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of a config that is quantized in MLX's layouts, None for any other."""
    for key in ("quantization", "quantization_config"):
        settings = config.get(key)
        if isinstance(settings, dict) and settings.get("quant_method") is None:
            if settings.get("bits") is not None:
                return settings
            if settings.get("mode") in FIXED_BITS:
                return settings
    return None


def join_packed(weights: Mapping[str, Weight], settings: Mapping[str, Any], where: str) -> dict[str, Weight]:
    """The tensors of an MLX checkpoint with each quantized module's parts as one weight."""
    joined = dict(weights)
    for name in [name for name in weights if name.endswith(".scales")]:
        module = name.removesuffix(".scales")
        words, scales = joined.get(f"{module}.weight"), joined.pop(name)
        if words is None:
            raise ConversionError(f"{where}: tensor '{module}.weight' is missing")
        entry = settings.get(module)
        layout = _layout(module, entry if isinstance(entry, dict) else settings, scales, where)
        biases = joined.pop(f"{module}.biases", None)
        if layout.has_biases != (biases is not None):
            state = "is missing" if layout.has_biases else f"has no place in mode {layout.mode}"
            raise ConversionError(f"{where}: tensor '{module}.biases' {state}")
        global_scale = joined.pop(f"{module}.global_scale", None)
        if global_scale is not None and global_scale.num_elements != math.prod(words.shape[:-2]):
            raise ConversionError(
                f"{where}: tensor '{module}.global_scale' has shape {global_scale.shape}, expected "
                f"{words.shape[:-2]}"
            )
        columns, rest = divmod(words.num_columns * 32, layout.bits)
        is_whole = rest == 0 and columns == scales.num_columns * layout.group_size
        shapes = {part.shape[:-1] for part in (words, scales, biases) if part is not None}
        if words.dtype != mx.uint32 or not is_whole or len(shapes) > 1 or len(words.shape) < 2:
            raise ConversionError(
                f"{where}: '{module}.weight' of shape {words.shape} and '{module}.scales' of shape "
                f"{scales.shape} are no {layout.bits}-bit matrix in groups of {layout.group_size}"
            )
        shape = (*words.shape[:-1], columns)
        joined[f"{module}.weight"] = PackedWeight(shape, words, scales, biases, layout, global_scale)
    return joined


def _layout(module: str, entry: Mapping[str, Any], scales: Weight, where: str) -> Layout:
    mode: Mode = entry.get("mode", "affine")
    if not isinstance(mode, str) or mode not in DEFAULT_GROUP_SIZES:
        raise ConversionError(f"{where}: {module} has quantization mode {mode!r}, which is not known")
    bits = entry.get("bits", FIXED_BITS.get(mode))
    group_size = entry.get("group_size", DEFAULT_GROUP_SIZES[mode])
    if mode == "affine":
        is_possible = bits in BITS and group_size in GROUP_SIZES
    else:
        is_possible = (bits, group_size) == (FIXED_BITS[mode], DEFAULT_GROUP_SIZES[mode])
    if not is_possible:
        raise ConversionError(
            f"{where}: {module} has bits {bits!r} and group size {group_size!r}, which are not possible in "
            f"mode {mode}"
        )
    return Layout(mode, bits, group_size, scales.dtype if mode == "affine" else mx.uint8)
