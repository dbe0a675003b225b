"""Quantization of a Hugging Face folder of floats into an MLX folder, one tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxserve.errors import ConversionError, UnsupportedModelError
from mlxserve.models.architectures import build_model, config_fields
from mlxserve.models.rope_config import settle_rope
from mlxserve_convert.hf_folder import SourceFolder, open_folder
from mlxserve_convert.mlx_arrays import fit_group_size, write_array, write_quantized
from mlxserve_convert.options import (
    DEFAULT_BITS,
    DEFAULT_GROUP_SIZE,
    ConvertOptions,
    ConvertReport,
    PlannedTensor,
    Progress,
)
from mlxserve_convert.output_folder import OutputFolder, ShardedWriter, write_json
from mlxserve_convert.verify import verify_folder

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.jsonl")
_NOT_COPIED = frozenset({"config.json", "model.safetensors.index.json"})
_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_OLD_ROPE_BUFFER = "rotary_emb.inv_freq"
_QUANTIZATION_KEYS = ("quantization", "quantization_config", "compression_config")
Quantization = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Plan:
    config: dict[str, Any]
    weights: dict[str, Any]
    """mlx arrays by output name, lazy: each is read, computed and dropped when it is written."""
    modules: dict[str, Quantization | None]
    """How each module that could be quantized will be; None leaves it as floats."""
    tensors: tuple[PlannedTensor, ...]
    warnings: list[str]


def convert_folder(
    source: Path, output: Path, options: ConvertOptions, on_progress: Progress | None
) -> ConvertReport:
    """Writes ``output`` from a folder of safetensors. Memory holds about one tensor at a time."""
    wants_bits = options.bits is not None or options.group_size is not None
    folder = open_folder(source, allow_mlx=wants_bits)
    plan = _make_plan(folder, options)
    num_bytes = sum(_planned_bytes(tensor) for tensor in plan.tensors)
    target = OutputFolder(output, force=options.force)
    target.check(num_bytes)
    verified = "not checked: nothing was written"
    if not options.dry_run:
        with target:
            num_bytes = _Writer(plan, options, target.path).write(on_progress)
            _copy_texts(folder, plan, target.path)
            verified = "not checked: switched off"
            if options.verify == "auto":
                verified = verify_folder(target.path, num_bytes)
    return ConvertReport(
        source=source,
        output=output,
        source_format="safetensors",
        model_type=plan.config["model_type"],
        tensors=plan.tensors,
        num_bytes=num_bytes,
        warnings=tuple(plan.warnings),
        verified=verified,
        is_dry_run=options.dry_run,
    )


def _make_plan(folder: SourceFolder, options: ConvertOptions) -> _Plan:
    warnings: list[str] = []
    config = {key: value for key, value in folder.config.items() if key not in _QUANTIZATION_KEYS}
    if not (folder.path / "tokenizer.json").is_file():
        warnings.append(f"{folder.path} has no tokenizer.json, the result cannot be served without one")
    for key in ("torch_dtype", "dtype"):
        if key in config and options.dtype is not None:
            config[key] = options.dtype
    quantization = _mlx_quantization(folder.config)
    if quantization is not None:
        warnings.append(
            f"{folder.path} is quantized already ({quantization['bits']}-bit) and is quantized again, which "
            "loses more than a conversion of the floats"
        )
    try:
        config = settle_rope(config, config_fields(config, folder.path))
    except UnsupportedModelError as error:
        raise ConversionError(f"{folder.path}: {error}") from None
    _settle_head(folder, config, warnings)
    model = build_model(config, folder.path)
    weights = _sanitized(folder, model)
    _check_names(folder, model, weights)
    bits = DEFAULT_BITS if options.bits is None else options.bits
    group_size = DEFAULT_GROUP_SIZE if options.group_size is None else options.group_size
    modules = _plan_modules(model, bits, group_size)
    tensors = tuple(_planned(name, weights[name], modules) for name in sorted(weights))
    if any(settings is not None for settings in modules.values()):
        config["quantization"] = _quantization_config(modules, bits, group_size)
    return _Plan(config, weights, modules, tensors, warnings)


def _settle_head(folder: SourceFolder, config: dict[str, Any], warnings: list[str]) -> None:
    """Makes ``tie_word_embeddings`` in ``config`` say what the files hold.

    Tied with a head in the files: tied only if the head equals the embedding. Not tied without a head:
    refused. No flag: tied if there is no head, and the flag is written.
    """
    nested = config.get("text_config")
    place = config
    if "tie_word_embeddings" not in config and isinstance(nested, dict) and "tie_word_embeddings" in nested:
        place = config["text_config"] = dict(nested)
    flag = place.get("tie_word_embeddings")
    head = next((name for name in folder.tensors if name.endswith(_HEAD)), None)
    embedding = next((name for name in folder.tensors if name.endswith(_EMBEDDING)), None)
    if embedding is None:
        return
    if flag is None:
        place["tie_word_embeddings"] = head is None
        warnings.append(f"config.json does not say whether the head is tied, it is written as {head is None}")
    elif flag and head is not None and not _are_equal(folder, head, embedding):
        place["tie_word_embeddings"] = False
        warnings.append(
            f"config.json ties the head, but {head} differs from the embedding: it is kept, untied"
        )
    elif not flag and head is None:
        raise ConversionError(
            f"{folder.path}: config.json does not tie the head, but {_HEAD} is not in the files"
        )


def _are_equal(folder: SourceFolder, first: str, second: str) -> bool:
    if folder.tensors[first].shape != folder.tensors[second].shape:
        return False
    import mlx.core as mx

    arrays = _load_lazily(folder)
    return bool(mx.array_equal(arrays[first], arrays[second]))


def _load_lazily(folder: SourceFolder) -> dict[str, Any]:
    import mlx.core as mx

    weights: dict[str, Any] = {}
    for shard in folder.shards:
        try:
            loaded = mx.load(str(shard))
        except (RuntimeError, ValueError) as error:
            raise ConversionError(f"{shard}: cannot be read: {error}") from error
        assert isinstance(loaded, dict)
        weights.update(loaded)
    return weights


def _mlx_quantization(config: dict[str, Any]) -> Quantization | None:
    """How a folder is quantized in MLX's formats, None for floats."""
    settings = config.get("quantization") or config.get("quantization_config") or {}
    return settings if settings.get("bits") is not None else None


