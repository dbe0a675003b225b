"""Random adapters for tiny models, in mlx-lm's layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.tiny_models import TinyModel

PROJECTIONS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: TinyModel,
    *,
    seed: int = 1,
    rank: int = 4,
    scale: float = 4.0,
    names: Sequence[str] = PROJECTIONS,
    **config: Any,
) -> Path:
    """An adapter of every layer of a Llama-like ``model``, strong enough to change its answers."""
    rng = np.random.default_rng(seed)
    inner = model.heads * model.head_dim
    kv = model.kv_heads * model.head_dim
    sizes = {
        "q_proj": ("self_attn", model.hidden, inner),
        "k_proj": ("self_attn", model.hidden, kv),
        "v_proj": ("self_attn", model.hidden, kv),
        "o_proj": ("self_attn", inner, model.hidden),
        "gate_proj": ("mlp", model.hidden, model.intermediate),
        "up_proj": ("mlp", model.hidden, model.intermediate),
        "down_proj": ("mlp", model.intermediate, model.hidden),
    }
    weights = {}
    for layer in range(model.layers):
        for name in names:
            part, inputs, outputs = sizes[name]
            path = f"model.layers.{layer}.{part}.{name}"
            weights[f"{path}.lora_a"] = rng.normal(0, inputs**-0.5, (inputs, rank)).astype(np.float32)
            weights[f"{path}.lora_b"] = rng.normal(0, rank**-0.5, (rank, outputs)).astype(np.float32)
    keys = sorted({name.split(".", 3)[3].rsplit(".", 1)[0] for name in weights})
    settings: dict[str, Any] = {
        "fine_tune_type": "lora",
        "num_layers": model.layers,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys},
        **config,
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapters.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
