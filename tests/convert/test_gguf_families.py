"""Every GGUF family: written in llama.cpp's conventions, imported, equal to mlx-lm's model of the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import MODEL_ARCH
from gguf import GGMLQuantizationType as Kind
from mlx_lm.utils import load_model

from mlxserve.errors import ConversionError
from mlxserve.models.architectures import build_model
from mlxserve_convert import ConvertOptions, convert
from tests.convert.checkpoints import Arrays, logits
from tests.convert.gguf_writer import FAMILIES, Family, family_weights, write_family

TOKENS = [index * 37 % 320 for index in range(24)]
"""Longer than the windows of the models that have one."""


def reference(family: Family, weights: Arrays) -> np.ndarray:
    import mlx.core as mx

    model = build_model(family.config, Path("test"))
    arrays = {name: mx.array(values) for name, values in weights.items()}
    if hasattr(model, "sanitize"):
        arrays = model.sanitize(arrays)
    model.load_weights(list(arrays.items()))
    return logits(model, TOKENS)


def imported(folder: Path) -> np.ndarray:
    model, _ = load_model(folder)
    return logits(model, TOKENS)


def family(arch: MODEL_ARCH) -> Family:
    return next(family for family in FAMILIES if family.arch == arch)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q5_1])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_logits_are_those_of_the_model(tmp_path: Path, family: Family, kind: Kind) -> None:
    weights = family_weights(family)
    held = write_family(tmp_path / "tiny.gguf", family, weights, kind)
    report = convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions())
    assert report.model_type == family.config["model_type"]
    assert report.inexact_tensors == ()
    expected = reference(family, held)
    # A tiny model of random weights would not show a lost scale or cap otherwise.
    assert np.abs(expected).max() > 0.5
    assert np.abs(imported(tmp_path / "out") - expected).max() < 2e-4 * np.abs(expected).max()


def test_experts_in_mxfp4_keep_their_words(tmp_path: Path) -> None:
    oss = family(MODEL_ARCH.GPT_OSS)
    kinds = {"experts": Kind.MXFP4}
    held = write_family(tmp_path / "tiny.gguf", oss, family_weights(oss), Kind.Q8_0, kinds=kinds)
    report = convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions())
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert entry["model.layers.1.mlp.experts.up_proj"] == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert report.inexact_tensors == ()
    expected = reference(oss, held)
    assert np.abs(imported(tmp_path / "out") - expected).max() < 2e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("arch", "metadata", "expected"),
    [
        (MODEL_ARCH.GEMMA3, {"gemma3.attention.sliding_window_pattern": 2}, {"sliding_window_pattern": 2}),
        (
            MODEL_ARCH.GEMMA3,
            {"gemma3.attention.sliding_window_pattern": [True, True, False] * 2},
            {"sliding_window_pattern": 3},
        ),
        (MODEL_ARCH.GEMMA3, {"gemma3.rope.freq_base_swa": 5000.0}, {"rope_local_base_freq": 5000.0}),
    ],
)
def test_keys_reach_the_config(
    tmp_path: Path, arch: MODEL_ARCH, metadata: dict[str, Any], expected: dict[str, Any]
) -> None:
    one = family(arch)
    write_family(tmp_path / "tiny.gguf", one, family_weights(one), metadata=metadata)
    convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions())
    assert json.loads((tmp_path / "out" / "config.json").read_text()).items() >= expected.items()


@pytest.mark.parametrize(
    ("arch", "metadata", "message"),
    [
        (
            MODEL_ARCH.GEMMA2,
            {"gemma2.rope.scaling.type": "linear", "gemma2.rope.scaling.factor": 2.0},
            "gemma2.rope.scaling.type: 'linear' is not supported in gemma2 files, only: none",
        ),
        (
            MODEL_ARCH.GEMMA3,
            {"gemma3.attention.sliding_window_pattern": [True, False, False, True, True, True]},
            "the full layers do not follow one another at equal distances",
        ),
        (
            MODEL_ARCH.GEMMA3,
            {"gemma3.final_logit_softcapping": 30.0},
            "gemma3.final_logit_softcapping: a soft cap is not supported",
        ),
        (MODEL_ARCH.OLMO2, {"olmo2.expert_count": 4}, "olmo2.expert_count: a mixture of experts"),
        (MODEL_ARCH.QWEN3, {"qwen3.rope.dimension_count": 8}, "expected the head size 32, found 8"),
    ],
)
def test_settings_that_mlx_lm_would_ignore_are_refused(
    tmp_path: Path, arch: MODEL_ARCH, metadata: dict[str, Any], message: str
) -> None:
    one = family(arch)
    write_family(tmp_path / "tiny.gguf", one, family_weights(one), metadata=metadata)
    with pytest.raises(ConversionError) as error:
        convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions())
    assert message in str(error.value)


def test_a_window_that_mlx_lm_ignores_is_warned_of(tmp_path: Path) -> None:
    gemma2 = family(MODEL_ARCH.GEMMA2)
    long = Family(**{**vars(gemma2), "config": gemma2.config | {"max_position_embeddings": 8192}})
    write_family(tmp_path / "tiny.gguf", long, family_weights(long))
    report = convert(tmp_path / "tiny.gguf", tmp_path / "out", ConvertOptions())
    assert "attends without the sliding window of 4096 tokens" in report.warnings[0]
