"""Tensors of a PyTorch file, read where they lie. No code of the file is run, nothing is unpickled by Python.

Since version 1.6 ``torch.save`` writes a zip archive whose entries are not compressed: NAME/data.pkl
describes the tensors, NAME/data/KEY holds the numbers of one storage. Before, a file was five pickles (a
magic number, a version, the machine, the tensors, the keys), then each storage in the order of the keys, its
length first (https://github.com/pytorch/pytorch, torch/serialization.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.errors import ConversionError
from mlxserve.json_file import read_json_object
from mlxserve_convert.mapped_file import STORED_DTYPES, MappedFile, StoredWeight
from mlxserve_convert.pickle_machine import PickleError, PickleMachine
from mlxserve_convert.weights import Weight
from mlxserve_convert.zip_spans import Span, ZipError, zip_spans

_STORAGES = {
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_DTYPES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
}
_UNTYPED = "U8"
_FUNCTIONS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
}
_MAX_PICKLE_BYTES = 256 << 20
_MAX_NUMBER = 1 << 62
_LEGACY_START = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
"""The pickle of the magic number 0x1950a86a20f9469cfc6c."""
_LEGACY_VERSION = 1001


@dataclass(frozen=True, slots=True)
class _Function:
    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Type:
    """Of a storage or a tensor, by safetensors' name."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    type_name: str
    num_elements: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    type_name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Torch:
    """What a file of tensors names: torch's storages and the functions that make tensors of them."""

    def __init__(self) -> None:
        self.storages: dict[str, _Storage] = {}

    def find(self, module: str, name: str) -> _Function | _Type:
        if (module, name) in _FUNCTIONS:
            return _Function(module, name)
        if module == "torch" and name in _STORAGES:
            return _Type(_STORAGES[name])
        if module == "torch" and name in _DTYPES:
            return _Type(_DTYPES[name])
        if module in ("torch", "torch.storage") and name == "UntypedStorage":
            return _Type(_UNTYPED)
        raise PickleError(
            f"names {_short(module)}.{_short(name)}, which no file of tensors needs; it is not run"
        )

    def refer(self, key: Any) -> _Storage:
        if not isinstance(key, tuple) or len(key) not in (5, 6) or key[0] != "storage":
            raise PickleError("refers to something that is no storage")
        _, kind, name, _, count, *view = key
        if not isinstance(kind, _Type) or not isinstance(name, str) or not _is_count(count):
            raise PickleError("refers to a storage that is not described as torch does it")
        if view and view[0] is not None:
            raise PickleError("has a storage that is a part of another one")
        storage = _Storage(name, kind.name, count)
        if self.storages.setdefault(name, storage) != storage:
            raise PickleError(f"describes storage {_short(name)} in two ways")
        return storage

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        name = function.name if isinstance(function, _Function) else None
        if name == "OrderedDict" and not arguments:
            return {}
        if name == "Size" and len(arguments) == 1 and isinstance(arguments[0], tuple):
            return arguments[0]
        if name == "_rebuild_parameter" and arguments and isinstance(arguments[0], _Tensor):
            return arguments[0]
        if name is not None and name.startswith("_rebuild_tensor") and len(arguments) >= 4:
            storage, offset, shape, strides = arguments[:4]
            dtype = arguments[6] if name.endswith("_v3") and len(arguments) > 6 else None
            return _tensor(storage, offset, shape, strides, dtype)
        raise PickleError("makes a call that torch does not make")


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, dtype: Any) -> _Tensor:
    is_known = isinstance(storage, _Storage) and _is_count(offset)
    if not is_known or not _are_counts(shape) or not _are_counts(strides) or len(shape) != len(strides):
        raise PickleError("has a tensor that is not described as torch does it")
    if dtype is not None and not isinstance(dtype, _Type):
        raise PickleError("has a tensor of a type that is not known")
    type_name = storage.type_name if dtype is None else dtype.name
    return _Tensor(storage, type_name, offset, tuple(shape), tuple(strides))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and len(values) <= 32 and all(_is_count(value) for value in values)


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:80] + "…"


