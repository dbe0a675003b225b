"""From a plan to files: block by block, read ahead by the system, computed here, written by a thread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import psutil

from mlxserve.errors import ConversionError
from mlxserve_convert.mapped_file import STORED_DTYPES
from mlxserve_convert.options import OnProgress, PlannedTensor, Progress
from mlxserve_convert.plan import Plan, Target
from mlxserve_convert.rounding import quantized_rows
from mlxserve_convert.shards import ShardedWriter, Stream
from mlxserve_convert.weights import Packed

_MAX_BLOCK_ELEMENTS = 1 << 23
_BYTES_PER_ELEMENT = 48
"""Of a block, all its copies together: the source, float32, results and those that wait to be written."""
_BASE_BYTES = 400 << 20
"""The process without any weights."""
_FLOAT16_MAX = 65504.0
_STORED_NAMES = {
    str(dtype): name for name, (_, dtype) in STORED_DTYPES.items() if not name.startswith(("F8", "F64"))
}
_SUFFIXES = ("weight", "scales", "biases")
MEMORY_SHARE = 0.25


def memory_limit(wanted: int | None) -> int:
    """Bytes of anonymous memory that a conversion may take."""
    limit = wanted if wanted is not None else int(psutil.virtual_memory().total * MEMORY_SHARE)
    if limit < 2 * _BASE_BYTES:
        raise ConversionError(
            f"--memory-limit {limit / 2**20:.0f}M is too little, at least {2 * _BASE_BYTES >> 20}M are needed"
        )
    return limit


class StreamedOutput:
    """Writes the targets of a plan into a folder. ``warnings`` and ``tensors`` say what came out."""

    def __init__(self, plan: Plan, folder: Path, limit: int, dtype: str | None) -> None:
        self._plan = plan
        self._limit = limit
        self._dtype = dtype
        self._block_elements = min(_MAX_BLOCK_ELEMENTS, (limit - _BASE_BYTES) // _BYTES_PER_ELEMENT)
        names = [name for target in plan.targets for name in _names(target)]
        self._shards = ShardedWriter(folder, names)
        self.warnings: list[str] = []
        self.tensors: list[PlannedTensor] = []
        self.num_resumed = 0

    def write(self, on_progress: OnProgress | None) -> None:
        total = self._plan.num_bytes
        done = 0
        try:
            for target in self._plan.targets:
                settled = self._settled(target)
                self.tensors.append(settled.planned())
                if target.name in self._shards.written:
                    self.num_resumed += 1
                else:
                    self._write_target(settled, done, total, on_progress)
                done += settled.num_bytes
                if on_progress is not None:
                    on_progress(Progress(done, total, target.name))
            self._shards.finish()
        finally:
            self._shards.close()

    def _settled(self, target: Target) -> Target:
        """A tensor with values that float16 has no room for keeps its own type, with a warning. The scales of
        a layout that is kept get the wanted type only if that changes none of them."""
        weight = target.weight
        needed = weight.whole_bytes
        if needed > self._limit - _BASE_BYTES:
            raise ConversionError(
                f"{target.name}: is computed from whole tensors and needs {needed / 1e9:.2f} GB of memory, "
                f"--memory-limit leaves {(self._limit - _BASE_BYTES) / 1e9:.2f} GB"
            )
        if target.is_kept and target.layout is not None and self._dtype is not None:
            return self._with_scales(target, self._dtype)
        if target.dtype != mx.float16 or weight.dtype == mx.float16:
            return target
        too_large = 0
        for start, stop in self._blocks(target):
            values = mx.abs(weight.read(start, stop).astype(mx.float32))
            too_large += int(np.count_nonzero(np.array((values > _FLOAT16_MAX) & mx.isfinite(values))))
        if not too_large:
            return target
        name = str(weight.dtype).removeprefix("mlx.core.")
        self.warnings.append(f"{target.name}: {too_large} values are too large for float16, it stays {name}")
        layout = target.layout
        if layout is not None and layout.has_biases:
            layout = replace(layout, scale_dtype=weight.dtype)
        return replace(target, dtype=weight.dtype, layout=layout)

    def _with_scales(self, target: Target, name: str) -> Target:
        layout = target.layout
        dtype: mx.Dtype = getattr(mx, name)
        if layout is None or not layout.has_biases or layout.scale_dtype == dtype:
            return target
        changed = 0
        for start, stop in self._blocks(target):
            _, *parts = target.weight.read_packed(start, stop).parts()
            for part in parts:
                wide = part.astype(mx.float32)
                changed += int(np.count_nonzero(np.array(wide.astype(dtype).astype(mx.float32) != wide)))
        if changed:
            raise ConversionError(
                f"--dtype {name} would change {changed} scales of {target.name}, use float32"
            )
        return replace(target, layout=replace(layout, scale_dtype=dtype))

    def _blocks(self, target: Target) -> list[tuple[int, int]]:
        weight = target.weight
        step = max(1, self._block_elements // max(weight.num_columns, 1))
        return [(row, min(row + step, weight.num_rows)) for row in range(0, weight.num_rows, step)]

    def _write_target(self, target: Target, done: int, total: int, on_progress: OnProgress | None) -> None:
        streams = self._shards.begin(_tensors(target))
        blocks = self._blocks(target)
        for index, (start, stop) in enumerate(blocks):
            if index + 1 < len(blocks):
                target.weight.prefetch(*blocks[index + 1])
            self._write_block(target, streams, start, stop)
            if on_progress is not None:
                part = target.num_bytes * stop // target.weight.num_rows
                on_progress(Progress(done + part, total, target.name))
        target.weight.release()
        mx.clear_cache()
        self._shards.end()

    def _write_block(self, target: Target, streams: list[Stream], start: int, stop: int) -> None:
        arrays = _block(target, start, stop)
        mx.eval(arrays)
        for stream, array in zip(streams, arrays, strict=True):
            row_bytes = array.nbytes // max(stop - start, 1)
            plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
            self._shards.write(stream, start * row_bytes, np.array(plain, copy=False))


def _block(target: Target, start: int, stop: int) -> list[mx.array]:
    """The parts of some rows of a target, in the order of its streams."""
    weight, layout = target.weight, target.layout
    if layout is None:
        return [mx.contiguous(weight.read(start, stop).astype(target.dtype))]
    if target.is_kept:
        packed = weight.read_packed(start, stop)
        scales = packed.scales if not layout.has_biases else packed.scales.astype(layout.scale_dtype)
        biases = None if packed.biases is None else packed.biases.astype(layout.scale_dtype)
        return [mx.contiguous(part) for part in Packed(packed.words, scales, biases).parts()]
    values = weight.read(start, stop).astype(target.dtype)
    mx.eval(values)
    _check_finite(target, values, start)
    return list(quantized_rows(values, layout, target.importance).parts())


_EXPONENTS = {
    "mlx.core.float32": (mx.uint32, 0x7F800000),
    "mlx.core.float16": (mx.uint16, 0x7C00),
    "mlx.core.bfloat16": (mx.uint16, 0x7F80),
}
"""The bits that are all set in infinity and NaN."""


def _check_finite(target: Target, values: mx.array, start: int) -> None:
    """Quantized, a NaN would be a number like any other, and an infinity would take its group with it."""
    kind, exponent = _EXPONENTS[str(values.dtype)]
    raw = np.array(values.view(kind), copy=False) & exponent
    if not raw.size or raw.max() < exponent:
        return
    row = start + int(np.argmax((raw == exponent).any(axis=1)))
    raise ConversionError(f"{target.name}: row {row} holds NaN or infinite values, which cannot be quantized")


def _names(target: Target) -> list[str]:
    if target.layout is None:
        return [target.name]
    suffixes = _SUFFIXES if target.layout.has_biases else _SUFFIXES[:2]
    return [f"{target.module}.{suffix}" for suffix in suffixes]


def _tensors(target: Target) -> list[tuple[str, str, tuple[int, ...]]]:
    weight, layout = target.weight, target.layout
    if layout is None:
        return [(target.name, _STORED_NAMES[str(target.dtype)], weight.shape)]
    outer = weight.shape[:-1]
    scales = (*outer, weight.num_columns // layout.group_size)
    shapes = ((*outer, layout.num_words(weight.num_columns)), scales, scales)
    scale_type = _STORED_NAMES[str(layout.scale_dtype)]
    types = ("U32", scale_type, scale_type)
    return list(zip(_names(target), types, shapes, strict=False))
