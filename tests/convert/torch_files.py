"""Files as ``torch.save`` writes them, made by Python's pickler with stand-ins for torch's names."""

from __future__ import annotations

import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_STORAGES = (
    "Float",
    "Double",
    "Half",
    "BFloat16",
    "Long",
    "Int",
    "Short",
    "Char",
    "Byte",
    "Bool",
    "ComplexFloat",
)
_FUNCTIONS = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_qtensor")
_DTYPES = ("float8_e4m3fn", "bfloat16")
_KINDS = {
    np.dtype(np.float32): "Float",
    np.dtype(np.float64): "Double",
    np.dtype(np.float16): "Half",
    np.dtype(np.uint16): "BFloat16",
    np.dtype(np.int64): "Long",
    np.dtype(np.int32): "Int",
    np.dtype(np.int8): "Char",
    np.dtype(np.uint8): "Byte",
    np.dtype(np.bool_): "Bool",
}


class _ByName:
    """Pickled as a name that can be imported while ``torch_names`` is open."""

    def __init__(self, module: str, name: str) -> None:
        self.__module__ = module
        self.__qualname__ = self.__name__ = name

    def __call__(self, *arguments: Any) -> Any:
        raise AssertionError("is only pickled")

    def __reduce__(self) -> str:
        return self.__name__


@dataclass(frozen=True)
class Storage:
    key: str
    numbers: np.ndarray
    """In one axis; bfloat16 as uint16."""
    kind: str = ""


@dataclass(frozen=True)
class Tensor:
    """A view of a storage; ``dtype`` makes it one of the third form, of an untyped storage."""

    storage: Storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    is_parameter: bool = False
    dtype: str = ""
    function: str = "_rebuild_tensor_v2"


def plain(key: str, values: np.ndarray, **more: Any) -> Tensor:
    strides = tuple(step // values.itemsize for step in np.ascontiguousarray(values).strides)
    return Tensor(Storage(key, values.reshape(-1)), values.shape, strides, **more)


@contextmanager
def torch_names() -> Iterator[dict[str, Any]]:
    names: dict[str, Any] = {}
    modules = {name: types.ModuleType(name) for name in ("torch", "torch._utils", "torch.storage")}
    for module, found in (
        ("torch", [f"{kind}Storage" for kind in _STORAGES] + list(_DTYPES)),
        ("torch._utils", list(_FUNCTIONS)),
        ("torch.storage", ["UntypedStorage"]),
    ):
        for name in found:
            names[name] = _ByName(module, name)
            setattr(modules[module], name, names[name])
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield names
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


class _Call:
    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._function, self._arguments


class _Pickler(pickle.Pickler):
    def __init__(self, names: dict[str, Any], is_legacy: bool, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._names, self._is_legacy = names, is_legacy

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Storage):
            return None
        kind = value.kind or f"{_KINDS[value.numbers.dtype]}Storage"
        key = ("storage", self._names[kind], value.key, "cuda:0", value.numbers.size)
        return (*key, None) if self._is_legacy else key


def _lowered(value: Any, names: dict[str, Any]) -> Any:
    """Tensors as calls of torch's functions."""
    if isinstance(value, dict):
        result = type(value)((key, _lowered(item, names)) for key, item in value.items())
        if isinstance(value, OrderedDict):
            vars(result).update(vars(value))
        return result
    if not isinstance(value, Tensor):
        return value
    parts: tuple[Any, ...] = (value.storage, value.offset, value.shape, value.strides, False, OrderedDict())
    function = names[value.function]
    if value.dtype:
        parts, function = (*parts, names[value.dtype]), names["_rebuild_tensor_v3"]
    call = _Call(function, parts)
    return _Call(names["_rebuild_parameter"], (call, True, OrderedDict())) if value.is_parameter else call


def pickled(state: Any, *, protocol: int = 2, is_legacy: bool = False) -> bytes:
    with torch_names() as names:
        buffer = io.BytesIO()
        _Pickler(names, is_legacy, buffer, protocol).dump(_lowered(state, names))
    return buffer.getvalue()


def storages_of(state: Any) -> dict[str, Storage]:
    return {value.storage.key: value.storage for value in state.values() if isinstance(value, Tensor)}


def write_archive(
    path: Path,
    description: bytes,
    storages: dict[str, Storage],
    *,
    compression: int = zipfile.ZIP_STORED,
    byteorder: str = "little",
) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", description)
        archive.writestr("archive/byteorder", byteorder)
        for key, storage in storages.items():
            info = zipfile.ZipInfo(f"archive/data/{key}")
            info.compress_type = compression
            # torch pads heads so that numbers begin at multiples of 64: any length will do.
            info.extra = b"FB" + (len(key) + 5).to_bytes(2, "little") + b"Z" * (len(key) + 5)
            archive.writestr(info, storage.numbers.tobytes())
        archive.writestr("archive/version", "3\n")


def save(path: Path, state: dict[str, Any], *, protocol: int = 2) -> None:
    write_archive(path, pickled(state, protocol=protocol), storages_of(state))


def save_legacy(path: Path, state: dict[str, Any]) -> None:
    """The format before version 1.6."""
    storages = storages_of(state)
    keys = sorted(storages)
    system = {
        "protocol_version": 1001,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    with path.open("wb") as file:
        for value in (0x1950A86A20F9469CFC6C, 1001, system):
            pickle.dump(value, file, protocol=2)
        file.write(pickled(state, is_legacy=True))
        pickle.dump(keys, file, protocol=2)
        for key in keys:
            file.write(storages[key].numbers.size.to_bytes(8, "little"))
            file.write(storages[key].numbers.tobytes())
