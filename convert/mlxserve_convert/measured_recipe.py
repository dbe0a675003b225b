"""``--recipe auto``: bits for each module by what they are worth on a short text, to a target size."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from mlxserve.errors import ConversionError
from mlxserve.text.tokenizer import load_tokenizer
from mlxserve_convert.allocation import Option, allocate
from mlxserve_convert.checkpoint import Checkpoint
from mlxserve_convert.layouts import layout_config
from mlxserve_convert.options import DEFAULT_BITS
from mlxserve_convert.output_folder import write_json
from mlxserve_convert.recipes import Choice, Module, Recipe
from mlxserve_convert.roles import role_of
from mlxserve_convert.sensitivity import (
    NUM_TOKENS,
    Sensitivity,
    calibration_text,
    measure,
    rounded,
)
from mlxserve_convert.weights import Layout, Weight

CHOICES = (
    Choice("affine", 2, 64),
    Choice("affine", 2, 32),
    Choice("affine", 3, 128),
    Choice("affine", 3, 64),
    Choice("affine", 3, 32),
    Choice("affine", 4, 128),
    Choice("affine", 4, 64),
    Choice("affine", 4, 32),
    Choice("affine", 5, 64),
    Choice("affine", 6, 64),
    Choice("affine", 8, 64),
)
_MEMORY_SHARE = 0.8
_LEAST_GROUP = 32


@dataclass(frozen=True, slots=True)
class Measured:
    """``importance`` has an array a module, by path; ``expected`` nats a token that are lost."""

    recipe: Recipe
    importance: dict[str, mx.array]
    expected: float


def measured_recipe(
    checkpoint: Checkpoint,
    model: Any,
    weights: Mapping[str, Weight],
    modules: Mapping[str, Module],
    dtypes: Mapping[str, mx.Dtype],
    target_bpw: float,
) -> Measured:
    """Bits that take at most ``target_bpw`` bits a parameter, everything counted, of the whole model.

    The whole model is loaded in float32. Raises ConversionError where it does not fit, and for a target that
    even the fewest bits miss. ``dtypes`` are those of the output.
    """
    _check_memory(checkpoint.path, weights)
    model.load_weights([(name, weight.value().astype(mx.float32)) for name, weight in weights.items()])
    mx.eval(model.parameters())
    token_ids = _calibration_ids(checkpoint)
    leaves = {path: module for path, module in model.named_modules() if path in modules}
    free = {
        path: leaves[path]
        for path, module in modules.items()
        if module.wish is True and role_of(path) != "router" and module.shape[-1] % _LEAST_GROUP == 0
    }
    found = measure(model, free, token_ids)
    items = {
        path: _options(sensitivity, dtypes[f"{path}.weight"], len(token_ids))
        for path, sensitivity in found.items()
    }
    others = {path: _own_choice(module) for path, module in modules.items() if path not in items}
    taken = 0
    for name, weight in weights.items():
        path = name.removesuffix(".weight")
        if path not in items:
            choice = others.get(path) if name.endswith(".weight") else None
            taken += _num_bytes(weight, choice, dtypes[name])
    num_parameters = sum(weight.num_elements for weight in weights.values())
    budget = math.floor(target_bpw * num_parameters / 8) - taken
    chosen = allocate(items, budget)
    if chosen is None:
        least = taken + sum(min(option.num_bytes for option in options) for options in items.values())
        raise ConversionError(
            f"--target-bpw {target_bpw:g} is too little for {checkpoint.path.name}, at least "
            f"{math.ceil(least * 8000 / num_parameters) / 1000:g} are needed"
        )
    choices = {**others, **{path: option.choice for path, option in chosen.items()}}
    return Measured(
        lambda module: choices[module.path],
        {path: sensitivity.importance for path, sensitivity in found.items()},
        sum(option.cost for option in chosen.values()),
    )


def _options(sensitivity: Sensitivity, dtype: mx.Dtype, num_tokens: int) -> list[Option]:
    weight = sensitivity.module.weight
    options = []
    for choice in CHOICES:
        if weight.shape[-1] % choice.group_size:
            continue
        layout = Layout("affine", choice.bits, choice.group_size, dtype)
        stored = rounded(weight, layout, sensitivity.importance)
        size = layout.num_bytes(math.prod(weight.shape[:-1]), weight.shape[-1])
        options.append(Option(choice, size, sensitivity.cost(stored, num_tokens)))
        mx.clear_cache()
    return options


def _own_choice(module: Module) -> Choice | None:
    """Of a module that is not measured: what its architecture wants, 8 bits for routers."""
    if not module.wish:
        return None
    own = module.wish if isinstance(module.wish, dict) else {}
    bits = 8 if role_of(module.path) == "router" else DEFAULT_BITS
    return Choice(own.get("mode", "affine"), own.get("bits", bits), own.get("group_size", 64))


def _num_bytes(weight: Weight, choice: Choice | None, dtype: mx.Dtype) -> int:
    layout = None if choice is None else layout_config(choice, weight.num_columns, dtype)
    if layout is None:
        return weight.num_elements * dtype.size
    return layout.num_bytes(weight.num_rows, weight.num_columns)


def _calibration_ids(checkpoint: Checkpoint) -> list[int]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_json(folder / "config.json", checkpoint.config)
        checkpoint.write_texts(folder)
        tokenizer = load_tokenizer(folder)
        return tokenizer.encode(calibration_text())[:NUM_TOKENS]


def _check_memory(path: Path, weights: Mapping[str, Weight]) -> None:
    """The floats of all weights, a copy of the largest in each step of a rounding, and what the text
    leaves behind: about as many numbers as a layer's widths times its tokens."""
    floats = sum(weight.num_elements for weight in weights.values())
    largest = max(weight.num_elements for weight in weights.values())
    widths = sum(
        weight.num_rows + weight.num_columns for name, weight in weights.items() if name.endswith(".weight")
    )
    needed = 4 * (floats + 4 * largest + 3 * NUM_TOKENS * widths)
    available = int(psutil.virtual_memory().available * _MEMORY_SHARE)
    if needed > available:
        raise ConversionError(
            f"--recipe auto loads the whole of {path.name} in float32 and needs {needed / 1e9:.1f} GB, "
            f"{available / 1e9:.1f} GB are free: take a named recipe"
        )
