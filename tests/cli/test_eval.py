"""``mlxserve eval`` as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result
from tests.tiny_models import write_tiny_model

Run = Callable[..., Result]


def test_perplexity_of_a_text(run: Run, tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "model"))
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night; the rain fell in torrents.")
    result = run("eval", "perplexity", model, "--text", str(text), "--context", "32", "--json")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    assert (report["tokens"], report["context"], report["stride"]) == (57, 32, 16)
    shorter = run("eval", "perplexity", model, "--text", str(text), "--max-tokens", "20")
    assert "over 19 tokens" in shorter.out
    assert "Windows of 128 tokens, 64 apart" in shorter.out


def test_kl_of_two_models(run: Run, tmp_path: Path) -> None:
    first, second = (str(write_tiny_model(tmp_path / name, seed=i)) for i, name in enumerate("ab"))
    other = json.loads(run("eval", "kl", first, second, "--max-tokens", "60", "--json").out)
    same = json.loads(run("eval", "kl", first, first, "--max-tokens", "60", "--json").out)
    assert (same["mean_kl"], same["same_top"], same["tokens"]) == (0.0, 1.0, 59)
    assert 0.01 < other["mean_kl"] < other["p99_kl"] <= other["max_kl"]
    assert other["perplexity_a"] == same["perplexity_b"]


@pytest.mark.parametrize("vocab", [140, 128])
def test_models_with_other_tokens_are_not_compared(run: Run, tmp_path: Path, vocab: int) -> None:
    first = write_tiny_model(tmp_path / "a")
    second = write_tiny_model(tmp_path / "b", vocab=vocab)
    if vocab == 128:
        spec = (second / "tokenizer.json").read_text()
        # "e" and "t" swap their ids.
        swapped = spec.replace('"e":', '"?":').replace('"t":', '"e":').replace('"?":', '"t":', 1)
        (second / "tokenizer.json").write_text(swapped)
    result = run("eval", "kl", str(first), str(second), "--max-tokens", "20")
    assert result.code == 2
    assert result.err.strip() == "error: a and b have different tokens and cannot be compared"


def test_wrong_texts_and_sizes_are_one_line(run: Run, tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "model"))
    missing = run("eval", "perplexity", model, "--text", str(tmp_path / "none.txt"))
    assert missing.code == 2
    assert "cannot be read: No such file" in missing.err
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    assert (
        "is not UTF-8, byte 3" in run("eval", "perplexity", model, "--text", str(tmp_path / "latin.txt")).err
    )
    too_long = run("eval", "perplexity", model, "--context", "4096")
    assert (too_long.code, too_long.err.count("\n")) == (2, 1)
    assert "--context 4096 is more than the model supports: 128 tokens" in too_long.err
