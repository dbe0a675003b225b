"""Spans of files as weights, through memory maps: what is mapped is the system's cache, not our memory."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.errors import ConversionError
from mlxserve_convert.weights import Weight

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

STORED_DTYPES: dict[str, tuple[type[np.generic], mx.Dtype]] = {
    "F32": (np.float32, mx.float32),
    "F16": (np.float16, mx.float16),
    # numpy has no bfloat16 and no float8: their bits travel as integers.
    "BF16": (np.uint16, mx.bfloat16),
    "F64": (np.float64, mx.float32),
    "F8_E4M3": (np.uint8, mx.uint8),
    "F8_E5M2": (np.uint8, mx.uint8),
    "F8_E8M0": (np.uint8, mx.uint8),
    "I8": (np.int8, mx.int8),
    "U8": (np.uint8, mx.uint8),
    "BOOL": (np.uint8, mx.bool_),
    "I16": (np.int16, mx.int16),
    "U16": (np.uint16, mx.uint16),
    "I32": (np.int32, mx.int32),
    "U32": (np.uint32, mx.uint32),
    "I64": (np.int64, mx.int64),
    "U64": (np.uint64, mx.uint64),
}
"""By safetensors' name of a type: how its bytes are viewed, and what is read. Float64 is read as float32."""


class MappedFile:
    """A file, mapped read-only while it is used. ``close`` lets the map go once no view of it is left.
    ``kind`` is what it should be, for the error of an empty one."""

    def __init__(self, path: Path, kind: str | None = None) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ConversionError(f"{path}: is empty{f', not a {kind}' if kind else ''}") from None
        except OSError as error:
            raise ConversionError(f"{path}: cannot be read: {error.strerror}") from error

    def __len__(self) -> int:
        return len(self._map)

    def read(self, start: int, stop: int) -> bytes:
        return self._map[start:stop]

    def span(self, offset: int, num_bytes: int) -> Bytes:
        """A read-only view."""
        return np.frombuffer(self._map, np.uint8, num_bytes, offset)

    def prefetch(self, offset: int, num_bytes: int) -> None:
        """Tells the system that these bytes are read soon."""
        if num_bytes > 0:
            first = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, first, offset + num_bytes - first)

    def close(self) -> None:
        # If a view is still alive (in a traceback, say), the map goes with it.
        with contextlib.suppress(BufferError):
            self._map.close()


class StoredWeight(Weight):
    """A tensor as it lies in a file, rows one after the other. ``type_name`` is safetensors' name."""

    def __init__(self, file: MappedFile, offset: int, type_name: str, shape: Sequence[int]) -> None:
        self._numpy_type, dtype = STORED_DTYPES[type_name]
        self.type_name = type_name
        is_float8 = type_name.startswith("F8")
        name = type_name.lower() if is_float8 else str(dtype).removeprefix("mlx.core.")
        super().__init__(shape, dtype, frozenset({name}))
        self._file = file
        self._offset = offset
        self._row_bytes = self.num_columns * np.dtype(self._numpy_type).itemsize

    def matrix(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Rows as a view of the file, in the numpy type that holds their bits."""
        raw = self._file.span(self._offset + start * self._row_bytes, (stop - start) * self._row_bytes)
        return raw.view(self._numpy_type).reshape(stop - start, self.num_columns)

    def read(self, start: int, stop: int) -> mx.array:
        return self._array(self.matrix(start, stop))

    def read_columns(self, row_start: int, row_stop: int, start: int, stop: int) -> mx.array:
        return self._array(np.ascontiguousarray(self.matrix(row_start, row_stop)[:, start:stop]))

    def _array(self, view: np.ndarray[Any, Any]) -> mx.array:
        if self.type_name == "F64":
            return mx.array(view.astype(np.float32))
        array = mx.array(view)
        return array.view(self.dtype) if self.type_name in ("BF16", "BOOL") else array

    def prefetch(self, start: int, stop: int) -> None:
        self._file.prefetch(self._offset + start * self._row_bytes, (stop - start) * self._row_bytes)
