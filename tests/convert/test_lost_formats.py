"""Quantized types that MLX has no layout for: exact while the result stays small, else 8-bit, or as asked."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import MODEL_ARCH
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.errors import UsageError
from mlxserve_convert import ConvertOptions, ConvertReport, convert
from tests.convert.gguf_writer import FAMILIES, Family, family_weights, write_family
from tests.convert.test_gguf_blocks import random_blocks

_LLAMA = next(family for family in FAMILIES if family.arch == MODEL_ARCH.LLAMA)
LLAMA = Family(**{**vars(_LLAMA), "config": _LLAMA.config | {"hidden_size": 256, "head_dim": 64}})
DOWN = "model.layers.0.mlp.down_proj"


def write(path: Path, *, embedding: int) -> None:
    """One down projection of Q6_K beside an embedding of so many rows."""
    from gguf import quants

    config = LLAMA.config | {"vocab_size": embedding, "intermediate_size": 256, "num_hidden_layers": 1}
    family = Family(**{**vars(LLAMA), "config": config | {"tie_word_embeddings": True}})
    original = quants.quantize

    def quantize(data: np.ndarray, kind: Kind) -> np.ndarray:
        if kind != Kind.Q6_K:
            return original(data, kind)
        rows = random_blocks(kind).reshape(-1, 210)
        return np.resize(rows, (data.shape[0] * data.shape[1] // 256, 210)).reshape(data.shape[0], -1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quants, "quantize", quantize)
        kinds = {"mlp.": Kind.Q6_K}
        write_family(path, family, family_weights(family), Kind.Q8_0, kinds=kinds)


def imported(folder: Path, *, embedding: int, how: str) -> ConvertReport:
    write(folder / "tiny.gguf", embedding=embedding)
    return convert(
        folder / "tiny.gguf", folder / "out", ConvertOptions(lost_formats=how, check="never", force=True)
    )


@pytest.mark.parametrize(
    ("embedding", "how", "is_exact"),
    [
        # The Q6_K matrices are a small part of the first file, and most of the second.
        (8192, "auto", True),
        (320, "auto", False),
        (320, "float", True),
        (8192, "8bit", False),
    ],
)
def test_floats_while_the_result_stays_small(
    tmp_path: Path, embedding: int, how: str, is_exact: bool
) -> None:
    report = imported(tmp_path, embedding=embedding, how=how)
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    arrays = mx.load(str(tmp_path / "out" / "model.safetensors"))
    rounded = {tensor.name for tensor in report.inexact_tensors}
    if is_exact:
        assert quantization[DOWN] is False
        assert arrays[f"{DOWN}.weight"].dtype == mx.float32
        assert rounded == set()
    else:
        assert quantization[DOWN] == {"group_size": 32, "bits": 8, "mode": "affine"}
        assert rounded == {f"model.layers.0.mlp.{part}_proj.weight" for part in ("down", "gate", "up")}
    size = (tmp_path / "tiny.gguf").stat().st_size
    if how == "auto":
        assert report.num_bytes < 1.6 * size
    grown = [warning for warning in report.warnings if "--bits makes it smaller" in warning]
    assert bool(grown) is (how == "float")


@pytest.mark.parametrize("changes", [{"bits": 4}, {"dequantize": True}, {"mode": "mxfp4"}])
def test_it_is_for_imports_alone(changes: dict) -> None:
    with pytest.raises(UsageError, match="--lost-formats is for imports in the source's own formats"):
        ConvertOptions(lost_formats="float", **changes)


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=8).filter(lambda text: text not in ("auto", "float", "8bit")))
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="only: auto, float, 8bit"):
        ConvertOptions(lost_formats=word)
