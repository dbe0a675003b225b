"""What becomes of each parameter: decided before anything is written, from names and shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve.errors import ConversionError, UnsupportedModelError
from mlxserve.models.architectures import build_model, config_fields
from mlxserve.models.rope_config import settle_rope
from mlxserve_convert.checkpoint import Checkpoint
from mlxserve_convert.layouts import layout_config, quantization_config
from mlxserve_convert.measured_recipe import measured_recipe
from mlxserve_convert.naming import check_experts, nested_names, split_fused_experts
from mlxserve_convert.options import DEFAULT_TARGET_BPW, ConvertOptions, PlannedTensor
from mlxserve_convert.recipes import Choice, Module, Recipe, recipe_of
from mlxserve_convert.tracing import sanitized
from mlxserve_convert.weights import Layout, Weight, quantized_types

_TIE = "tie_word_embeddings"
_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_OLD_ROPE_BUFFER = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class Target:
    """One parameter of the output. ``layout`` None: floats of ``dtype``. ``is_kept``: the source's own
    packed numbers are copied. ``is_matrix``: its module could be quantized. ``importance`` [columns] weighs
    what quantization loses."""

    name: str
    weight: Weight
    layout: Layout | None
    dtype: mx.Dtype
    is_kept: bool
    is_matrix: bool
    importance: mx.array | None = None

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def num_bytes(self) -> int:
        weight = self.weight
        if self.layout is not None:
            return self.layout.num_bytes(weight.num_rows, weight.num_columns)
        return weight.num_elements * self.dtype.size

    @property
    def is_exact(self) -> bool:
        if self.layout is not None:
            return self.is_kept
        return _holds(self.dtype, self.weight.dtype)

    def planned(self) -> PlannedTensor:
        layout = self.layout
        return PlannedTensor(
            name=self.name,
            shape=self.weight.shape,
            source_type="+".join(sorted(self.weight.source_types)),
            dtype=str(self.dtype).removeprefix("mlx.core."),
            mode=None if layout is None else layout.mode,
            bits=None if layout is None else layout.bits,
            group_size=None if layout is None else layout.group_size,
            num_bytes=self.num_bytes,
            is_matrix=self.is_matrix,
            is_exact=self.is_exact,
        )


def _holds(wide: mx.Dtype, narrow: mx.Dtype) -> bool:
    """Whether a type has a value for each value of another."""
    return wide == narrow or (wide == mx.float32 and mx.issubdtype(narrow, mx.floating))


@dataclass(frozen=True, slots=True)
class Plan:
    """``targets`` in the order in which they are written. ``config`` is the output's config.json."""

    config: dict[str, Any]
    targets: tuple[Target, ...]
    warnings: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(target.num_bytes for target in self.targets)


def make_plan(checkpoint: Checkpoint, options: ConvertOptions) -> Plan:
    """Raises ConversionError for tensors that are missing, extra or of another shape than config.json says,
    and for a recipe or dtype that cannot be done."""
    warnings = list(checkpoint.warnings)
    config = dict(checkpoint.config)
    path = checkpoint.path
    try:
        config = settle_rope(config, config_fields(config, path))
    except UnsupportedModelError as error:
        raise ConversionError(f"{path}: {error}") from None
    if not checkpoint.are_names_final:
        _settle_head(checkpoint, config, warnings)
    model = build_model(config, path)
    weights = _named(checkpoint, model, config, warnings)
    weights = _checked_names(checkpoint, model, weights)
    keeps = checkpoint.keeps_layouts and not options.wants_quantization and not options.dequantize
    types = quantized_types(weights.values())
    if types and options.wants_quantization:
        warnings.append(
            f"{path.name} is quantized already ({', '.join(types)}) and is quantized again, which loses more "
            f"than either{'' if checkpoint.is_mlx else '; without --bits it is imported as it is'}"
        )
    modules = modules_of(model)
    dtypes = {name: _float_dtype(weight, options, checkpoint.float_dtype) for name, weight in weights.items()}
    importance: dict[str, mx.array] = {}
    if options.recipe == "auto":
        target_bpw = options.target_bpw or DEFAULT_TARGET_BPW
        measured = measured_recipe(checkpoint, model, weights, modules, dtypes, target_bpw)
        recipe, importance = measured.recipe, measured.importance
    else:
        recipe = recipe_of(options, modules)

    def targets_with(*, floats: bool) -> tuple[Target, ...]:
        targets = []
        for name in sorted(weights):
            target = _target(
                name,
                weights[name],
                modules,
                recipe,
                options,
                keeps=keeps,
                floats=floats,
                dtype=dtypes[name],
            )
            targets.append(replace(target, importance=importance.get(target.module)))
        return tuple(targets)

    targets = targets_with(floats=options.lost_formats != "8bit")
    if keeps and options.lost_formats == "auto" and not _stays_small(checkpoint, targets, options):
        targets = targets_with(floats=False)
    if keeps:
        warnings += _growth(checkpoint, targets)
    for key in ("torch_dtype", "dtype"):
        if key in config and options.dtype is not None:
            config[key] = options.dtype
    layouts = {target.module: target.layout for target in targets if target.is_matrix}
    quantization = quantization_config(layouts)
    if quantization is not None:
        config["quantization"] = quantization
    return Plan(config, targets, tuple(warnings))


