"""What a method is, and what all of them need: parts by name, bit fields, scales of any granularity."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.errors import ConversionError
from mlxserve_convert.weights import Weight

Settings = Mapping[str, Any]
Decoder = Callable[[Mapping[str, Weight], Settings, str], dict[str, Weight]]
"""Tensors, the quantization settings of the config, and where the checkpoint lies (for errors)."""

NOT_WEIGHTS = (
    ".input_scale",
    ".input_scale_ub",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".output_zero_point",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
)
"""How activations and caches were to be quantized, which an import to other kernels does without."""


@dataclass(frozen=True, slots=True)
class Method:
    """``check`` raises ConversionError for a variant that ``decode`` does not know, from the settings alone.
    ``decode`` gives one weight for each matrix, under the name that an unquantized checkpoint would use."""

    check: Callable[[Settings, str], None]
    decode: Decoder


def refused(settings: Settings, where: str, reason: str, form: object = None) -> ConversionError:
    """One line that names the method, the format and what is wrong with it."""
    if form is None:
        form = settings.get("format") or settings.get("fmt") or settings.get("version")
    return ConversionError(
        f"{where}: is quantized: quant_method {settings.get('quant_method')!r}, format {form!r:.60}, which "
        f"is not supported ({reason:.200}); convert from the unquantized checkpoint"
    )


def part(weights: Mapping[str, Weight], name: str, where: str, *shape: int) -> Weight:
    """A tensor that has to be there, in this shape if one is given."""
    weight = weights.get(name)
    if weight is None:
        raise ConversionError(f"{where}: tensor {name!r} is missing")
    if shape and weight.shape != shape:
        raise ConversionError(f"{where}: tensor {name!r} has shape {weight.shape}, expected {shape}")
    return weight


def decoded_modules(
    weights: Mapping[str, Weight], parts: Collection[str], matrix: Callable[[str], Weight]
) -> dict[str, Weight]:
    """All tensors, with ``matrix(module)`` as the weight of every module that has a ``qweight``, in place of
    its ``parts``."""
    modules = {name.removesuffix(".qweight") for name in weights if name.endswith(".qweight")}
    decoded: dict[str, Weight] = {}
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        if module not in modules or kind not in parts:
            decoded[name] = weight
    for module in sorted(modules):
        decoded[f"{module}.weight"] = matrix(module)
    return decoded


def check_type(weight: Weight, name: str, where: str, *types: mx.Dtype) -> None:
    if weight.dtype not in types:
        names = " or ".join(str(dtype).removeprefix("mlx.core.") for dtype in types)
        found = str(weight.dtype).removeprefix("mlx.core.")
        raise ConversionError(f"{where}: tensor {name!r} has type {found}, expected {names}")


def fields(words: mx.array, bits: int, count: int) -> mx.array:
    """The first ``count`` numbers of ``bits`` bits in every row of words [rows, n] uint32, which follow each
    other from the lowest bit on and may lie across two words."""
    if 32 % bits == 0:
        shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
        split = (words[..., None] >> shifts) & mx.array((1 << bits) - 1, mx.uint32)
        return split.reshape(words.shape[0], -1)[:, :count]
    firsts = np.arange(count, dtype=np.int64) * bits
    offsets = (firsts % 32).astype(np.uint32)
    low = columns_at(words, firsts // 32) >> mx.array(offsets)
    # A shift by 32 is undefined: numbers that start a word have no part in the next one.
    has_rest = offsets + bits > 32
    nexts = np.where(has_rest, firsts // 32 + 1, firsts // 32)
    high = columns_at(words, nexts) << mx.array(np.where(has_rest, 32 - offsets, 0).astype(np.uint32))
    joined = mx.where(mx.array(has_rest), low | high, low)
    return joined & mx.array((1 << bits) - 1, mx.uint32)


def columns_at(array: mx.array, index: np.ndarray[Any, np.dtype[np.int64]]) -> mx.array:
    """``array[:, index]``, by numpy, which is ten times faster at that than MLX on the CPU."""
    return mx.array(np.take(np.array(array, copy=False), index, axis=1))


def fields_between(words: Weight, bits: int, start: int, stop: int) -> mx.array:
    """Numbers [rows, stop - start] of every row of a packed weight [rows, ceil(n * bits / 32)], of which only
    the words in question are read."""
    first, word_start, word_stop = _span(bits, start, stop)
    part = words.read_columns(0, words.num_rows, word_start, word_stop).view(mx.uint32)
    return fields(part, bits, stop - first)[:, start - first :]


def fields_between_rows(words: Weight, bits: int, start: int, stop: int) -> mx.array:
    """Numbers [stop - start, columns] of a weight that is packed along its first axis."""
    first, word_start, word_stop = _span(bits, start, stop)
    part = mx.contiguous(words.read(word_start, word_stop).view(mx.uint32).T)
    return fields(part, bits, stop - first)[:, start - first :].T


def _span(bits: int, start: int, stop: int) -> tuple[int, int, int]:
    """The number that starts the word in which (or before which) ``start`` lies, and the words to read."""
    first = start // 32 * 32
    return first, first * bits // 32, -(-stop * bits // 32)


class ScaleGrid:
    """Scales (or zero points) of a matrix [..., rows, columns]: one for all of it, one a row, one a row and
    group of columns, or one a block.

    ``group_size`` is the number of columns that share one; ``num_groups`` of them make a row. ``blocks`` are
    the rows and columns that may share one, as the settings have it; a group of columns is a block of one
    row. Raises ConversionError if ``scale`` fits in none of these ways.
    """

    def __init__(
        self,
        scale: Weight,
        shape: tuple[int, ...],
        where: str,
        name: str,
        blocks: Sequence[tuple[int, int]] = (),
    ) -> None:
        *outer, num_rows, num_columns = shape
        self._scale = scale
        self._height = num_rows
        per_matrix = scale.num_elements == int(np.prod(outer, dtype=np.int64))
        rows_and_groups = _grid_shape(scale.shape, tuple(outer), num_rows)
        if scale.num_elements == 1 or per_matrix:
            rows_and_groups = (1, 1)
        elif rows_and_groups is None:
            raise _no_fit(scale, shape, where, name)
        self._grid_rows, self.num_groups = rows_and_groups
        self._is_single = scale.num_elements == 1
        self._is_by_rows = (
            not self._is_single and self._grid_rows == num_rows and scale.num_columns == self.num_groups
        )
        for height, width in ((num_rows, num_columns), (1, num_columns), *blocks):
            if rows_and_groups == (-(-num_rows // height), -(-num_columns // width)):
                self._block_rows, self.group_size = height, width
                break
        else:
            raise _no_fit(scale, shape, where, name)

    def rows(self, start: int, stop: int) -> mx.array:
        """Float32 [stop - start, num_groups]."""
        scale = self._scale
        if self._is_by_rows:
            return values_of(scale, scale.read(start, stop)).reshape(stop - start, self.num_groups)
        numbers = np.arange(start, stop)
        grid = numbers // self._height * self._grid_rows + numbers % self._height // self._block_rows
        whole = self.all().reshape(-1, self.num_groups)
        return whole[mx.array(np.zeros_like(grid) if self._is_single else grid)]

    def all(self) -> mx.array:
        """Every scale, float32: for grids of blocks and rows, which are small."""
        return values_of(self._scale, self._scale.value())


def _grid_shape(shape: tuple[int, ...], outer: tuple[int, ...], num_rows: int) -> tuple[int, int] | None:
    """Rows and columns of a grid, without the axes that it has in common with the matrices."""
    if shape[: len(outer)] != outer:
        return None
    rest = shape[len(outer) :]
    if len(rest) == 1 and rest[0] == num_rows:
        return num_rows, 1
    return (rest[0], rest[1]) if len(rest) == 2 else None


def _no_fit(scale: Weight, shape: tuple[int, ...], where: str, name: str) -> ConversionError:
    return ConversionError(
        f"{where}: tensor {name!r} of shape {scale.shape} does not fit a matrix of shape {shape}"
    )


def values_of(weight: Weight, array: mx.array) -> mx.array:
    """Scales as float32, whatever they are stored as: floats, or exponents of two (e8m0, or plain bytes)."""
    return exponents_of_two(array) if array.dtype == mx.uint8 else array.astype(mx.float32)


def exponents_of_two(array: mx.array) -> mx.array:
    """2 ** (e - 127) for e8m0 numbers (Open Compute Project, "OCP Microscaling Formats", 5.4.1)."""
    numbers = np.array(array)
    values = np.ldexp(np.float32(1), np.minimum(numbers, 254).astype(np.int32) - 127)
    return mx.array(np.where(numbers == 255, np.float32(np.nan), values))


def floats_dtype(weights: Mapping[str, Weight]) -> mx.Dtype | None:
    """The type that most of a checkpoint's plain floats have: what the model computes in."""
    counts: dict[mx.Dtype, int] = {}
    for weight in weights.values():
        if not weight.is_quantized and mx.issubdtype(weight.dtype, mx.floating):
            counts[weight.dtype] = counts.get(weight.dtype, 0) + weight.num_elements
    return max(counts, key=lambda dtype: counts[dtype], default=None)
