"""The weight files of a model folder: which they are, what they hold, and that they are whole.

Format: 8 bytes little-endian header length, a JSON header with ``data_offsets`` per tensor, the data
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
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
            f"{folder}: the index names {len(missing)} tensors that no file has, first {missing[0]!r}"
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
    names = sorted(set(weight_map.values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelLoadError(f"{index}: {name!r} is not the name of a file beside it")
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
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = [_header_entry(name, entry, path, 8 + length) for name, entry in entries.items()]
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelLoadError(f"{path}: the safetensors header is damaged: {error}") from error
    if 8 + length + end > size:
        raise ModelLoadError(
            f"{path}: truncated: the data ends at byte {8 + length + end}, the file has {size}"
        )
    return tensors


def _header_entry(name: str, entry: dict[str, Any], path: Path, data_start: int) -> SourceTensor:
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    count = 1
    for size in shape:
        count *= size
    bits = _ITEM_BITS.get(entry["dtype"])
    if begin < 0 or end < begin or (bits is not None and (end - begin) * 8 != count * bits):
        raise ValueError(f"tensor {name!r} of type {entry['dtype']} and shape {shape} spans {begin} to {end}")
    return SourceTensor(name, entry["dtype"], shape, end - begin, path, data_start + begin)
