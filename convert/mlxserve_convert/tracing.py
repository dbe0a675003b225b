"""mlx-lm's own renaming and reshaping of checkpoints (``sanitize``), run on weights instead of arrays.

A model's ``sanitize`` takes and gives mlx arrays: it stacks experts, splits fused matrices, moves axes. Here
it gets stand-ins that record what is done to them, and its module's ``mx`` is replaced while it runs. What
keeps the last axis whole, cuts it, or works on single elements becomes weights that are read by rows;
everything else becomes a computation on whole tensors. Results are the same numbers either way.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve_convert.weights import (
    Columns,
    JoinedColumns,
    Mapped,
    Transposed,
    Weight,
    compute,
    row_numbers,
    rows,
)

_MODELS = "mlx_lm.models."


def sanitized(
    model: Any, weights: Mapping[str, Weight], dropped: list[str] | None = None
) -> dict[str, Weight]:
    """``model.sanitize`` on weights. Raises what it raises for tensors that do not fit.

    To ``dropped`` go the names of those that it neither gives back nor computes with.
    """
    if not hasattr(model, "sanitize"):
        return dict(weights)
    traced: dict[str, Any] = {name: Traced(weight) for name, weight in weights.items()}
    with _recording():
        result = model.sanitize(dict(traced))
    if dropped is not None:
        kept = {id(value) for value in result.values()}
        dropped += [name for name, value in traced.items() if not value.is_used and id(value) not in kept]
    return {
        name: value.weight if isinstance(value, Traced) else _leaf(value) for name, value in result.items()
    }


def _leaf(array: mx.array) -> Weight:
    from mlxserve_convert.weights import Leaf

    return Leaf(array, str(array.dtype).removeprefix("mlx.core."))


@contextmanager
def _recording() -> Iterator[None]:
    """Puts the recorder in the place of ``mx`` in every model module of mlx-lm."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(_MODELS) and getattr(module, "mx", None) is mx
    ]
    recorder: Any = _Recorder()
    for module in modules:
        vars(module)["mx"] = recorder
    try:
        yield
    finally:
        for module in modules:
            vars(module)["mx"] = mx


class Traced:
    """What ``sanitize`` sees of a weight: an array's attributes and methods, each of which records."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self.is_used = False
        """Whether its values went anywhere; looking at its shape is no use."""

    @property
    def weight(self) -> Weight:
        self.is_used = True
        return self._weight

    @property
    def shape(self) -> tuple[int, ...]:
        return self._weight.shape

    @property
    def dtype(self) -> mx.Dtype:
        return self._weight.dtype

    @property
    def ndim(self) -> int:
        return len(self._weight.shape)

    @property
    def size(self) -> int:
        return self._weight.num_elements

    @property
    def nbytes(self) -> int:
        return self._weight.num_bytes

    @property
    def itemsize(self) -> int:
        return self._weight.dtype.size

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def item(self) -> Any:
        return self.weight.value().item()

    def tolist(self) -> Any:
        return self.weight.value().tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    @property
    def T(self) -> Any:
        return self.transpose()

    def transpose(self, *axes: Any) -> Any:
        order = _flat(axes) or tuple(reversed(range(self.ndim)))
        order = tuple(axis % self.ndim for axis in order)
        return _transpose(self, order)

    def swapaxes(self, first: int, second: int) -> Any:
        order = list(range(self.ndim))
        first, second = first % self.ndim, second % self.ndim
        order[first], order[second] = order[second], order[first]
        return _transpose(self, tuple(order))

    def moveaxis(self, source: int, destination: int) -> Any:
        order = [axis for axis in range(self.ndim) if axis != source % self.ndim]
        order.insert(destination % self.ndim, source % self.ndim)
        return _transpose(self, tuple(order))

    def reshape(self, *shape: Any) -> Any:
        return _reshape(self, _full_shape(_flat(shape), self.size))

    def flatten(self, start_axis: int = 0, end_axis: int = -1) -> Any:
        start, end = start_axis % self.ndim, end_axis % self.ndim
        return _reshape(self, (*self.shape[:start], -1, *self.shape[end + 1 :]))

    def squeeze(self, axis: int | Sequence[int] | None = None) -> Any:
        axes = range(self.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
        gone = {a % self.ndim for a in axes if self.shape[a] == 1}
        return _reshape(self, tuple(size for a, size in enumerate(self.shape) if a not in gone))

    def astype(self, dtype: mx.Dtype, stream: Any = None) -> Any:
        if dtype == self.dtype:
            return self
        return Traced(Mapped(self.weight, lambda block: block.astype(dtype), dtype))

    def __getitem__(self, key: Any) -> Any:
        return _getitem(self, key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(mx.array, name):
            raise AttributeError(name)
        return lambda *args, **kwargs: _generic(getattr(mx.array, name), (self, *args), kwargs)


def _operator(function: Callable[[Any, Any], Any], *, is_swapped: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Traced, other: Any) -> Any:
        if isinstance(other, int | float):
            return _elementwise(
                self, lambda block: function(other, block) if is_swapped else function(block, other)
            )
        return _generic(function, (other, self) if is_swapped else (self, other), {})

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(Traced, f"__{_name}__", _operator(getattr(operator, _name)))
    setattr(Traced, f"__r{_name}__", _operator(getattr(operator, _name), is_swapped=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "matmul"):
    setattr(Traced, f"__{_name}__", _operator(getattr(operator, _name)))
setattr(Traced, "__neg__", lambda self: _elementwise(self, operator.neg))  # noqa: B010


_ELEMENTWISE = frozenset({"exp", "log", "negative", "abs", "square", "sqrt", "rsqrt", "sigmoid", "softplus"})


class _Recorder:
    """``mlx.core`` whose functions accept stand-ins."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(mx, name)
        own = _FUNCTIONS.get(name)
        if own is None and name in _ELEMENTWISE:

            def own(array: Any) -> Any:
                return _elementwise(array, value)

        if isinstance(value, type) or not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            if not _holds_traced((args, kwargs)):
                return value(*args, **kwargs)
            return _generic(value, args, kwargs) if own is None else own(*args, **kwargs)

        return call


