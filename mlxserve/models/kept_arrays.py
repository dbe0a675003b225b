"""Index arrays that are made anew only where what they are made of differs from the last time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import mlx.core as mx

# No numpy here, whose code a step would read from memory that the kernels have just driven from the caches.

Values = TypeVar("Values")


class KeptArray(Generic[Values]):
    """The array that ``make`` made last, and what of."""

    def __init__(self, make: Callable[[Values], mx.array]) -> None:
        self._make = make
        self._values: Values | None = None
        self._array: mx.array | None = None

    def get(self, values: Values) -> mx.array:
        if self._array is None or values != self._values:
            self._values, self._array = values, self._make(values)
        return self._array


def ints(values: Sequence[int] | Sequence[Sequence[int]]) -> mx.array:
    """int32 of whole numbers, or of rows of them."""
    return mx.array(values, dtype=mx.int32)  # type: ignore[arg-type]


def padded_tables(tables: Sequence[tuple[int, ...]]) -> mx.array:
    """Block tables as one array, int32 [S, P], padded with 0."""
    width = max(map(len, tables))
    return ints([table + (0,) * (width - len(table)) for table in tables])
