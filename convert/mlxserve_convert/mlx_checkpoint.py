"""Checkpoints in MLX's own quantized layouts: ``weight``, ``scales`` and ``biases`` as one weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxserve.errors import ConversionError
from mlxserve_convert.weights import Layout, Mode, Packed, Weight

DEFAULT_GROUP_SIZES: dict[Mode, int] = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
FIXED_BITS: dict[Mode, int] = {"mxfp4": 4, "mxfp8": 8, "nvfp4": 4}
"""Modes whose name says the bits; their group size is the default one, always."""


class PackedWeight(Weight):
    """A matrix of which the source holds packed words, scales and biases as tensors of their own."""

    def __init__(
        self, shape: tuple[int, ...], words: Weight, scales: Weight, biases: Weight | None, layout: Layout
    ) -> None:
        name = f"{layout.mode} {layout.bits}-bit" if layout.mode == "affine" else layout.mode
        dtype = layout.scale_dtype if layout.has_biases else mx.bfloat16
        super().__init__(shape, dtype, frozenset({name}), is_quantized=True)
        self.layout = layout
        self._parts = (words, scales, biases)

    def read(self, start: int, stop: int) -> mx.array:
        assert self.layout is not None
        return dequantized(self.read_packed(start, stop), self.layout, self.dtype)

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
        columns, rest = divmod(words.num_columns * 32, layout.bits)
        if words.dtype != mx.uint32 or rest or columns != scales.num_columns * layout.group_size:
            raise ConversionError(
                f"{where}: '{module}.weight' of shape {words.shape} and '{module}.scales' of shape "
                f"{scales.shape} are no {layout.bits}-bit matrix in groups of {layout.group_size}"
            )
        joined[f"{module}.weight"] = PackedWeight((*words.shape[:-1], columns), words, scales, biases, layout)
    return joined


def _layout(module: str, entry: Mapping[str, Any], scales: Weight, where: str) -> Layout:
    mode: Mode = entry.get("mode", "affine")
    if mode not in DEFAULT_GROUP_SIZES:
        raise ConversionError(f"{where}: {module} has quantization mode {mode!r}, which is not known")
    bits = entry.get("bits", FIXED_BITS.get(mode))
    group_size = entry.get("group_size", DEFAULT_GROUP_SIZES[mode])
    if not isinstance(bits, int) or not isinstance(group_size, int):
        raise ConversionError(f"{where}: {module} has bits {bits!r} and group size {group_size!r}")
    return Layout(mode, bits, group_size, scales.dtype if mode == "affine" else mx.uint8)
