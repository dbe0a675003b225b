"""Checks of a Hugging Face folder before any work: its config, its shards, its quantization."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.errors import ConversionError
from mlxserve.models.architectures import check_model_type

_MAX_HEADER_BYTES = 100_000_000
_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
FLOAT_TYPES = frozenset({"F16", "BF16", "F32"})


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """``dtype`` is safetensors' name of the type."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """A checked folder: every file is complete and every tensor that the index names is there."""

    path: Path
    config: dict[str, Any]
    shards: tuple[Path, ...]
    tensors: dict[str, SourceTensor]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConversionError when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConversionError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def open_folder(path: Path, *, allow_mlx: bool = False) -> SourceFolder:
    """Raises ConversionError with one line for whatever is missing, damaged or already quantized; with
    ``allow_mlx`` a folder that is quantized in MLX's own formats is taken."""
    if not (path / "config.json").is_file():
        raise ConversionError(f"{path}: not a model folder, config.json is missing")
    config = read_json(path / "config.json")
    check_quantization(config, path, allow_mlx=allow_mlx)
    check_model_type(config, path)
    shards, listed = _find_shards(path)
    tensors: dict[str, SourceTensor] = {}
    for shard in shards:
        for tensor in read_header(shard):
            if tensor.name in tensors:
                raise ConversionError(f"{shard}: tensor {tensor.name!r} is also in another file")
            tensors[tensor.name] = tensor
    missing = sorted(set(listed) - set(tensors))
    if missing:
        raise ConversionError(
            f"{path}: the index names {len(missing)} tensors that no file has, first {missing[0]!r}"
        )
    for tensor in tensors.values():
        if tensor.dtype not in FLOAT_TYPES and not tensor.dtype.startswith(("I", "U", "B")):
            raise ConversionError(
                f"{path}: tensor {tensor.name!r} has type {tensor.dtype}, which is not supported "
                "(float8 checkpoints have to be dequantized first)"
            )
    return SourceFolder(path, config, shards, tensors)


def check_quantization(config: dict[str, Any], path: Path, *, allow_mlx: bool = False) -> None:
    """Refuses by name every checkpoint whose weights are not plain floats. ``bits: null`` and an empty
    object mean that nothing is quantized."""
    text_config = config.get("text_config")
    for place in (config, text_config if isinstance(text_config, dict) else {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            settings = place.get(key)
            if isinstance(settings, dict) and settings:
                _check_settings(settings, path, allow_mlx=allow_mlx)
    side_file = path / "hf_quant_config.json"
    if side_file.is_file():
        settings = read_json(side_file)
        algorithm = settings.get("quantization", settings).get("quant_algo")
        raise ConversionError(
            f"{path}: is quantized: quant_method 'modelopt', format {algorithm!r}, which is not supported"
        )


def _check_settings(settings: dict[str, Any], path: Path, *, allow_mlx: bool) -> None:
    method = settings.get("quant_method")
    if method is not None:
        form = settings.get("format") or settings.get("fmt")
        raise ConversionError(
            f"{path}: is quantized: quant_method {method!r}, format {form!r}, which is not supported; "
            "convert from the unquantized checkpoint"
        )
    if settings.get("bits") is not None:
        if allow_mlx:
            return
        raise ConversionError(
            f"{path}: is an MLX model already ({settings['bits']}-bit, group size "
            f"{settings.get('group_size')}): use it as it is, or give --bits to quantize it again"
        )
    unknown = sorted(set(settings) - {"bits", "group_size", "mode"})
    if unknown:
        raise ConversionError(f"{path}: has a quantization that is not known: {', '.join(unknown)}")


def _find_shards(path: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    """The files to read, and the index's map of names to files (empty without an index)."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        shards = sorted(path.glob("model*.safetensors"))
        if not shards:
            raise ConversionError(_no_weights(path))
        return tuple(shards), {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{index}: has no weight_map")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ConversionError(f"{index}: {name!r} is not the name of a file beside it")
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ConversionError(
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
    return f"{path}: has no model*.safetensors files, and {others[0]} is not read"


def read_header(path: Path) -> list[SourceTensor]:
    """The tensors of a safetensors file. Raises ConversionError unless header and data fit the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= _MAX_HEADER_BYTES:
            raise ConversionError(
                f"{path}: not a safetensors file (header length {length}, file {size} bytes)"
            )
        if 8 + length > size:
            raise ConversionError(
                f"{path}: truncated: the header ends at byte {8 + length}, the file has {size}"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = [_header_entry(name, entry) for name, entry in entries.items()]
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConversionError(f"{path}: the safetensors header is damaged: {error}") from error
    if 8 + length + end > size:
        raise ConversionError(
            f"{path}: truncated: the data ends at byte {8 + length + end}, the file has {size}"
        )
    return tensors


def _header_entry(name: str, entry: dict[str, Any]) -> SourceTensor:
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    count = 1
    for size in shape:
        count *= size
    bits = _ITEM_BITS.get(entry["dtype"])
    if begin < 0 or end < begin or (bits is not None and (end - begin) * 8 != count * bits):
        raise ValueError(f"tensor {name!r} of type {entry['dtype']} and shape {shape} spans {begin} to {end}")
    return SourceTensor(name, entry["dtype"], shape, end - begin)
