"""Check that safetensors files are whole before anything reads them.

Format: 8 bytes little-endian header length, a JSON header with ``data_offsets`` per tensor, the data
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from mlxserve.errors import ModelLoadError

_MAX_HEADER_BYTES = 100_000_000


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, without its metadata, after checking that the file is whole.

    Raises ModelLoadError that names the file and what is wrong, with both sizes.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ModelLoadError(f"{path} is truncated: {size} bytes are no safetensors file")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelLoadError(f"{path} is damaged: its header claims {length} bytes of {size}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ModelLoadError(f"{path} is damaged: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ModelLoadError(f"{path} is damaged: its header is not a JSON object")
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise ModelLoadError(
            f"{path} is truncated or damaged: its header describes {8 + length + end} bytes, it has {size}"
        )
    return header


def check_safetensors_folder(folder: Path) -> None:
    """Check every shard of a model folder, and the index where there is one."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ModelLoadError(f"{folder} has no model*.safetensors file")
    present = {path.name: read_header(path) for path in files}
    index_path = folder / "model.safetensors.index.json"
    if not index_path.exists():
        return
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError):
        raise ModelLoadError(f"{index_path} is not a safetensors index") from None
    for tensor, name in weight_map.items():
        if name not in present:
            raise ModelLoadError(f"{folder} lacks the shard {name} that its index names")
        if tensor not in present[name]:
            raise ModelLoadError(f"{folder / name} lacks the tensor {tensor} that the index places there")