def _dequantized(folder: SourceFolder, weights: dict[str, Any]) -> dict[str, Any]:
    """An MLX folder's matrices as floats, lazily. A folder of floats comes back as it is."""
    import mlx.core as mx

    settings = _mlx_quantization(folder.config)
    if settings is None:
        return weights
    for name in [name for name in weights if name.endswith(".scales")]:
        module = name.removesuffix(".scales")
        entry = settings.get(module)
        entry = entry if isinstance(entry, dict) else settings
        weight, scales = weights.get(f"{module}.weight"), weights.pop(name)
        if weight is None:
            raise ConversionError(f"{folder.path}: tensor '{module}.weight' is missing")
        weights[f"{module}.weight"] = mx.dequantize(
            weight,
            scales,
            weights.pop(f"{module}.biases", None),
            group_size=entry.get("group_size"),
            bits=entry.get("bits"),
            mode=str(entry.get("mode", settings.get("mode", "affine"))),
        )
    return weights


def _sanitized(folder: SourceFolder, model: Any) -> dict[str, Any]:
    """The weights under the names of mlx-lm's model."""
    weights = _dequantized(folder, _load_lazily(folder))
    if not hasattr(model, "sanitize"):
        return weights
    try:
        sanitized: dict[str, Any] = model.sanitize(weights)
    except KeyError as error:
        raise ConversionError(f"{folder.path}: tensor {error.args[0]!r} is missing") from error
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        reason = str(error).replace("\n", " ")
        raise ConversionError(f"{folder.path}: the tensors do not fit the architecture: {reason}") from error
    return sanitized


def _check_names(folder: SourceFolder, model: Any, weights: dict[str, Any]) -> None:
    from mlx.utils import tree_flatten

    expected = {name: tuple(value.shape) for name, value in tree_flatten(model.parameters())}
    for name in [name for name in weights if name.endswith(_OLD_ROPE_BUFFER) and name not in expected]:
        del weights[name]
    unknown = sorted(set(weights) - set(expected))
    if unknown:
        raise ConversionError(f"{folder.path}: {_some(unknown)} has no place in this architecture")
    missing = sorted(set(expected) - set(weights))
    if missing:
        raise ConversionError(f"{folder.path}: {_some(missing)} is missing")
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise ConversionError(
                f"{folder.path}: tensor {name!r} has shape {tuple(weights[name].shape)}, config.json asks "
                f"for {shape}"
            )


