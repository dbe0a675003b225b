"""``--recipe auto``: measured on a model, written to a size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxserve.errors import ConversionError
from mlxserve.models.architectures import build_model
from mlxserve_convert import ConvertOptions, convert, measured_recipe
from mlxserve_convert.sensitivity import measure, rounded
from mlxserve_convert.weights import Layout
from tests.convert.checkpoints import LLAMA, random_weights, write_folder

MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_recipe, "NUM_TOKENS", 48)


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["llama", "moe"])
def test_bits_differ_and_the_size_is_kept(tmp_path: Path, config: dict[str, Any]) -> None:
    source = write_folder(tmp_path / "source", config, random_weights(config))
    options = ConvertOptions(recipe="auto", target_bpw=5.0, dtype="bfloat16")
    report = convert(source, tmp_path / "out", options)
    # A tiny model has few places to put the last bits.
    assert 4.9 < report.bits_per_weight <= 5.0
    matrices = [tensor for tensor in report.tensors if tensor.is_matrix]
    assert len({(tensor.bits, tensor.group_size) for tensor in matrices}) > 1
    routers = [tensor.bits for tensor in matrices if tensor.name.endswith("mlp.gate.weight")]
    assert routers == ([8, 8] if config is MOE else [])
    load_model(tmp_path / "out")
    again = convert(source, tmp_path / "again", options)
    assert [tensor.bits for tensor in again.tensors] == [tensor.bits for tensor in report.tensors]
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert settings["model.embed_tokens"]["bits"] == next(
        tensor.bits for tensor in matrices if tensor.name == "model.embed_tokens.weight"
    )


def test_a_size_that_cannot_be_reached_and_memory_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(tmp_path / "source", LLAMA, random_weights(LLAMA))
    with pytest.raises(ConversionError, match=r"--target-bpw 2 is too little for source, at least 3\.21 are"):
        convert(source, tmp_path / "out", ConvertOptions(recipe="auto", target_bpw=2.0))
    monkeypatch.setattr(measured_recipe, "_MEMORY_SHARE", 0.0)
    with pytest.raises(ConversionError, match=r"loads the whole of source in float32 and needs \d"):
        convert(source, tmp_path / "out", ConvertOptions(recipe="auto"))
    assert not (tmp_path / "out").exists()


def test_costs_foretell_the_divergence_of_predictions() -> None:
    config = {**LLAMA, "hidden_size": 128}
    model = build_model(config, Path("test"))
    weights = random_weights(config)
    model.load_weights(
        [(name, mx.array(value) * (1.0 if "norm" in name else 0.3)) for name, value in weights.items()]
    )
    leaves = dict(model.named_modules())
    paths = ["model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj", "lm_head"]
    before = model(mx.array([TOKENS]))
    found = measure(model, {path: leaves[path] for path in paths}, TOKENS)
    for path in paths:
        weight = leaves[path].weight
        costs, divergences = [], []
        for bits in (2, 3, 4):
            stored = rounded(weight, Layout("affine", bits, 32, mx.float32), mx.ones(weight.shape[-1]))
            costs.append(found[path].cost(stored, len(TOKENS)))
            leaves[path].weight = stored
            divergences.append(_divergence(before, model(mx.array([TOKENS]))))
            leaves[path].weight = weight
        ratio = np.array(costs) / np.array(divergences)
        assert (np.diff(costs) < 0).all()
        assert ((ratio > 0.2) & (ratio < 5)).all(), (path, ratio)
    # The kernels sum in another order.
    assert mx.allclose(model(mx.array([TOKENS])), before, atol=1e-4)


def _divergence(p: mx.array, q: mx.array) -> float:
    first, second = (np.array(x, dtype=np.float64)[0] for x in (p, q))
    logs = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (first, second)]
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).mean())