def _holds_traced(value: Any) -> bool:
    if isinstance(value, Traced):
        return True
    if isinstance(value, list | tuple):
        return any(_holds_traced(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_traced(item) for item in value.values())
    return False


def _generic(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any function at all, on whole arrays."""
    inputs: list[Weight] = []

    def collect(value: Any) -> Any:
        if isinstance(value, Traced):
            inputs.append(value.weight)
            return _Place(len(inputs) - 1)
        if isinstance(value, list | tuple):
            return type(value)(collect(item) for item in value)
        if isinstance(value, dict):
            return {key: collect(item) for key, item in value.items()}
        return value

    places = collect((args, kwargs))
    is_single = True

    def run(arrays: list[mx.array]) -> list[mx.array]:
        nonlocal is_single
        filled_args, filled_kwargs = _fill(places, arrays)
        result = function(*filled_args, **filled_kwargs)
        is_single = isinstance(result, mx.array)
        return [result] if is_single else list(result)

    results = [Traced(weight) for weight in compute(inputs, run)]
    return results[0] if is_single else results


class _Place:
    """Where an array goes when a recorded call is run."""

    def __init__(self, index: int) -> None:
        self.index = index


def _fill(value: Any, arrays: list[mx.array]) -> Any:
    if isinstance(value, _Place):
        return arrays[value.index]
    if isinstance(value, list | tuple):
        return type(value)(_fill(item, arrays) for item in value)
    if isinstance(value, dict):
        return {key: _fill(item, arrays) for key, item in value.items()}
    return value


def _elementwise(array: Any, function: Callable[[mx.array], mx.array]) -> Any:
    dtype = function(mx.zeros((1,), array.dtype)).dtype
    return Traced(Mapped(array.weight, function, dtype))


def _flat(values: tuple[Any, ...]) -> tuple[int, ...]:
    if len(values) == 1 and isinstance(values[0], list | tuple):
        return tuple(values[0])
    return values


def _full_shape(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    if -1 not in shape:
        return shape
    known = 1
    for length in shape:
        known *= 1 if length == -1 else length
    return tuple(size // max(known, 1) if length == -1 else length for length in shape)


def _reshape(array: Any, shape: Sequence[int]) -> Any:
    shape = _full_shape(tuple(shape), array.size)
    if shape == array.shape:
        return array
    if shape and array.ndim and shape[-1] == array.shape[-1] and array.size:
        numbers = row_numbers(array.weight).reshape(shape[:-1])
        return Traced(rows([array.weight], numbers))
    return _generic(mx.reshape, (array, shape), {})


def _transpose(array: Any, order: tuple[int, ...]) -> Any:
    last = array.ndim - 1
    if order == tuple(range(array.ndim)):
        return array
    if order[-1] == last:
        return Traced(rows([array.weight], row_numbers(array.weight).transpose(order[:-1])))
    if order == (*range(last - 1), last, last - 1):
        return Traced(Transposed(array.weight))
    return _generic(mx.transpose, (array, order), {})


def _getitem(array: Any, key: Any) -> Any:
    keys = key if isinstance(key, tuple) else (key,)
    if _holds_traced(keys) or any(isinstance(k, bool | mx.array) for k in keys):
        return _generic(operator.getitem, (array, key), {})
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        missing = array.ndim - sum(k is not None and k is not Ellipsis for k in keys)
        keys = (*keys[:at], *[slice(None)] * missing, *keys[at + 1 :])
    missing = array.ndim - sum(k is not None for k in keys)
    keys = (*keys, *[slice(None)] * missing)
    *leading, last = keys
    if not isinstance(last, slice):
        return _generic(operator.getitem, (array, key), {})
    first, end, step = last.indices(array.shape[-1])
    if step != 1:
        return _generic(operator.getitem, (array, key), {})
    weight = array.weight
    if any(k is None or k != slice(None) for k in leading):
        weight = rows([weight], row_numbers(weight)[tuple(leading)])
    if (first, end) != (0, array.shape[-1]):
        weight = Columns(weight, first, max(end, first))
    return Traced(weight)


def _as_traced(arrays: Sequence[Any]) -> list[Any]:
    return [array if isinstance(array, Traced) else Traced(_leaf(array)) for array in arrays]


def _stack(arrays: Sequence[Any], axis: int = 0, stream: Any = None) -> Any:
    items = _as_traced(arrays)
    axis %= items[0].ndim + 1
    if len({item.shape for item in items}) > 1:
        raise ValueError(f"tensors of different shapes are stacked: {[item.shape for item in items]}")
    if not items[0].ndim or axis == items[0].ndim:
        return _generic(mx.stack, (items, axis), {})
    return _joined_rows(items, lambda numbers: np.stack(numbers, axis=axis))


def _concatenate(arrays: Sequence[Any], axis: int = 0, stream: Any = None) -> Any:
    items = _as_traced(arrays)
    axis %= items[0].ndim
    for item in items:
        rests = [[size for at, size in enumerate(i.shape) if at != axis] for i in (item, items[0])]
        if rests[0] != rests[1]:
            raise ValueError(f"tensors of shapes {items[0].shape} and {item.shape} are joined on axis {axis}")
    if axis == items[0].ndim - 1:
        return Traced(JoinedColumns([item.weight for item in items]))
    return _joined_rows(items, lambda numbers: np.concatenate(numbers, axis=axis))


def _joined_rows(items: list[Any], join: Callable[[list[Any]], Any]) -> Any:
    numbers, first = [], 0
    for item in items:
        numbers.append(row_numbers(item.weight, first))
        first += item.weight.num_rows
    return Traced(rows([item.weight for item in items], join(numbers)))


def _split(array: Any, indices_or_sections: Any, axis: int = 0, stream: Any = None) -> list[Any]:
    axis %= array.ndim
    length = array.shape[axis]
    if isinstance(indices_or_sections, int):
        if length % indices_or_sections:
            raise ValueError(f"an axis of {length} does not split into {indices_or_sections} parts")
        step = length // indices_or_sections
        edges = list(range(0, length + 1, step))
    else:
        edges = [0, *indices_or_sections, length]
    lead = (slice(None),) * axis
    return [array[(*lead, slice(first, last), Ellipsis)] for first, last in itertools.pairwise(edges)]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "stack": _stack,
    "concatenate": _concatenate,
    "split": _split,
    "contiguous": lambda array, *args, **kwargs: array,
    "transpose": lambda array, axes=None, **kwargs: array.transpose(*([] if axes is None else [axes])),
    "swapaxes": lambda array, axis1, axis2, **kwargs: array.swapaxes(axis1, axis2),
    "moveaxis": lambda array, source, destination, **kwargs: array.moveaxis(source, destination),
    "reshape": lambda array, shape, **kwargs: array.reshape(shape),
    "flatten": lambda array, start_axis=0, end_axis=-1, **kwargs: array.flatten(start_axis, end_axis),
    "squeeze": lambda array, axis=None, **kwargs: array.squeeze(axis),
    "expand_dims": lambda array, axis, **kwargs: _expand_dims(array, axis),
}


def _expand_dims(array: Any, axis: int | Sequence[int]) -> Any:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    total = array.ndim + len(axes)
    places = {a % total for a in axes}
    sizes = iter(array.shape)
    return _reshape(array, tuple(1 if at in places else next(sizes) for at in range(total)))
