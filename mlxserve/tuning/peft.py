"""Adapters in the layout of Hugging Face's PEFT, out and in.

PEFT keeps ``lora_A.weight`` [R, inputs] and ``lora_B.weight`` [outputs, R] under ``base_model.model.`` and
the module's path, ``lora_alpha`` instead of the scale, and DoRA's lengths as ``lora_magnitude_vector``
(https://huggingface.co/docs/peft/package_reference/lora).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxserve.errors import ModelLoadError, UnsupportedModelError
from mlxserve.json_file import read_json_object
from mlxserve.models.adapter_folder import CONFIG, PEFT_WEIGHTS, WEIGHTS, AdapterFolder, load_tensors
from mlxserve_convert.output_folder import write_json

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_M = ".lora_magnitude_vector"
_M_WEIGHT = f"{_M}.weight"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def export_peft(adapter: AdapterFolder, output: Path, *, base_name: str) -> None:
    """Writes a LoRA or DoRA adapter into a new folder. Raises UnsupportedModelError for full weights and for
    experts, which PEFT names otherwise."""
    if adapter.type not in ("lora", "dora"):
        raise UnsupportedModelError(
            f"{adapter.path}: type {adapter.type!r} has no PEFT layout, only lora and dora"
        )
    tensors: dict[str, mx.array] = {}
    modules: set[str] = set()
    for name, value in adapter.weights.items():
        path, _, kind = name.rpartition(".")
        if kind in ("lora_a", "lora_b") and (value.ndim != 2 or "switch_mlp" in path):
            raise UnsupportedModelError(
                f"{adapter.path}: {path} changes experts, which PEFT's layout does not hold"
            )
        spelt = {"lora_a": _A, "lora_b": _B, "m": _M}.get(kind)
        if spelt is None:
            raise ModelLoadError(f"{adapter.path}: {name} is no part of an adapter")
        tensors[f"{_PREFIX}{path}{spelt}"] = value if kind == "m" else mx.contiguous(value.T)
        modules.add(path)
    rank = next(int(v.shape[1]) for n, v in adapter.weights.items() if n.endswith(".lora_a"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": adapter.scale * rank,
        "lora_dropout": float((adapter.config.get("lora_parameters") or {}).get("dropout", 0.0)),
        "target_modules": sorted({path.rsplit(".", 1)[-1] for path in modules}),
        "layers_to_transform": sorted({int(m[1]) for path in modules if (m := _LAYER.search(path))}),
        "use_dora": adapter.type == "dora",
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    output.mkdir(parents=True)
    mx.save_safetensors(str(output / PEFT_WEIGHTS), tensors, metadata={"format": "pt"})
    write_json(output / CONFIG, config)


def import_peft(source: Path, output: Path) -> None:
    """Writes a PEFT LoRA or DoRA adapter into a new folder in mlx-lm's layout.

    Layers of other ranks or alphas than the rest get the rest's scale by a factor on ``lora_b``. Raises
    ModelLoadError for a damaged folder and UnsupportedModelError, naming the field, for what mlx-lm's layout
    cannot say.
    """
    config = _checked_config(source)
    weights = _weights(source)
    rank, alpha = _number(source, config, "r"), _number(source, config, "lora_alpha")
    is_rslora = bool(config.get("use_rslora"))
    scale = _scale(alpha, rank, is_rslora=is_rslora)
    tensors: dict[str, mx.array] = {}
    paths = sorted({_module(source, name) for name in weights})
    for path in paths:
        a, b = weights.get(f"{_PREFIX}{path}{_A}"), weights.get(f"{_PREFIX}{path}{_B}")
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ModelLoadError(f"{source}: {path} needs lora_A [rank, inputs] and lora_B [outputs, rank]")
        own_rank = a.shape[0]
        own_alpha = float(_pattern(config, "alpha_pattern", path, alpha))
        expected = int(_pattern(config, "rank_pattern", path, rank))
        if own_rank != expected:
            raise ModelLoadError(f"{source}: {path} has rank {own_rank}, {CONFIG} says {expected}")
        factor = _scale(own_alpha, own_rank, is_rslora=is_rslora) / scale
        tensors[f"{path}.lora_a"] = mx.contiguous(a.T)
        tensors[f"{path}.lora_b"] = mx.contiguous(b.T if factor == 1 else b.T * factor)
        m = weights.get(f"{_PREFIX}{path}{_M}", weights.get(f"{_PREFIX}{path}{_M_WEIGHT}"))
        if bool(config.get("use_dora")) != (m is not None):
            raise ModelLoadError(
                f"{source}: {path}: use_dora is {config.get('use_dora')!r}, which does not fit"
            )
        if m is not None:
            tensors[f"{path}.m"] = m.reshape(-1)
    _write_native(output, tensors, paths, rank, scale, config)


def _write_native(
    output: Path,
    tensors: Mapping[str, mx.array],
    paths: list[str],
    rank: float,
    scale: float,
    config: Mapping[str, Any],
) -> None:
    keys = sorted({_LAYER.split(path)[-1] for path in paths})
    settings = {
        "fine_tune_type": "dora" if config.get("use_dora") else "lora",
        # All: mlx-lm counts layers from the end, and a layer without tensors is not changed.
        "num_layers": -1,
        "lora_parameters": {
            "rank": int(rank),
            "scale": scale,
            "dropout": float(config.get("lora_dropout") or 0.0),
            "keys": keys,
        },
        "model": config.get("base_model_name_or_path"),
    }
    output.mkdir(parents=True)
    mx.save_safetensors(str(output / WEIGHTS), dict(tensors))
    write_json(output / CONFIG, settings)


def _checked_config(source: Path) -> dict[str, Any]:
    if not (source / CONFIG).is_file():
        raise ModelLoadError(f"{source}: not an adapter, {CONFIG} is missing")
    config = read_json_object(source / CONFIG)
    if config.get("peft_type") != "LORA":
        raise UnsupportedModelError(
            f"{source / CONFIG}: peft_type {config.get('peft_type')!r} is not supported, only 'LORA'"
        )
    wrong = {
        "bias": config.get("bias", "none") != "none",
        "modules_to_save": bool(config.get("modules_to_save")),
        "fan_in_fan_out": bool(config.get("fan_in_fan_out")),
        "target_parameters": bool(config.get("target_parameters")),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise UnsupportedModelError(f"{source / CONFIG}: {name} {config[name]!r} is not supported")
    return config


def _weights(source: Path) -> dict[str, mx.array]:
    path = source / PEFT_WEIGHTS
    if not path.is_file():
        raise ModelLoadError(f"{source}: {PEFT_WEIGHTS} is missing")
    weights = load_tensors(path)
    if not weights:
        raise ModelLoadError(f"{path}: has no tensors")
    return weights


def _module(source: Path, name: str) -> str:
    for suffix in (_A, _B, _M_WEIGHT, _M):
        if name.startswith(_PREFIX) and name.endswith(suffix):
            return name[len(_PREFIX) : -len(suffix)]
    raise UnsupportedModelError(f"{source}: tensor {name!r} is no part of a LoRA adapter of linear layers")


def _number(source: Path, config: Mapping[str, Any], name: str) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelLoadError(f"{source / CONFIG}: {name} must be a number above 0, found {value!r}")
    return float(value)


def _pattern(config: Mapping[str, Any], name: str, path: str, default: float) -> Any:
    """The value of the first pattern that is the end of a path, as PEFT matches them."""
    for pattern, value in (config.get(name) or {}).items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", path):
            return value
    return default


def _scale(alpha: float, rank: float, *, is_rslora: bool) -> float:
    return alpha / (rank**0.5 if is_rslora else rank)