class StridedWeight(Weight):
    """A tensor whose rows do not follow each other in the file: a transposed view, a slice of columns."""

    def __init__(
        self, file: MappedFile, offset: int, type_name: str, shape: Sequence[int], strides: Sequence[int]
    ) -> None:
        numpy_type, dtype = STORED_DTYPES[type_name]
        plain_name = str(dtype).removeprefix("mlx.core.")
        super().__init__(
            shape, dtype, frozenset({type_name.lower() if type_name.startswith("F8") else plain_name})
        )
        size = np.dtype(numpy_type).itemsize
        length = 1 + sum((count - 1) * step for count, step in zip(shape, strides, strict=True))
        flat = file.span(offset, length * size).view(numpy_type)
        self._view = np.lib.stride_tricks.as_strided(flat, shape, [step * size for step in strides])
        self._type_name = type_name

    def read(self, start: int, stop: int) -> mx.array:
        height = self.shape[-2]
        pieces = []
        for matrix in range(start // height, -(-stop // height)):
            whole = (
                self._view[np.unravel_index(matrix, self.shape[:-2])] if self._view.ndim > 2 else self._view
            )
            first = max(start - matrix * height, 0)
            pieces.append(whole[first : min(stop - matrix * height, height)])
        block = np.ascontiguousarray(np.concatenate(pieces))
        if self._type_name == "F64":
            block = block.astype(np.float32)
        array = mx.array(block)
        return array.view(self.dtype) if self._type_name in ("BF16", "BOOL") else array


def has_torch_files(folder: Path) -> bool:
    return any(folder.glob("pytorch_model*.bin"))


def read_torch_folder(folder: Path) -> tuple[list[MappedFile], dict[str, Weight]]:
    """All tensors of a folder of ``pytorch_model*.bin``. Raises ConversionError, naming the file, for what is
    missing, damaged, there twice, or would have to be run."""
    shards, listed = _shards(folder)
    files: list[MappedFile] = []
    weights: dict[str, Weight] = {}
    try:
        for shard in shards:
            files.append(MappedFile(shard))
            for name, weight in read_torch_file(files[-1]).items():
                if name in weights:
                    raise ConversionError(f"{shard}: tensor {name!r} is also in another file")
                weights[name] = weight
        missing = sorted(set(listed) - set(weights))
        if missing:
            raise ConversionError(
                f"{folder}: the index names {len(missing)} tensors that no file has, first {missing[0]!r}"
            )
    except BaseException:
        weights.clear()
        for file in files:
            file.close()
        raise
    return files, weights


def _shards(folder: Path) -> tuple[list[Path], list[str]]:
    index = folder / "pytorch_model.bin.index.json"
    if not index.is_file():
        return sorted(folder.glob("pytorch_model*.bin")), []
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{index}: has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ConversionError(f"{index}: {name!r} is not the name of a file beside it")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConversionError(
            f"{folder}: {len(missing)} of {len(names)} files that the index names are missing, first "
            f"{missing[0]}"
        )
    return [folder / name for name in names], list(weight_map)


def read_torch_file(file: MappedFile) -> dict[str, Weight]:
    """The tensors of one file by name."""
    start = file.span(0, min(len(file), len(_LEGACY_START))).tobytes()
    try:
        if start == _LEGACY_START:
            tensors, places = _legacy(file)
        elif start[:4] == b"PK\x03\x04":
            tensors, places = _archive(file)
        else:
            raise PickleError("is no file of torch.save (neither a zip archive nor the older format)")
        return {name: _weight(file, name, tensor, places) for name, tensor in tensors.items()}
    except (PickleError, ZipError) as error:
        raise ConversionError(f"{file.path}: {error}") from None


def _archive(file: MappedFile) -> tuple[dict[str, _Tensor], dict[str, Span]]:
    entries = zip_spans(file)
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise PickleError(f"has {len(pickles)} descriptions (NAME/data.pkl), expected 1")
    root = pickles[0].removesuffix("data.pkl")
    order = entries.get(f"{root}byteorder")
    if order is not None and file.span(*order).tobytes()[:8] != b"little":
        raise PickleError("holds numbers with the highest byte first, which is not supported")
    offset, length = entries[pickles[0]]
    if length > _MAX_PICKLE_BYTES:
        raise PickleError(f"has a description of {length} bytes, at most {_MAX_PICKLE_BYTES} are read")
    known = _Torch()
    tensors = _named(PickleMachine(file.span(offset, length).tobytes(), known).run())
    return tensors, {
        key: entries[f"{root}data/{key}"] for key in known.storages if f"{root}data/{key}" in entries
    }


def _legacy(file: MappedFile) -> tuple[dict[str, _Tensor], dict[str, Span]]:
    known = _Torch()
    data = file.span(0, len(file)).data
    at = len(_LEGACY_START)
    loaded = []
    for _ in range(4):
        machine = PickleMachine(data, known, at)
        loaded.append(machine.run())
        at = machine.end
    version, system, state, keys = loaded
    if type(version) is not int or version != _LEGACY_VERSION or not isinstance(system, dict):
        raise PickleError("is of a version of torch.save that is not known")
    if system.get("little_endian") is not True:
        raise PickleError("holds numbers with the highest byte first, which is not supported")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise PickleError("does not list its storages")
    places: dict[str, Span] = {}
    for key in keys:
        storage = known.storages.get(key)
        if storage is None or key in places:
            raise PickleError(f"lists storage {_short(key)}, which no tensor has")
        length = storage.num_elements * _item_size(storage.type_name)
        if at + 8 + length > len(file):
            raise PickleError(f"is truncated: the numbers end at byte {at + 8 + length}, it has {len(file)}")
        if int.from_bytes(data[at : at + 8], "little") != storage.num_elements:
            raise PickleError(f"is damaged: storage {_short(key)} has another length than its tensors say")
        places[key] = (at + 8, length)
        at += 8 + length
    return _named(state), places


def _named(state: Any) -> dict[str, _Tensor]:
    if not isinstance(state, dict) or not state:
        raise PickleError("holds no dictionary of tensors")
    for name, value in state.items():
        if not isinstance(name, str):
            raise PickleError("holds a dictionary with names that are no text")
        if not isinstance(value, _Tensor):
            raise PickleError(f"holds a {type(value).__name__} as {_short(name)!r}, which is no tensor")
    return state


def _item_size(type_name: str) -> int:
    return np.dtype(STORED_DTYPES[type_name][0]).itemsize


def _weight(file: MappedFile, name: str, tensor: _Tensor, places: dict[str, Span]) -> Weight:
    place = places.get(tensor.storage.key)
    if place is None:
        raise PickleError(f"has no numbers for tensor {_short(name)!r}")
    offset, length = place
    size = _item_size(tensor.type_name)
    if length < tensor.storage.num_elements * _item_size(tensor.storage.type_name):
        raise PickleError(f"has too few numbers for tensor {_short(name)!r}: {length} bytes")
    count = math.prod(tensor.shape)
    reach = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
    if count and ((reach + 1) * size > length or count * size > length):
        raise PickleError(
            f"has tensor {_short(name)!r} of {count} numbers from {tensor.offset} on, which reaches over its "
            f"storage of {length // size}"
        )
    begin = offset + tensor.offset * size
    if not count or _is_plain(tensor):
        return StoredWeight(file, begin if count else offset, tensor.type_name, tensor.shape)
    if len(tensor.shape) < 2:
        shape, strides = (1, *tensor.shape), (0, *tensor.strides)
        matrix = StridedWeight(file, begin, tensor.type_name, shape, strides)
        return _Vector(matrix)
    return StridedWeight(file, begin, tensor.type_name, tensor.shape, tensor.strides)


class _Vector(Weight):
    """The one row of a matrix."""

    def __init__(self, matrix: Weight) -> None:
        super().__init__(matrix.shape[1:], matrix.dtype, matrix.source_types)
        self._matrix = matrix

    def read(self, start: int, stop: int) -> mx.array:
        return self._matrix.read(start, stop)


def _is_plain(tensor: _Tensor) -> bool:
    """Whether the numbers follow each other. Strides along axes of one element mean nothing."""
    expected = 1
    for count, step in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if count != 1 and step != expected:
            return False
        expected *= count
    return True
