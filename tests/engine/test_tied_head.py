"""Loaded without a conversion: the head that the files hold is the one that is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxserve.errors import ModelLoadError
from mlxserve.models.loader import load_module
from tests.convert.checkpoints import LLAMA, Arrays, logits, random_weights, reference_model, write_folder

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TOKENS = [3, 60, 17, 42, 5]
UNTIED = {**LLAMA, "tie_word_embeddings": False}
TIED = {**LLAMA, "tie_word_embeddings": True}
SILENT = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}


def assert_serves(folder: Path, config: dict[str, Any], weights: Arrays, same: dict[str, Any]) -> None:
    module = load_module(write_folder(folder, config, weights))
    kept = {name: values for name, values in weights.items() if name != HEAD or same is UNTIED}
    expected = logits(reference_model(same, kept), TOKENS)
    np.testing.assert_allclose(logits(module, TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_a_head_that_differs_from_the_tied_embedding_is_used(tmp_path: Path) -> None:
    assert_serves(tmp_path, TIED, random_weights(UNTIED), UNTIED)


def test_a_head_that_equals_the_tied_embedding(tmp_path: Path) -> None:
    weights = random_weights(TIED)
    assert_serves(tmp_path, TIED, {**weights, HEAD: weights[EMBEDDING]}, TIED)


@pytest.mark.parametrize("same", [TIED, UNTIED], ids=["tied", "untied"])
def test_without_a_flag_the_files_decide(tmp_path: Path, same: dict[str, Any]) -> None:
    assert_serves(tmp_path, SILENT, random_weights(same), same)


def test_not_tied_and_no_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="Missing 1 parameters"):
        load_module(write_folder(tmp_path, UNTIED, random_weights(TIED)))


@pytest.mark.parametrize("same", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("is_above", [True, False])
def test_the_flag_of_a_nested_config(tmp_path: Path, same: dict[str, Any], is_above: bool) -> None:
    flag = {"tie_word_embeddings": same["tie_word_embeddings"]}
    config: dict[str, Any] = {"model_type": "mistral3", "text_config": SILENT | ({} if is_above else flag)}
    weights = random_weights(same)
    nested = {f"language_model.{name}": values for name, values in weights.items()}
    module = load_module(write_folder(tmp_path, config | (flag if is_above else {}), nested))
    expected = logits(reference_model(same, weights), TOKENS)
    np.testing.assert_allclose(logits(module, TOKENS), expected, rtol=1e-4, atol=1e-4)
