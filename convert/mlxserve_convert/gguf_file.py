"""Reading of GGUF files through a memory map.

The format is described in the ggml project's ``docs/gguf.md``. Only little-endian files of version 2
and 3 are read. Whatever is wrong with a file ends in a ConversionError of one line that names the file.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from mlxserve.errors import ConversionError
from mlxserve_convert.mapped_file import MappedFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_MAX_ARRAY = 1 << 24
"""Items of a metadata array; vocabularies have up to a few million."""
_MAX_STRING = 1 << 26
"""Bytes of a text, tensor name or key."""
_MAX_NAME = 512
"""Characters of a tensor's name; the format's own writers stop at 63."""
_SHOWN = 100
"""Characters of a name in a message."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a file. ``shape`` is in row-major order (rows first, columns last), in elements."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class GGUFFile:
    """An open GGUF file: ``metadata`` by key and ``tensors`` by name, in file order.

    The file stays mapped until ``close``; arrays from ``data`` are views of the map and must be gone
    (or copied) before that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = MappedFile(path, "GGUF file")
        try:
            parser = _Parser(path, self._map)
            self.version: int = parser.version
            self.metadata: dict[str, Any] = parser.read_metadata()
            self.tensors: dict[str, GGUFTensor] = parser.read_tensors(self.metadata)
        except BaseException:
            self._map.close()
            raise

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The raw bytes of a tensor, as a read-only view."""
        tensor = self.tensors[name]
        return self._map.span(tensor.offset, tensor.num_bytes)

    def prefetch(self, offset: int, num_bytes: int) -> None:
        self._map.prefetch(offset, num_bytes)

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _plain(text: str) -> str:
    """For messages: keys of a damaged file hold anything."""
    return text if text.isprintable() else ascii(text)


class _Parser:
    """One pass over the header. Every read is checked against the end of the file."""

    def __init__(self, path: Path, data: MappedFile) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0
        magic = self._take(4, "the magic number")
        if magic != _MAGIC:
            raise ConversionError(f"{path}: not a GGUF file: expected magic {_MAGIC!r}, found {magic!r}")
        self.version = self._scalar("I", "the version")
        if self.version not in _VERSIONS:
            raise ConversionError(self._version_message())
        self._num_tensors = self._scalar("Q", "the tensor count")
        self._num_keys = self._scalar("Q", "the metadata count")

    def _version_message(self) -> str:
        swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
        if swapped in _VERSIONS:
            return f"{self._path}: is a big-endian GGUF file, only little-endian ones are read"
        known = " or ".join(str(version) for version in _VERSIONS)
        return f"{self._path}: unknown GGUF version: expected {known}, found {self.version}"

    def _take(self, count: int, what: str) -> bytes:
        end = self._at + count
        if end > self._size:
            raise ConversionError(
                f"{self._path}: truncated: {_plain(what)} needs bytes up to {end}, the file has {self._size}"
            )
        raw = self._data.read(self._at, end)
        self._at = end
        return raw

    def _scalar(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code), what))[0]

    def _string(self, what: str) -> str:
        length = self._scalar("Q", what)
        if length > _MAX_STRING and self._at + length <= self._size:
            raise ConversionError(
                f"{self._path}: {_plain(what)} is a text of {length} bytes, at most {_MAX_STRING}"
            )
        raw = self._take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConversionError(f"{self._path}: {_plain(what)} holds text that is not UTF-8") from error

    def read_metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(self._num_keys):
            key = self._string("a metadata key")
            if key in metadata:
                raise ConversionError(f"{self._path}: metadata key {key[:_SHOWN]!r} occurs twice")
            shown = key[:_SHOWN]
            metadata[key] = self._value(self._scalar("I", shown), shown)
        return metadata

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        raise ConversionError(f"{self._path}: metadata key {key!r} has unknown value type {kind}")

    def _array(self, key: str) -> list[Any]:
        kind = self._scalar("I", key)
        count = self._scalar("Q", key)
        if count > _MAX_ARRAY and self._at + count <= self._size:
            raise ConversionError(
                f"{self._path}: metadata key {key!r} is an array of {count} items, at most {_MAX_ARRAY}"
            )
        if kind in _SCALARS:
            code = _SCALARS[kind]
            raw = self._take(count * struct.calcsize("<" + code), key)
            return list(struct.unpack(f"<{count}{code}", raw))
        if kind == _STRING:
            return [self._string(key) for _ in range(count)]
        raise ConversionError(f"{self._path}: metadata key {key!r} is an array of unknown type {kind}")

    def read_tensors(self, metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(self._num_tensors):
            name, shape, kind, offset = self._tensor_entry()
            if name in entries:
                raise ConversionError(f"{self._path}: tensor {name!r} occurs twice")
            entries[name] = (shape, kind, offset)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_whole = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not is_whole or alignment <= 0 or alignment & (alignment - 1):
            raise ConversionError(
                f"{self._path}: general.alignment must be a power of two, found {str(alignment)[:40]!r}"
            )
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, (shape, kind, offset) in entries.items():
            if offset % alignment:
                raise ConversionError(
                    f"{self._path}: tensor {name!r} has offset {offset}, no multiple of the alignment "
                    f"{alignment}"
                )
            tensors[name] = self._tensor(name, shape, kind, start + offset)
        self._check_overlaps(tensors)
        return tensors

    def _check_overlaps(self, tensors: dict[str, GGUFTensor]) -> None:
        in_order = sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes))
        for before, tensor in itertools.pairwise(in_order):
            if tensor.offset < before.offset + before.num_bytes:
                raise ConversionError(
                    f"{self._path}: tensors {before.name!r} and {tensor.name!r} share bytes"
                )

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor name")
        if len(name) > _MAX_NAME:
            raise ConversionError(
                f"{self._path}: tensor {name[:_SHOWN]!r} has a name of {len(name)} characters, "
                f"at most {_MAX_NAME}"
            )
        num_dims = self._scalar("I", name)
        if num_dims > _MAX_DIMENSIONS:
            raise ConversionError(
                f"{self._path}: tensor {name!r} has {num_dims} dimensions, at most {_MAX_DIMENSIONS} are "
                "allowed"
            )
        dims = tuple(self._scalar("Q", name) for _ in range(num_dims))
        if 0 in dims:
            raise ConversionError(f"{self._path}: tensor {name!r} of shape {dims[::-1]} is empty")
        return name, dims[::-1], self._scalar("I", name), self._scalar("Q", name)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        try:
            ggml_type = GGMLQuantizationType(kind)
        except ValueError as error:
            raise ConversionError(f"{self._path}: tensor {name!r} has unknown type {kind}") from error
        block, block_bytes = GGML_QUANT_SIZES[ggml_type]
        columns = shape[-1] if shape else 1
        if columns % block:
            raise ConversionError(
                f"{self._path}: tensor {name!r} of type {ggml_type.name} has {columns} columns, "
                f"which is no multiple of {block}"
            )
        tensor = GGUFTensor(name, ggml_type.name, shape, offset, 0)
        num_bytes = tensor.num_elements // block * block_bytes
        if offset + num_bytes > self._size:
            raise ConversionError(
                f"{self._path}: truncated: tensor {name!r} ends at byte {offset + num_bytes}, "
                f"the file has {self._size}"
            )
        return GGUFTensor(name, ggml_type.name, shape, offset, num_bytes)
