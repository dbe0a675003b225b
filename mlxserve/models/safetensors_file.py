"""The weight files of a model folder: which they are, what they hold, and that they are whole.

Format: 8 bytes little-endian header length, a JSON header with ``data_offsets`` per tensor, the data
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.errors import ModelLoadError
from mlxserve.json_file import read_json_object

_MAX_HEADER_BYTES = 100_000_000
_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


_FILE_NAME = re.compile(r"[^/\\\x00-\x1f]{1,200}\.\w+")


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """``dtype`` is safetensors' name of the type. The data lies in ``file`` from byte ``offset`` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file: Path
    offset: int


def read_tensors(folder: Path) -> tuple[tuple[Path, ...], dict[str, SourceTensor]]:
    """The shards of a folder and all their tensors by name.

    Raises ModelLoadError, naming the file, for whatever is missing, damaged or there twice.
    """
    shards, listed = _find_shards(folder)
    tensors: dict[str, SourceTensor] = {}
    for shard in shards:
        for tensor in read_header(shard):
            if tensor.name in tensors:
                raise ModelLoadError(f"{shard}: tensor {tensor.name!r} is also in another file")
            tensors[tensor.name] = tensor
    missing = sorted(set(listed) - set(tensors))
    if missing:
        raise ModelLoadError(
            f"{folder}: the index names {len(missing)} tensors that no file has, first {missing[0][:200]!r}"
        )
    return shards, tensors


def _find_shards(path: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    """The files to read, and the index's map of names to files (empty without an index)."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        shards = sorted(path.glob("model*.safetensors"))
        if not shards:
            raise ModelLoadError(_no_weights(path))
        return tuple(shards), {}
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise ModelLoadError(f"{index}: {str(name)[:80]!r} is not the name of a file beside it")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{path}: {len(missing)} of {len(names)} files that the index names are missing, first "
            f"{missing[0]}"
        )
    return tuple(path / name for name in names), weight_map


def _no_weights(path: Path) -> str:
    others = sorted(
        file.name for pattern in ("*.bin", "*.pth", "*.safetensors") for file in path.glob(pattern)
    )
    if not others:
        return f"{path}: has no model*.safetensors files"
    advice = f"; convert it first: mlxserve convert {path} -o OUT" if others[0].endswith(".bin") else ""
    return f"{path}: has no model*.safetensors files, and {others[0]} is not read{advice}"


def read_header(path: Path) -> list[SourceTensor]:
    """The tensors of a safetensors file. Raises ModelLoadError unless header and data fit the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= _MAX_HEADER_BYTES:
            raise ModelLoadError(
                f"{path}: not a safetensors file (header length {length}, file {size} bytes)"
            )
        if 8 + length > size:
            raise ModelLoadError(
                f"{path}: truncated: the header ends at byte {8 + length}, the file has {size}"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_no_twins, parse_constant=_no_constant)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = [_header_entry(name, entry, path, 8 + length) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"{path}: the safetensors header is damaged: {reason}") from error
    _check_spans(tensors, path, 8 + length, size)
    return tensors


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} occurs twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _check_spans(tensors: list[SourceTensor], path: Path, data_start: int, size: int) -> None:
    """The format allows neither overlaps nor holes: each byte of the data belongs to one tensor."""
    at = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        end = tensor.offset + tensor.num_bytes
        if end > size:
            raise ModelLoadError(f"{path}: truncated: the data ends at byte {end}, the file has {size}")
        if tensor.offset != at:
            raise ModelLoadError(
                f"{path}: the safetensors header is damaged: tensor {tensor.name!r} begins at byte "
                f"{tensor.offset}, the one before it ends at {at}"
            )
        at = end


def _header_entry(name: str, entry: dict[str, Any], path: Path, data_start: int) -> SourceTensor:
    shape = tuple(_whole(size) for size in _list(entry["shape"]))
    begin, end = (_whole(offset) for offset in _list(entry["data_offsets"]))
    dtype = entry["dtype"]
    if not isinstance(dtype, str):
        raise TypeError(f"tensor {name!r} has type {dtype!r}")
    bits = _ITEM_BITS.get(dtype)
    count = math.prod(shape)
    if end < begin or (bits is not None and (end - begin) * 8 != count * bits):
        raise ValueError(f"tensor {name!r} of type {dtype} and shape {shape} spans {begin} to {end}")
    return SourceTensor(name, dtype, shape, end - begin, path, data_start + begin)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {value!r}")
    return value


def _whole(value: Any) -> int:
    """A size or an offset. Both fit 63 bits in any file that exists."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"expected a whole number below 2^63, found {str(value)[:40]}")
    return value
