"""A Hugging Face folder as a checkpoint: floats in safetensors or PyTorch files, MLX's own layouts, and the
quantized formats we decode."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxserve.errors import ConversionError
from mlxserve.json_file import read_json_object
from mlxserve.models.architectures import check_model_type
from mlxserve.models.safetensors_file import SourceTensor, read_tensors
from mlxserve_convert.checkpoint import Checkpoint, identity_of
from mlxserve_convert.front_matter import read_front_matter
from mlxserve_convert.mapped_file import STORED_DTYPES, MappedFile, StoredWeight
from mlxserve_convert.methods.method import floats_dtype
from mlxserve_convert.mlx_checkpoint import join_packed, mlx_quantization
from mlxserve_convert.naming import text_config, text_weights
from mlxserve_convert.options import DTYPES
from mlxserve_convert.prequantized import SIDE_FILES, check_plain, find_prequantized
from mlxserve_convert.torch_file import has_torch_files, read_torch_folder
from mlxserve_convert.weights import Weight

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.jsonl")
_INDEX = ".index.json"
_NOT_COPIED = frozenset({"config.json", *SIDE_FILES})
_TEMPLATES = "additional_chat_templates"
_QUANTIZATION_KEYS = ("quantization", "quantization_config", "compression_config")


def open_hf(path: Path) -> Checkpoint:
    """Raises ConversionError or ModelLoadError with one line for whatever is missing, damaged or unknown."""
    if not (path / "config.json").is_file():
        raise ConversionError(f"{path}: not a model folder, config.json is missing")
    whole_config = read_json_object(path / "config.json")
    config = text_config(whole_config)
    check_model_type(config, path)
    settings = mlx_quantization(config)
    prequantized = None if settings is not None else find_prequantized(config, path)
    is_torch = has_torch_files(path) and not any(path.glob("model*.safetensors*"))
    files, weights = read_torch_folder(path) if is_torch else _safetensors(path)
    if settings is not None:
        weights = join_packed(weights, settings, str(path))
    if prequantized is not None:
        weights = prequantized.decode(weights, prequantized.settings, str(path))
    if settings is None and prequantized is None:
        check_plain(weights, path)
    weights, notes = text_weights(weights, whole_config, is_taken_out=config is not whole_config, path=path)
    _check_floats(weights, path)
    return Checkpoint(
        path=path,
        source_format="pytorch" if is_torch else "safetensors",
        config=_without_quantization(config),
        weights=weights,
        write_texts=lambda target: _copy_texts(path, target),
        identity=identity_of([*(file.path for file in files), *_settings_files(path)]),
        keeps_layouts=any(weight.is_quantized for weight in weights.values()),
        is_mlx=settings is not None,
        float_dtype=None if prequantized is None else _float_dtype(config, weights),
        warnings=notes,
        close=lambda: _close(files),
        card=read_front_matter(path / "README.md"),
    )


def _safetensors(path: Path) -> tuple[list[MappedFile], dict[str, Weight]]:
    shards, tensors = read_tensors(path)
    files = {shard: MappedFile(shard) for shard in shards}
    weights: dict[str, Weight] = {name: _stored(files, tensor, path) for name, tensor in tensors.items()}
    return list(files.values()), weights


def _close(files: Iterable[MappedFile]) -> None:
    for file in files:
        file.close()


def _stored(files: dict[Path, MappedFile], tensor: SourceTensor, path: Path) -> Weight:
    if tensor.dtype not in STORED_DTYPES:
        known = ", ".join(STORED_DTYPES)
        raise ConversionError(f"{path}: tensor {tensor.name!r} has type {tensor.dtype}, only known: {known}")
    return StoredWeight(files[tensor.file], tensor.offset, tensor.dtype, tensor.shape)


def _check_floats(weights: Mapping[str, Weight], path: Path) -> None:
    """A float8 tensor that no method of the config explains is a number without its scale."""
    for name, weight in weights.items():
        types = [kind for kind in weight.source_types if kind.startswith("f8_")]
        if types and not weight.is_quantized:
            raise ConversionError(
                f"{path}: tensor {name!r} has type {types[0].upper()}, which is not supported without a "
                "quantization_config that says how it is scaled"
            )


def _settings_files(path: Path) -> list[Path]:
    return [file for name in ("config.json", *SIDE_FILES) if (file := path / name).is_file()]


def _float_dtype(config: Mapping[str, Any], weights: Mapping[str, Weight]) -> mx.Dtype | None:
    """What the model computes in: the type that config.json names, else that of most of its plain floats."""
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, dict) else {}):
        name = place.get("dtype", place.get("torch_dtype"))
        if name in DTYPES:
            dtype: mx.Dtype = getattr(mx, name)
            return dtype
    return floats_dtype(weights)


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in config.items() if key not in _QUANTIZATION_KEYS}
    nested = plain.get("text_config")
    if isinstance(nested, dict):
        plain["text_config"] = {k: value for k, value in nested.items() if k not in _QUANTIZATION_KEYS}
    return plain


def _copy_texts(source: Path, target: Path) -> None:
    """Tokenizer, template and generation files as they are; no code."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name not in _NOT_COPIED and not file.name.endswith(_INDEX) and file.is_file():
                shutil.copyfile(file, target / file.name)
    templates = source / _TEMPLATES
    if templates.is_dir():
        (target / _TEMPLATES).mkdir()
        for file in templates.glob("*.jinja"):
            shutil.copyfile(file, target / _TEMPLATES / file.name)
