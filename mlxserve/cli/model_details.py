"""What a model's files say about it, for ``list`` and ``show``: headers only, no weights are read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxserve.errors import MlxserveError
from mlxserve.hub import Pull, StoredModel
from mlxserve.json_file import read_json_object
from mlxserve.models.safetensors_file import read_header
from mlxserve_convert.gguf_file import GGUFFile

_PACKED = ("U32", "U8")


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """``bits_per_weight`` counts scales and unquantized parts. None where the files do not say."""

    name: str
    format: str
    path: str
    num_bytes: int
    architecture: str | None
    num_parameters: int | None
    bits_per_weight: float | None
    context_length: int | None
    problem: str | None = None
    is_partial: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def columns(self) -> tuple[str, ...]:
        bits = "-" if self.bits_per_weight is None else f"{self.bits_per_weight:.2f}"
        context = "-" if self.context_length is None else str(self.context_length)
        state = "(partial)" if self.is_partial else "(damaged)"
        architecture = state if self.problem else self.architecture or "-"
        return self.name, self.format, architecture, bits, context, f"{self.num_bytes / 1e6:.1f} MB"


def describe(name: str, path: Path) -> ModelDetails:
    """Raises ConversionError when the files are damaged."""
    return _describe_folder(name, path) if path.is_dir() else _describe_gguf(name, path)


def describe_stored(entry: StoredModel) -> ModelDetails:
    """Like ``describe``, but a damaged entry is a row with a ``problem``: one must not hide the others."""
    try:
        return describe(entry.name, entry.path)
    except MlxserveError as error:
        return ModelDetails(
            entry.name, entry.format, str(entry.path), entry.num_bytes, None, None, None, None, str(error)
        )


def describe_pull(pull: Pull) -> ModelDetails:
    """A model of the hub; one that is not whole, or not only a model, is a row with a ``problem``."""
    name, path = str(pull.reference), pull.model_path
    problem = None if pull.is_whole else f"only a part was pulled ({pull.state()})"
    if problem is None:
        try:
            return describe(name, path)
        except MlxserveError as error:
            problem = str(error)
    return ModelDetails(
        name,
        "gguf" if path.suffix == ".gguf" else "safetensors",
        str(path),
        pull.num_bytes,
        None,
        None,
        None,
        None,
        problem,
        is_partial=not pull.is_whole,
    )


def _describe_gguf(name: str, path: Path) -> ModelDetails:
    with GGUFFile(path) as file:
        architecture = file.metadata.get("general.architecture")
        num_parameters = sum(tensor.num_elements for tensor in file.tensors.values())
        weight_bytes = sum(tensor.num_bytes for tensor in file.tensors.values())
        context = file.metadata.get(f"{architecture}.context_length")
    return ModelDetails(
        name=name,
        format="gguf",
        path=str(path),
        num_bytes=path.stat().st_size,
        architecture=architecture,
        num_parameters=num_parameters,
        bits_per_weight=_ratio(weight_bytes, num_parameters),
        context_length=context,
    )


def _describe_folder(name: str, path: Path) -> ModelDetails:
    config = read_json_object(path / "config.json")
    tensors = {
        tensor.name: tensor for file in sorted(path.glob("*.safetensors")) for tensor in read_header(file)
    }
    num_parameters = 0
    for tensor in tensors.values():
        module, _, kind = tensor.name.rpartition(".")
        if kind in ("scales", "biases") and f"{module}.weight" in tensors:
            continue
        count = 1
        for size in tensor.shape:
            count *= size
        if f"{module}.scales" in tensors and tensor.dtype in _PACKED:
            count = tensor.num_bytes * 8 // _bits(config, module)
        num_parameters += count
    text_config = config.get("text_config")
    nested = text_config if isinstance(text_config, dict) else {}
    return ModelDetails(
        name=name,
        format="mlx" if "quantization" in config else "safetensors",
        path=str(path),
        num_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        architecture=config.get("model_type"),
        num_parameters=num_parameters or None,
        bits_per_weight=_ratio(sum(tensor.num_bytes for tensor in tensors.values()), num_parameters),
        context_length=config.get("max_position_embeddings", nested.get("max_position_embeddings")),
    )


def _bits(config: dict[str, Any], module: str) -> int:
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    entry = quantization.get(module)
    bits = entry.get("bits") if isinstance(entry, dict) else quantization.get("bits")
    return bits if isinstance(bits, int) and bits > 0 else 4


def _ratio(num_bytes: int, num_parameters: int) -> float | None:
    return round(num_bytes * 8 / num_parameters, 3) if num_parameters else None
