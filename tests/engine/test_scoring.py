"""Perplexity and divergence against plain numpy over mlx-lm's own logits."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_model as load_mlx_lm

from mlxserve.engine import scoring
from mlxserve.engine.scoring import (
    PagedScorer,
    StoredLogits,
    open_scored,
    perplexity,
    shipped_text,
    target_log_probabilities,
    text_windows,
    tokens_of,
)
from mlxserve.engine.windows import make_windows
from mlxserve.errors import UsageError
from mlxserve.text.tokenizer import load_tokenizer
from tests.tiny_models import EOS_ID, EOS_TOKEN, write_tiny_model

TEXT = "The quick brown fox jumps over the lazy dog, and then over it again."


@given(st.integers(0, 2), st.integers(2, 60), st.integers(2, 20), st.integers(1, 20))
def test_every_token_but_the_first_counts_once(prefix: int, length: int, context: int, stride: int) -> None:
    before, ids = [900] * prefix, list(range(length))
    if context < prefix + 2 or stride >= context - prefix:
        with pytest.raises(UsageError):
            make_windows(before, ids, context, stride)
        return
    windows = make_windows(before, ids, context, stride)
    assert [target for window in windows for target in window.targets] == ids[1:]
    for window in windows:
        assert window.token_ids[:prefix] == tuple(before)
        assert len(window.token_ids) < context
        for offset, target in enumerate(window.targets):
            row = window.first_row + offset
            # The row before a token is that token's predecessor, or the BOS of a window's first token.
            assert window.token_ids[row] == target - 1
        if window is not windows[0]:
            assert window.first_row - prefix >= context - prefix - stride - 1


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def stock_rows(folder: Path, windows: list) -> np.ndarray:
    """Log-probabilities [tokens, V] in float64, by mlx-lm alone."""
    model, _ = load_mlx_lm(folder)
    rows = []
    for window in windows:
        logits = np.array(model(mx.array([list(window.token_ids)]))[0], dtype=np.float64)
        rows.append(log_softmax(logits)[window.first_row :])
    return np.concatenate(rows)


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("rows", [3, 256])
def test_figures_are_those_of_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_plain: bool, rows: int
) -> None:
    monkeypatch.setattr(scoring, "_MAX_ROWS", rows)
    first = write_tiny_model(tmp_path / "a", seed=1)
    second = write_tiny_model(tmp_path / "b", seed=2)
    if is_plain:
        monkeypatch.setattr(scoring, "load_model", _refuse)
    a, b = open_scored(first), open_scored(second)
    assert isinstance(a.scorer, PagedScorer) is not is_plain
    windows = text_windows(a, TEXT, context=20, stride=7, max_tokens=50)
    targets = [target for window in windows for target in window.targets]
    assert len(targets) == 49
    mine, theirs = stock_rows(first, windows), stock_rows(second, windows)
    own = target_log_probabilities(a.scorer, windows)
    np.testing.assert_allclose(own, mine[np.arange(49), targets], atol=2e-4)
    assert perplexity(own) == pytest.approx(math.exp(-mine[np.arange(49), targets].mean()), rel=1e-4)

    stored = StoredLogits(file := io.BytesIO())
    stored.write(a.scorer, windows)
    assert len(file.getvalue()) == StoredLogits.num_bytes(49, a.scorer.vocab_size)
    found = stored.compare(b.scorer, windows)
    kl = (np.exp(mine) * (mine - theirs)).sum(-1)
    assert found.mean_kl == pytest.approx(kl.mean(), rel=1e-3)
    assert found.max_kl == pytest.approx(kl.max(), rel=1e-3)
    assert found.p99_kl == pytest.approx(np.percentile(kl, 99), rel=1e-3)
    assert found.same_top == pytest.approx((mine.argmax(-1) == theirs.argmax(-1)).mean())
    assert found.perplexity_b == pytest.approx(math.exp(-theirs[np.arange(49), targets].mean()), rel=1e-3)
    same = stored.compare(a.scorer, windows)
    assert (same.mean_kl, same.max_kl, same.same_top) == (0.0, 0.0, 1.0)


def _refuse(folder: Path) -> None:
    from mlxserve.errors import UnsupportedModelError

    raise UnsupportedModelError("not served")


def test_a_window_begins_with_the_tokenizers_own_prefix(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": EOS_TOKEN, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {EOS_TOKEN: {"id": EOS_TOKEN, "ids": [EOS_ID], "tokens": [EOS_TOKEN]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    prefix, ids = tokens_of(load_tokenizer(folder), "abc")
    assert prefix == [EOS_ID]
    assert len(ids) == 3


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    model = open_scored(write_tiny_model(tmp_path, context=64))
    with pytest.raises(UsageError, match="--context 65 is more than the model supports: 64 tokens"):
        text_windows(model, TEXT, context=65, stride=1, max_tokens=None)
    with pytest.raises(UsageError, match="stride must be from 1 to 63"):
        text_windows(model, TEXT, context=64, stride=64, max_tokens=None)
    with pytest.raises(UsageError, match="text of 1 tokens"):
        text_windows(model, "a", context=64, stride=8, max_tokens=None)
    assert perplexity(np.array([-math.inf, -1.0])) == math.inf


def test_the_shipped_text_is_plain_prose() -> None:
    text = shipped_text()
    assert len(text) > 15_000
    assert "Chemical History of a Candle" in text
    assert "Gutenberg" not in text
