"""Tensors of a checkpoint that are read by rows, so that none has to be in memory as a whole.

The rows of a tensor are those of the matrix that is left when all axes but the last are flattened; a vector
is one row. Readers make the leaves (a span of a file, a decoded format); stacking, slicing and reordering
make new weights of them (``rows``, ``columns``, ``transposed``), which read only what they need. Where the
source is quantized in a layout that MLX has, ``layout`` says so, and ``read_packed`` gives the very numbers.

Everything but ``prefetch`` runs on the thread that owns mlx.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.errors import ConversionError
from mlxserve_convert.options import Mode

Index = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Layout:
    """A quantized layout of MLX: words of uint32 with the lowest bits first, one scale (and for affine one
    bias) a group of consecutive columns. ``scale_dtype`` is uint8 for the mx and nv modes."""

    mode: Mode
    bits: int
    group_size: int
    scale_dtype: mx.Dtype

    @property
    def has_biases(self) -> bool:
        return self.mode == "affine"

    def num_words(self, columns: int) -> int:
        return columns * self.bits // 32

    def num_bytes(self, rows: int, columns: int) -> int:
        per_group = self.scale_dtype.size * (2 if self.has_biases else 1)
        return rows * (columns * self.bits // 8 + columns // self.group_size * per_group)


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows in a ``Layout``: ``words`` [rows, columns * bits / 32] uint32, ``scales`` and ``biases``
    [rows, columns / group_size]; no biases but for affine."""

    words: mx.array
    scales: mx.array
    biases: mx.array | None

    def parts(self) -> tuple[mx.array, ...]:
        return (self.words, self.scales) if self.biases is None else (self.words, self.scales, self.biases)


def _packed(parts: Sequence[mx.array]) -> Packed:
    return Packed(parts[0], parts[1], parts[2] if len(parts) == 3 else None)


