"""An adapter on the disk, in mlx-lm's layout: adapters.safetensors and adapter_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxserve.errors import ModelLoadError, UnsupportedModelError
from mlxserve.json_file import read_json_object
from mlxserve.models.safetensors_file import read_header
from mlxserve_kernels.adapters import LowRank

WEIGHTS = "adapters.safetensors"
CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
_A, _B = ".lora_a", ".lora_b"


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """``config`` is adapter_config.json; ``weights`` are by mlx-lm's names, lazy."""

    path: Path
    config: Mapping[str, Any]
    weights: Mapping[str, mx.array]

    @property
    def type(self) -> str:
        """lora, dora or full."""
        return str(self.config.get("fine_tune_type", "lora"))

    @property
    def scale(self) -> float:
        value = (self.config.get("lora_parameters") or {}).get("scale")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(
                f"{self.path / CONFIG}: lora_parameters.scale must be a number, found {value!r}"
            )
        return float(value)


def read_adapter(path: Path) -> AdapterFolder:
    """Reads a folder, or the weights file in one. Raises ModelLoadError, naming the file, for what is missing
    or damaged."""
    folder = path.parent if path.name == WEIGHTS else path
    if not folder.is_dir():
        raise ModelLoadError(f"{path}: no such adapter folder")
    if not (folder / CONFIG).is_file():
        raise ModelLoadError(f"{folder}: not an adapter, {CONFIG} is missing")
    config = read_json_object(folder / CONFIG)
    if "peft_type" in config:
        raise ModelLoadError(
            f"{folder}: is a PEFT adapter; import it first: mlxserve lora import {folder} -o OUT"
        )
    weights_path = folder / WEIGHTS
    if not weights_path.is_file():
        raise ModelLoadError(f"{folder}: not an adapter, {WEIGHTS} is missing")
    return AdapterFolder(folder, config, load_tensors(weights_path))


def load_tensors(path: Path) -> dict[str, mx.array]:
    """The tensors of a safetensors file, lazy. Raises ModelLoadError for one that is damaged or has types
    that mlx has not."""
    read_header(path)
    try:
        weights = mx.load(str(path))
    except RuntimeError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from None
    assert isinstance(weights, dict)
    return weights


def low_rank_changes(adapter: AdapterFolder) -> dict[str, LowRank]:
    """The changes of a LoRA adapter by the path of the layer that they change, for serving.

    Raises UnsupportedModelError for a type that is not served beside its base, ModelLoadError for tensors
    that are no pairs or hold what is not a number.
    """
    if adapter.type != "lora":
        raise UnsupportedModelError(
            f"{adapter.path}: fine_tune_type {adapter.type!r} is not served beside its base, only 'lora': "
            "fuse it"
        )
    changes = {}
    scale = adapter.scale
    for name in sorted(adapter.weights):
        path, _, kind = name.rpartition(".")
        if kind not in ("lora_a", "lora_b"):
            raise ModelLoadError(f"{adapter.path}: {name} is no part of a LoRA adapter")
        a, b = adapter.weights.get(path + _A), adapter.weights.get(path + _B)
        if a is None or b is None:
            raise ModelLoadError(f"{adapter.path}: {path} has only one of lora_a and lora_b")
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
            raise ModelLoadError(
                f"{adapter.path}: {path} has lora_a of shape {a.shape} and lora_b of shape {b.shape}, "
                "expected [inputs, rank] and [rank, outputs]"
            )
        changes[path] = LowRank(a, b, scale)
    if not changes:
        raise ModelLoadError(f"{adapter.path}: {WEIGHTS} has no tensors")
    for path, change in changes.items():
        if not all(mx.all(mx.isfinite(part)).item() for part in (change.a, change.b)):
            raise ModelLoadError(f"{adapter.path}: {path} holds NaN or infinite values")
    return changes