def _target(
    name: str,
    weight: Weight,
    modules: dict[str, Module],
    recipe: Recipe,
    options: ConvertOptions,
    *,
    keeps: bool,
    floats: bool,
    dtype: mx.Dtype,
) -> Target:
    module = modules.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
    if module is None or options.dequantize:
        return Target(name, weight, None, dtype, is_kept=False, is_matrix=module is not None)
    if keeps:
        layout = weight.layout
        if layout is None and weight.is_quantized and not floats:
            # Scales of 16 bits would cost more than the 8 bits do.
            dtype = mx.float32 if options.dtype is None else dtype
            layout = layout_config(inexact_choice(weight), weight.num_columns, dtype)
        return Target(name, weight, layout, dtype, is_kept=weight.layout is not None, is_matrix=True)
    choice = recipe(module)
    layout = None if choice is None else layout_config(choice, weight.num_columns, dtype)
    return Target(name, weight, layout, dtype, is_kept=False, is_matrix=True)


_ALLOWED_GROWTH = 1.5
"""How much larger than its source a result may become for the sake of exactness. A small model whose
embedding dominates stays below; one whose Q6_K matrices would double it does not."""


def _stays_small(checkpoint: Checkpoint, targets: tuple[Target, ...], options: ConvertOptions) -> bool:
    """Whether formats without a layout may become floats: these are exact and the result grows little."""
    if checkpoint.num_source_bytes is None or options.dtype not in (None, "float32"):
        return False
    return sum(target.num_bytes for target in targets) <= _ALLOWED_GROWTH * checkpoint.num_source_bytes


def _growth(checkpoint: Checkpoint, targets: tuple[Target, ...]) -> list[str]:
    size = checkpoint.num_source_bytes
    num_bytes = sum(target.num_bytes for target in targets)
    if size is None or num_bytes <= _ALLOWED_GROWTH * size:
        return []
    return [
        f"the result takes {num_bytes / 1e9:.2f} GB, the source {size / 1e9:.2f} GB: MLX has no layout as "
        "narrow as some of its formats; --bits makes it smaller"
    ]


def inexact_choice(weight: Weight) -> Choice:
    """How a quantized format that MLX has no layout for is imported: 8 bits in the smallest groups."""
    return Choice("affine", 8, 32)


def _float_dtype(weight: Weight, options: ConvertOptions, of_quantized: mx.Dtype | None) -> mx.Dtype:
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight.dtype
    if options.dtype is None:
        return of_quantized if weight.is_quantized and of_quantized is not None else weight.dtype
    dtype: mx.Dtype = getattr(mx, options.dtype)
    return dtype


def modules_of(model: Any) -> dict[str, Module]:
    """Every module that mlx-lm could quantize, by path."""
    predicate = getattr(model, "quant_predicate", None)
    found: dict[str, Module] = {}
    for path, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if hasattr(module, "to_quantized"):
            wish = True if predicate is None else predicate(path, module)
            found[path] = Module(path, tuple(module.weight.shape), wish)
    return found