class Weight(ABC):
    """One tensor. ``dtype`` is that of ``read``; ``source_types`` name how the source keeps it (one or, after
    joining, several), ``is_quantized`` whether any of that is a quantized format. ``layout`` is None for
    floats and for formats that MLX does not have."""

    layout: Layout | None = None

    def __init__(
        self,
        shape: Sequence[int],
        dtype: mx.Dtype,
        source_types: frozenset[str],
        *,
        is_quantized: bool = False,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.source_types = source_types
        self.is_quantized = is_quantized

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        """Of the floats that ``read`` gives."""
        return self.num_elements * self.dtype.size

    @abstractmethod
    def read(self, start: int, stop: int) -> mx.array:
        """Rows [stop - start, columns] in ``dtype``."""

    def read_packed(self, start: int, stop: int) -> Packed:
        """The same rows in ``layout``, bit by bit what the source holds."""
        raise AssertionError(f"{type(self).__name__} has no layout")

    def read_columns(self, row_start: int, row_stop: int, start: int, stop: int) -> mx.array:
        """A part [row_stop - row_start, stop - start] of the matrix."""
        step = max(1, _BLOCK_ELEMENTS // max(self.num_columns, 1))
        blocks = [
            mx.contiguous(self.read(row, min(row + step, row_stop))[:, start:stop])
            for row in range(row_start, row_stop, step)
        ]
        mx.eval(blocks)
        return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks)

    def prefetch(self, start: int, stop: int) -> None:  # noqa: B027
        """Tells the system that these rows are read soon. May be called from any thread."""

    def release(self) -> None:  # noqa: B027
        """Drops what was kept for reads to come."""

    @property
    def whole_bytes(self) -> int:
        """Memory that a read of any part takes beside that part: of operations that know no rows."""
        return 0

    def value(self) -> mx.array:
        """The whole tensor in its shape."""
        return self.read(0, self.num_rows).reshape(self.shape)


_BLOCK_ELEMENTS = 1 << 22


class Leaf(Weight):
    """A weight of an array that is in memory already (small tensors, tests)."""

    def __init__(self, array: mx.array, source_type: str) -> None:
        super().__init__(array.shape, array.dtype, frozenset({source_type}))
        self._matrix = array.reshape(self.num_rows, self.num_columns)

    def read(self, start: int, stop: int) -> mx.array:
        return self._matrix[start:stop]


class Derived(Weight):
    """What is made of other weights: what it keeps, and the memory that it takes, are theirs."""

    def __init__(self, sources: Sequence[Weight], shape: Sequence[int], dtype: mx.Dtype) -> None:
        super().__init__(
            shape,
            dtype,
            frozenset().union(*(source.source_types for source in sources)),
            is_quantized=any(source.is_quantized for source in sources),
        )
        self._sources = tuple(sources)

    def prefetch(self, start: int, stop: int) -> None:
        for source in self._sources:
            source.prefetch(start, stop)

    def release(self) -> None:
        for source in self._sources:
            source.release()

    @property
    def whole_bytes(self) -> int:
        return max((source.whole_bytes for source in self._sources), default=0)


class Rows(Derived):
    """Rows of other weights of equal columns, in any order: slices, stacks, concatenations and reorderings
    along all axes but the last. ``index`` has the shape of the result without its last axis and counts the
    rows of all parts, one part after the other."""

    def __init__(self, parts: Sequence[Weight], index: Index) -> None:
        first = parts[0]
        assert all(part.num_columns == first.num_columns for part in parts)
        super().__init__(parts, (*index.shape, first.num_columns), _common_dtype(parts))
        self._firsts = np.cumsum([0, *(part.num_rows for part in parts)])
        self._index = index.reshape(-1)
        if all(part.layout == first.layout for part in parts):
            self.layout = first.layout

    def _runs(self, start: int, stop: int) -> list[tuple[Weight, int, int]]:
        """The wanted rows as (part, first, last + 1) in order."""
        wanted = self._index[start:stop]
        if not wanted.size:
            return []
        part_of = np.searchsorted(self._firsts, wanted, side="right") - 1
        breaks = np.flatnonzero((np.diff(wanted) != 1) | (np.diff(part_of) != 0)) + 1
        edges = [0, *breaks.tolist(), wanted.size]
        runs = []
        for begin, end in itertools.pairwise(edges):
            part = int(part_of[begin])
            first = int(wanted[begin] - self._firsts[part])
            runs.append((self._sources[part], first, first + end - begin))
        return runs

    def _gathered(
        self, start: int, stop: int, read: Callable[[Weight, int, int], tuple[mx.array, ...]]
    ) -> tuple[mx.array, ...]:
        """What ``read`` gives for every run, joined. Many short runs of one part are read as one span and
        then put in order, if that span is not much larger."""
        runs = self._runs(start, stop)
        parts = {id(part) for part, *_ in runs}
        if len(parts) == 1 and len(runs) > 1:
            part = runs[0][0]
            low, high = min(run[1] for run in runs), max(run[2] for run in runs)
            if high - low <= 2 * (stop - start):
                offset = int(self._firsts[self._sources.index(part)]) + low
                order = mx.array(self._index[start:stop] - offset)
                return tuple(array[order] for array in read(part, low, high))
        pieces = [read(part, first, last) for part, first, last in runs]
        if len(pieces) == 1:
            return pieces[0]
        return tuple(mx.concatenate(list(arrays)) for arrays in zip(*pieces, strict=True))

    def read(self, start: int, stop: int) -> mx.array:
        if start == stop:
            return mx.zeros((0, self.num_columns), self.dtype)
        return self._gathered(start, stop, lambda p, i, j: (p.read(i, j).astype(self.dtype),))[0]

    def read_packed(self, start: int, stop: int) -> Packed:
        assert self.layout is not None
        parts = self._gathered(start, stop, lambda p, i, j: p.read_packed(i, j).parts())
        return _packed(parts)

    def prefetch(self, start: int, stop: int) -> None:
        for part, first, last in self._runs(start, stop):
            part.prefetch(first, last)

    def parts_and_index(self) -> tuple[tuple[Weight, ...], Index]:
        """For rows of rows, which are rows of the same parts."""
        return self._sources, self._index


def rows(parts: Sequence[Weight], index: Index) -> Weight:
    """Rows of ``parts`` by their numbers, which count through all parts. ``index`` gives the shape."""
    index = np.asarray(index, dtype=np.int64)
    if len(parts) == 1:
        (part,) = parts
        if isinstance(part, Rows):
            inner_parts, inner = part.parts_and_index()
            return Rows(inner_parts, inner[index])
    return Rows(parts, index)


def row_numbers(weight: Weight, first: int = 0) -> Index:
    """The numbers of a weight's rows in the shape of its leading axes, from ``first`` on."""
    return np.arange(first, first + weight.num_rows, dtype=np.int64).reshape(weight.shape[:-1])


class Columns(Derived):
    """Columns [first, last) of every row. A layout survives where the cut falls between groups and words."""

    def __init__(self, source: Weight, first: int, last: int) -> None:
        super().__init__([source], (*source.shape[:-1], last - first), source.dtype)
        self._source = source
        self._first, self._last = first, last
        layout = source.layout
        if layout is not None and all(_is_group_edge(layout, edge) for edge in (first, last)):
            self.layout = layout

    def read(self, start: int, stop: int) -> mx.array:
        return self._source.read_columns(start, stop, self._first, self._last)

    def read_packed(self, start: int, stop: int) -> Packed:
        layout = self.layout
        assert layout is not None
        whole = self._source.read_packed(start, stop)
        words = slice(layout.num_words(self._first), layout.num_words(self._last))
        groups = slice(self._first // layout.group_size, self._last // layout.group_size)
        biases = None if whole.biases is None else whole.biases[:, groups]
        return Packed(whole.words[:, words], whole.scales[:, groups], biases)


def _is_group_edge(layout: Layout, column: int) -> bool:
    return column % layout.group_size == 0 and column * layout.bits % 32 == 0


class JoinedColumns(Derived):
    """Weights side by side along the last axis."""

    def __init__(self, parts: Sequence[Weight]) -> None:
        columns = sum(part.num_columns for part in parts)
        super().__init__(parts, (*parts[0].shape[:-1], columns), _common_dtype(parts))
        layout = parts[0].layout
        edges = np.cumsum([part.num_columns for part in parts]).tolist()
        is_whole = layout is not None and all(_is_group_edge(layout, edge) for edge in edges)
        if is_whole and all(part.layout == layout for part in parts):
            self.layout = layout

    def read(self, start: int, stop: int) -> mx.array:
        return mx.concatenate([part.read(start, stop).astype(self.dtype) for part in self._sources], axis=-1)

    def read_packed(self, start: int, stop: int) -> Packed:
        pieces = [part.read_packed(start, stop).parts() for part in self._sources]
        joined = tuple(mx.concatenate(list(arrays), axis=-1) for arrays in zip(*pieces, strict=True))
        return _packed(joined)


class Transposed(Derived):
    """The last two axes exchanged."""

    def __init__(self, source: Weight) -> None:
        *outer, num_rows, num_columns = source.shape
        super().__init__([source], (*outer, num_columns, num_rows), source.dtype)
        self._source = source

    def read(self, start: int, stop: int) -> mx.array:
        height, width = self.shape[-2], self.shape[-1]
        pieces = []
        for matrix in range(start // height, -(-stop // height)):
            first = max(start - matrix * height, 0)
            last = min(stop - matrix * height, height)
            part = self._source.read_columns(matrix * width, (matrix + 1) * width, first, last)
            pieces.append(part.T)
        return mx.contiguous(pieces[0]) if len(pieces) == 1 else mx.concatenate(pieces)

    def prefetch(self, start: int, stop: int) -> None:
        height, width = self.shape[-2], self.shape[-1]
        self._source.prefetch(start // height * width, -(-stop // height) * width)


class Mapped(Derived):
    """A function of one element each, or of a whole row, applied to every row. ``dtype`` is its result's."""

    def __init__(self, source: Weight, function: Callable[[mx.array], mx.array], dtype: mx.Dtype) -> None:
        super().__init__([source], source.shape, dtype)
        self._source = source
        self._function = function

    def read(self, start: int, stop: int) -> mx.array:
        return self._function(self._source.read(start, stop))


class Computation:
    """An operation that knows no rows: its inputs are read as a whole, and its results kept until one of
    them is released."""

    def __init__(
        self, inputs: Sequence[Weight], function: Callable[[list[mx.array]], list[mx.array]]
    ) -> None:
        self.inputs = tuple(inputs)
        self._function = function
        self._results: list[mx.array] | None = None

    def results(self) -> list[mx.array]:
        if self._results is None:
            self._results = self._function([source.value() for source in self.inputs])
            mx.eval(self._results)
        return self._results

    def release(self) -> None:
        self._results = None
        for source in self.inputs:
            source.release()


class Computed(Weight):
    """One result of a ``Computation``."""

    def __init__(
        self, computation: Computation, index: int, shape: Sequence[int], dtype: mx.Dtype, num_bytes: int
    ) -> None:
        inputs = computation.inputs
        super().__init__(
            shape,
            dtype,
            frozenset().union(*(source.source_types for source in inputs)),
            is_quantized=any(source.is_quantized for source in inputs),
        )
        self._computation = computation
        self._index = index
        self._whole_bytes = num_bytes

    def read(self, start: int, stop: int) -> mx.array:
        result = self._computation.results()[self._index]
        return result.reshape(self.num_rows, self.num_columns)[start:stop]

    def release(self) -> None:
        self._computation.release()

    @property
    def whole_bytes(self) -> int:
        return self._whole_bytes


def compute(inputs: Sequence[Weight], function: Callable[[list[mx.array]], list[mx.array]]) -> list[Weight]:
    """The results of ``function`` on whole arrays, as weights. Shapes come from arrays that are never
    evaluated. Raises what ``function`` raises on them."""
    blank = [mx.zeros(source.shape, source.dtype) for source in inputs]
    results = function(blank)
    computation = Computation(inputs, function)
    total = sum(source.num_bytes for source in inputs) + sum(result.nbytes for result in results)
    inner = max((source.whole_bytes for source in inputs), default=0)
    return [
        Computed(computation, index, result.shape, result.dtype, total + inner)
        for index, result in enumerate(results)
    ]


def _common_dtype(parts: Sequence[Weight]) -> mx.Dtype:
    dtypes = {part.dtype for part in parts}
    if len(dtypes) == 1:
        return parts[0].dtype
    if all(mx.issubdtype(dtype, mx.floating) for dtype in dtypes):
        # bfloat16 with float16 has no common narrow type.
        return mx.float32
    raise ConversionError(f"tensors of different types are joined: {', '.join(sorted(map(str, dtypes)))}")


def quantized_types(weights: Iterable[Weight]) -> list[str]:
    """The quantized formats among some weights, sorted."""
    return sorted({name for weight in weights if weight.is_quantized for name in weight.source_types})