def _some(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"tensor {names[0]!r}{more}"


def _plan_modules(model: Any, bits: int, group_size: int) -> dict[str, Quantization | None]:
    """What mlx-lm would quantize, with the largest group that each matrix allows."""
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    predicate: Callable[[str, Any], Any] | None = getattr(model, "quant_predicate", None)
    modules: dict[str, Quantization | None] = {}
    for path, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if not hasattr(module, "to_quantized"):
            continue
        wanted = True if predicate is None else predicate(path, module)
        own = wanted if isinstance(wanted, dict) else {}
        fitting = fit_group_size(module.weight.shape[-1], own.get("group_size", group_size))
        if not wanted or fitting is None:
            modules[path] = None
        else:
            modules[path] = {"group_size": fitting, "bits": own.get("bits", bits), "mode": "affine"}
    return modules


def _quantization_config(modules: dict[str, Quantization | None], bits: int, group_size: int) -> Quantization:
    """mlx-lm's form, with an entry for each module: false for one that is left alone."""
    config: Quantization = {"group_size": group_size, "bits": bits, "mode": "affine"}
    for path, settings in modules.items():
        config[path] = False if settings is None else settings
    return config


def _planned(name: str, array: Any, modules: dict[str, Quantization | None]) -> PlannedTensor:
    module = name.removesuffix(".weight")
    settings = modules.get(module) if name.endswith(".weight") else None
    return PlannedTensor(
        name=name,
        shape=tuple(array.shape),
        source_type=str(array.dtype).removeprefix("mlx.core."),
        bits=None if settings is None else settings["bits"],
        group_size=None if settings is None else settings["group_size"],
        is_matrix=name.endswith(".weight") and module in modules,
    )


def _planned_bytes(tensor: PlannedTensor) -> int:
    width = 4 if tensor.source_type == "float32" else 2
    if tensor.bits is None or tensor.group_size is None:
        return tensor.num_elements * width
    return tensor.num_elements * tensor.bits // 8 + 2 * width * (tensor.num_elements // tensor.group_size)


def _copy_texts(folder: SourceFolder, plan: _Plan, target: Path) -> None:
    """Tokenizer, template and generation files as they are; no code."""
    for pattern in _COPIED:
        for file in folder.path.glob(pattern):
            if file.name not in _NOT_COPIED and file.is_file():
                shutil.copyfile(file, target / file.name)
    templates = folder.path / "additional_chat_templates"
    if templates.is_dir():
        (target / templates.name).mkdir()
        for file in templates.glob("*.jinja"):
            shutil.copyfile(file, target / templates.name / file.name)
    write_json(target / "config.json", plan.config)


class _Writer:
    def __init__(self, plan: _Plan, options: ConvertOptions, folder: Path) -> None:
        self._plan = plan
        self._dtype = options.dtype
        modules = [path for path, settings in plan.modules.items() if settings is not None]
        names = [*plan.weights, *(f"{path}.{suffix}" for path in modules for suffix in ("scales", "biases"))]
        self._shards = ShardedWriter(folder, names)

    def write(self, on_progress: Progress | None) -> int:
        total = sum(tensor.num_elements for tensor in self._plan.tensors)
        done = 0
        try:
            for tensor in self._plan.tensors:
                self._write_tensor(tensor, self._plan.weights.pop(tensor.name))
                done += tensor.num_elements
                if on_progress is not None:
                    on_progress(done, total, tensor.name)
            self._shards.finish()
        finally:
            self._shards.abandon()
        return self._shards.num_bytes

    def _write_tensor(self, tensor: PlannedTensor, array: Any) -> None:
        array = self._cast(tensor, array)
        if tensor.bits is None:
            write_array(self._shards, tensor.name, array)
            return
        assert tensor.group_size is not None
        write_quantized(self._shards, tensor.name, array, tensor.group_size, tensor.bits)

    def _cast(self, tensor: PlannedTensor, array: Any) -> Any:
        """To the wanted dtype, except for a tensor with values that float16 has no room for."""
        import mlx.core as mx

        if self._dtype is None or not mx.issubdtype(array.dtype, mx.floating):
            return array
        if self._dtype == "float16" and array.dtype != mx.float16:
            limit = 65504.0
            too_large = int(np.array(mx.sum(mx.abs(array.astype(mx.float32)) > limit)))
            if too_large:
                self._plan.warnings.append(
                    f"{tensor.name}: {too_large} values are too large for float16, it stays "
                    f"{tensor.source_type}"
                )
                return array
        return array.astype(getattr(mx, self._dtype))
