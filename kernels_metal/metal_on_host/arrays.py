"""mx.array to bytes and back, without a change of a bit (numpy has no bfloat16)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from metal_on_host.errors import MetalCallError
from metal_on_host.machine import Bytes

_INTEGERS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def is_row_contiguous(strides: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether strides (in elements) are those of a row-contiguous array; axes of size 1 do not matter."""
    expected = 1
    for stride, size in zip(reversed(strides), reversed(shape), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def layout(array: mx.array) -> tuple[Any, tuple[int, ...]]:
    """A numpy view of the array's memory as unsigned integers, and its strides in elements."""
    exported: Any = array.view(_INTEGERS[array.itemsize]) if array.dtype != mx.bool_ else array
    view: Any = np.asarray(memoryview(exported))
    return view, tuple(stride // array.itemsize for stride in view.strides)


def to_bytes(array: mx.array, *, make_contiguous: bool) -> tuple[Bytes, tuple[int, ...]]:
    """The bytes that a kernel sees (a copy) and the strides in elements.

    A strided array that must not be copied gives all the bytes from its first to its last element.
    """
    mx.eval(array)
    view, strides = layout(array)
    if make_contiguous and not is_row_contiguous(strides, array.shape):
        view = np.ascontiguousarray(view)
        strides = tuple(stride // array.itemsize for stride in view.strides)
    if array.size == 0:
        return np.empty(0, np.uint8), strides
    if min(strides, default=0) < 0:
        raise MetalCallError(
            "an input with negative strides cannot be passed with ensure_row_contiguous=False"
        )
    last = sum((size - 1) * stride for size, stride in zip(array.shape, strides, strict=True))
    span = np.lib.stride_tricks.as_strided(view, (last + 1,), (array.itemsize,))
    return span.view(np.uint8).copy(), strides


def from_bytes(data: Bytes, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """An array of `shape` and `dtype` from its bytes."""
    if dtype == mx.bool_:
        return mx.array(data.reshape(tuple(shape)) != 0)
    unsigned = _INTEGERS[dtype.size]
    numbers = np.frombuffer(data.tobytes(), f"uint{8 * dtype.size}").reshape(tuple(shape))
    return mx.array(numbers, dtype=unsigned).view(dtype)


def write_back(array: mx.array, data: Bytes) -> None:
    """Overwrites a row-contiguous array's memory, as a kernel that writes through an input does."""
    view, strides = layout(array)
    if not is_row_contiguous(strides, array.shape):
        raise MetalCallError("only a row-contiguous input can be written through")
    target = np.lib.stride_tricks.as_strided(view, (array.size,), (array.itemsize,), writeable=True)
    target.view(np.uint8)[:] = data
