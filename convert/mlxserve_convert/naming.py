"""Names of a Hugging Face checkpoint before and after mlx-lm's ``sanitize``: the text part of a multimodal
one, experts that must be whole, and experts fused in one tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxserve.errors import ConversionError
from mlxserve.models.architectures import known_model_types
from mlxserve_convert.tracing import Traced
from mlxserve_convert.weights import Weight

_OTHER_PARTS = frozenset(
    {
        "audio_tower",
        "embed_audio",
        "embed_vision",
        "image_newline",
        "mm_projector",
        "multi_modal_projector",
        "patch_merger",
        "vision_embedder",
        "vision_encoder",
        "vision_language_adapter",
        "vision_model",
        "vision_tower",
        "visual",
    }
)
"""Modules beside the text part, by a component of their tensors' names."""
_TO_PLAIN = (
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_TO_NESTED = (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
_INHERITED = (
    "tie_word_embeddings",
    "torch_dtype",
    "dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "quantization",
    "quantization_config",
    "compression_config",
)
_EXPERT = re.compile(r"(?P<layer>.*\bexperts)\.(?P<number>\d{1,6})\.(?P<part>.+)")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHOWN = 3


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the text part, if mlx-lm knows that part's architecture and not the whole one's.

    A checkpoint that brings code of its own is not taken apart: the code may change the text part, too.
    """
    nested, known = config.get("text_config"), known_model_types()
    if (
        config.get("model_type") in known
        or not isinstance(nested, dict)
        or nested.get("model_type") not in known
    ):
        return config
    if "auto_map" in config or "model_file" in config:
        return config
    return {key: config[key] for key in _INHERITED if key in config} | nested


def text_weights(
    weights: dict[str, Weight], config: Mapping[str, Any], *, is_taken_out: bool, path: Path
) -> tuple[dict[str, Weight], list[str]]:
    """Without the tensors of the other parts of a multimodal checkpoint, and what is to be said of it.

    ``config`` is that of the files. ``is_taken_out``: the text part is converted as a model of its own
    (``text_config``), so its names lose the wrapper's prefix. Other checkpoints stay as they are.
    """
    if not isinstance(config.get("text_config"), dict):
        return weights, []
    others = [name for name in weights if not _OTHER_PARTS.isdisjoint(name.split("."))]
    kept = {name: weight for name, weight in weights.items() if name not in set(others)}
    notes = []
    if is_taken_out:
        kept = _renamed(kept, _TO_PLAIN, path)
        notes.append(
            f"model_type {str(config['model_type'])[:100]!r} is not supported: only its text part, a "
            f"{config['text_config']['model_type']} model, is converted"
        )
    if others:
        parts = sorted({part for name in others for part in name.split(".") if part in _OTHER_PARTS})
        notes.append(
            f"only the text part is converted: {len(others)} tensors of {', '.join(parts)} are left out"
        )
    return kept, notes


def nested_names(
    weights: Mapping[str, Weight], parameters: Mapping[str, Any], path: Path
) -> dict[str, Weight]:
    """Names that newer tools write (``model.language_model.X``) as ``language_model.model.X``, which every
    model of mlx-lm with such ``parameters`` reads; several read nothing else."""
    if not any(name.startswith("language_model.") for name in parameters):
        return dict(weights)
    if not any(name.startswith("model.language_model.") for name in weights):
        return dict(weights)
    return _renamed(weights, _TO_NESTED, path)


def _renamed(
    weights: Mapping[str, Weight], prefixes: tuple[tuple[str, str], ...], path: Path
) -> dict[str, Weight]:
    found: dict[str, Weight] = {}
    for name, weight in weights.items():
        old, new = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        renamed = new + name.removeprefix(old)
        if renamed in found:
            raise ConversionError(f"{path}: two tensors are {renamed!r} of the text part, one is {name!r}")
        found[renamed] = weight
    return found


def check_experts(weights: Mapping[str, Weight], config: Mapping[str, Any], path: Path) -> None:
    """Raises ConversionError with the name of the first tensor that an expert lacks and another has.

    ``sanitize`` looks at expert 0 alone: what it misses there leaves all other experts unused.
    """
    layers: dict[str, set[int]] = {}
    parts: dict[str, set[str]] = {}
    for name in weights:
        found = _EXPERT.fullmatch(name)
        if found is not None:
            layers.setdefault(found["layer"], set()).add(int(found["number"]))
            parts.setdefault(found["layer"], set()).add(found["part"])
    count = _num_experts(config)
    for layer in sorted(layers):
        numbers = range(count) if count else sorted(layers[layer])
        for number in numbers:
            for part in sorted(parts[layer]):
                name = f"{layer}.{number}.{part}"
                if name not in weights:
                    raise ConversionError(
                        f"{path}: tensor {name!r} is missing: expert {number} of {len(numbers)} lacks it"
                    )


def _num_experts(config: Mapping[str, Any]) -> int | None:
    nested = config.get("text_config")
    for place in (nested if isinstance(nested, dict) else {}, config):
        for key in _EXPERT_COUNTS:
            count = place.get(key)
            # Larger ones are no experts but damage, which the shapes show.
            if isinstance(count, int) and not isinstance(count, bool) and 0 < count < 10_000:
                return count
    return None


def split_fused_experts(
    weights: dict[str, Weight], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Weight]:
    """``experts.gate_up_proj`` [experts, 2 * width, hidden] (the gate's rows first) and ``experts.down_proj``
    [experts, hidden, width] as the three matrices of mlx-lm's ``switch_mlp``, where ``sanitize`` left them.

    ``shapes`` are those of the model's parameters. Tensors of other shapes stay, and are named as unknown.
    """
    result = dict(weights)
    for name, weight in weights.items():
        layer, _, part = name.rpartition(".experts.")
        switch = f"{layer}.switch_mlp"
        if name in shapes or part not in ("gate_up_proj", "down_proj"):
            continue
        down, gate = shapes.get(f"{switch}.down_proj.weight"), shapes.get(f"{switch}.gate_proj.weight")
        if part == "down_proj" and weight.shape == down:
            result[f"{switch}.down_proj.weight"] = result.pop(name)
        if part == "gate_up_proj" and gate is not None and weight.shape == (gate[0], 2 * gate[1], gate[2]):
            fused = Traced(result.pop(name))
            result[f"{switch}.gate_proj.weight"] = fused[:, : gate[1]].weight
            result[f"{switch}.up_proj.weight"] = fused[:, gate[1] :].weight
    return result