def _named(
    checkpoint: Checkpoint, model: Any, config: dict[str, Any], warnings: list[str]
) -> dict[str, Weight]:
    """The weights under the names of mlx-lm's model. What its ``sanitize`` leaves out is said."""
    if checkpoint.are_names_final:
        return dict(checkpoint.weights)
    shapes = {name: tuple(value.shape) for name, value in tree_flatten(model.parameters())}
    check_experts(checkpoint.weights, config, checkpoint.path)
    sources = nested_names(checkpoint.weights, shapes, checkpoint.path)
    dropped: list[str] = []
    try:
        weights = sanitized(model, sources, dropped)
    except KeyError as error:
        raise ConversionError(f"{checkpoint.path}: tensor {error.args[0]!r} is missing") from error
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        reason = str(error).replace("\n", " ")
        raise ConversionError(
            f"{checkpoint.path}: the tensors do not fit the architecture: {reason}"
        ) from error
    unused = [name for name in dropped if not name.endswith((_OLD_ROPE_BUFFER, _HEAD))]
    if unused:
        warnings.append(f"{_some(sorted(unused))} is not used by a {model.model_type} model and left out")
    weights = split_fused_experts(weights, shapes)
    if not config.get(_TIE):
        return weights
    # It equals the embedding (_settle_head), and not every sanitize leaves it out.
    return {name: weight for name, weight in weights.items() if name in shapes or not name.endswith(_HEAD)}


def _checked_names(checkpoint: Checkpoint, model: Any, weights: dict[str, Weight]) -> dict[str, Weight]:
    path = checkpoint.path
    expected = {name: tuple(value.shape) for name, value in tree_flatten(model.parameters())}
    kept = {
        name: weight
        for name, weight in weights.items()
        if name in expected or not _adds_nothing(name, weight)
    }
    unknown = sorted(set(kept) - set(expected))
    if unknown:
        held = [checkpoint.source_names.get(name, name) for name in unknown]
        raise ConversionError(f"{path}: {_some(held)} has no place in a {model.model_type} model")
    missing = sorted(set(expected) - set(kept))
    if missing:
        raise ConversionError(f"{path}: {_some(missing)} is missing")
    for name, shape in expected.items():
        if kept[name].shape != shape:
            raise ConversionError(
                f"{path}: tensor {checkpoint.source_names.get(name, name)!r} has shape {kept[name].shape}, "
                f"the configuration asks for {shape}"
            )
    return kept


def _adds_nothing(name: str, weight: Weight) -> bool:
    """Old buffers of positions, and the biases of zeros that AutoGPTQ gives to every module."""
    if name.endswith(_OLD_ROPE_BUFFER):
        return True
    return name.endswith(".bias") and weight.num_rows == 1 and not mx.any(weight.value()).item()


def _some(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"tensor {names[0]!r}{more}"


def _settle_head(checkpoint: Checkpoint, config: dict[str, Any], warnings: list[str]) -> None:
    """Makes ``tie_word_embeddings`` in ``config`` say what the files hold.

    Tied with a head in the files: tied only if the head equals the embedding. Not tied without a head:
    refused. No flag: tied if there is no head, and the flag is written.
    """
    nested = config.get("text_config")
    places = [config]
    if isinstance(nested, dict):
        # Models read one or the other; the text part knows better, and both are written.
        config["text_config"] = dict(nested)
        places = [config["text_config"], config]
    flag = next((place[_TIE] for place in places if place.get(_TIE) is not None), None)
    weights = checkpoint.weights
    head = next((name for name in weights if name.endswith(_HEAD)), None)
    embedding = next((name for name in weights if name.endswith(_EMBEDDING)), None)
    if embedding is None:
        return
    if flag is None:
        flag = head is None
        warnings.append(f"config.json does not say whether the head is tied, it is written as {flag}")
    elif flag and head is not None and not are_equal(weights[head], weights[embedding]):
        flag = False
        warnings.append(
            f"config.json ties the head, but {head} differs from the embedding: it is kept, untied"
        )
    elif not flag and head is None:
        raise ConversionError(
            f"{checkpoint.path}: config.json does not tie the head, but {_HEAD} is not in the files"
        )
    for place in places:
        place[_TIE] = flag


_COMPARED_ELEMENTS = 1 << 22


def are_equal(first: Weight, second: Weight) -> bool:
    """Whether two weights have the same shape and values; read in blocks, up to the first difference."""
    if first.shape != second.shape:
        return False
    step = max(1, _COMPARED_ELEMENTS // max(first.num_columns, 1))
    for start in range(0, first.num_rows, step):
        stop = min(start + step, first.num_rows)
        if not mx.array_equal(first.read(start, stop), second.read(start, stop)).item():
            return False
    return True
