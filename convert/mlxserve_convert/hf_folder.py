"""Checks of a Hugging Face folder before any work: its config, its shards, its quantization."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.errors import ConversionError
from mlxserve.json_file import read_json_object
from mlxserve.models.architectures import check_model_type
from mlxserve.models.safetensors_file import SourceTensor, read_tensors

FLOAT_TYPES = frozenset({"F16", "BF16", "F32"})


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """A checked folder: every file is complete and every tensor that the index names is there."""

    path: Path
    config: dict[str, Any]
    shards: tuple[Path, ...]
    tensors: dict[str, SourceTensor]


def open_folder(path: Path, *, allow_mlx: bool = False) -> SourceFolder:
    """Raises ConversionError or ModelLoadError with one line for whatever is missing, damaged or already
    quantized; with ``allow_mlx`` a folder that is quantized in MLX's own formats is taken."""
    if not (path / "config.json").is_file():
        raise ConversionError(f"{path}: not a model folder, config.json is missing")
    config = read_json_object(path / "config.json")
    check_quantization(config, path, allow_mlx=allow_mlx)
    check_model_type(config, path)
    shards, tensors = read_tensors(path)
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
        settings = read_json_object(side_file)
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
