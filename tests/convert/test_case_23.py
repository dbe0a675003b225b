"""Matrices and heads that no group divides: each set of options through convert, and quantized KV pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxserve.config import EngineConfig
from mlxserve.engine.core import EngineCore
from mlxserve.engine.model_target import ModelTarget
from mlxserve.errors import UsageError
from mlxserve.models.loader import load_model as load_served
from mlxserve_convert import ConvertOptions, convert
from mlxserve_kernels import ops
from tests.convert.checkpoints import LLAMA, logits, random_weights, write_folder
from tests.engine.driving import greedy, run, tokens
from tests.tiny_models import TinyModel, write_tiny_model

TOKENS = [3, 60, 17, 42, 5]
# Columns: 96 (q, k, v, gate, up, embedding, head), 80 (o), 4304 (down).
CONFIG = {
    **LLAMA,
    "hidden_size": 96,
    "head_dim": 20,
    "intermediate_size": 4304,
    "vocab_size": 259,
    "num_hidden_layers": 1,
    "quantization": {"bits": None, "group_size": 64},
}


@pytest.mark.parametrize(
    ("options", "group_of_96"),
    [
        ({"bits": 4, "group_size": 64}, 32),
        ({"bits": 4, "group_size": 128}, 32),
        ({"bits": 8, "group_size": 32}, 32),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, 32),
        ({"bits": 5, "group_size": 64}, 32),
    ],
)
def test_each_matrix_gets_a_group_or_stays(tmp_path: Path, options: dict[str, Any], group_of_96: int) -> None:
    source = write_folder(tmp_path / "source", CONFIG, random_weights(CONFIG))
    report = convert(source, tmp_path / "out", ConvertOptions(**options))
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    kept = {"model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"}
    assert set(report.unquantized_matrices) in (kept, {f"{name}.weight" for name in kept})
    assert {name for name, entry in quantization.items() if entry is False} == kept
    entry = {"group_size": group_of_96, "bits": options["bits"], "mode": options.get("mode", "affine")}
    assert quantization["model.layers.0.self_attn.q_proj"] == entry
    assert quantization["lm_head"]["group_size"] == group_of_96
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    num_bytes = sum(array.nbytes for array in arrays.values())
    assert report.bits_per_weight == pytest.approx(num_bytes * 8 / report.num_parameters)
    model, _ = load_model(tmp_path / "out")
    assert np.isfinite(logits(model, TOKENS)).all()


@pytest.mark.parametrize("group_size", [48])
@pytest.mark.parametrize("bits", [4, 5])
def test_impossible_groups_are_refused_at_once(bits: int, group_size: int) -> None:
    with pytest.raises(UsageError, match="48 is not possible, only: 32, 64, 128"):
        ConvertOptions(bits=bits, group_size=group_size)


@pytest.mark.parametrize("bits", [0, 7])
def test_impossible_bits_are_refused_at_once(bits: int) -> None:
    with pytest.raises(UsageError, match=f"--bits {bits} is not possible, only: 2, 3, 4, 5, 6, 8"):
        ConvertOptions(bits=bits, group_size=64)


@pytest.mark.parametrize("group_size", [64, 128])
def test_a_mode_of_one_group_size_takes_no_other(group_size: int) -> None:
    with pytest.raises(UsageError, match=f"--group-size {group_size} .*only: 32"):
        ConvertOptions(mode="mxfp4", group_size=group_size)


@pytest.mark.parametrize(("head_dim", "kv_bits", "window"), [(96, 4, None), (64, 8, None), (64, 4, 8)])
def test_kv_of_heads_that_fit(tmp_path: Path, head_dim: int, kv_bits: int, window: int | None) -> None:
    tiny = TinyModel(head_dim=head_dim)
    if window is not None:
        tiny = TinyModel(model_type="gemma3_text", head_dim=head_dim, sliding_window=window)
    model = load_served(write_tiny_model(tmp_path / "model", tiny))
    config = EngineConfig(page_size=16, kv_pages=32, kv_bits=kv_bits)
    core = EngineCore(ModelTarget(model, 16, kv_bits), config, is_pipelined=ops.supports_steps_in_flight())
    first = tokens(run(core, greedy("a", [5] * 40, 20))["a"])
    # The second request finds the first one's pages.
    assert tokens(run(core, greedy("b", [5] * 40, 20))["b"]) == first
    assert len(first) == 20
    core.check_integrity()


@pytest.mark.parametrize(("head_dim", "kv_bits"), [(80, 8), (16, 4)])
def test_kv_of_heads_that_do_not_fit_is_refused_at_the_start(
    tmp_path: Path, head_dim: int, kv_bits: int
) -> None:
    model = load_served(write_tiny_model(tmp_path / "model", TinyModel(head_dim=head_dim)))
    with pytest.raises(UsageError, match=rf"kv_bits {kv_bits} does not fit this model.*32, got {head_dim}"):
        ModelTarget(model, 16, kv_bits)


def test_kv_of_three_bits_is_refused_at_the_start() -> None:
    with pytest.raises(UsageError, match="kv_bits must be 8 or 4, not 3"):
        EngineConfig(kv_bits=3)
