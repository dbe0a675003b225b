"""Tokenizers of real GGUF files give the ids that were published with them, where those files are."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlxserve_convert.gguf_file import GGUFFile
from mlxserve_convert.gguf_tokenizer import GGUFTokenizer, read_tokenizer

VOCABULARIES = Path(__file__).parents[2].parent / "shared" / "vocab"
NAMES = ("deepseek-coder", "gpt-2", "llama-spm", "phi-3", "refact")
LOSSLESS = ("gpt-2", "llama-spm", "phi-3")
"""deepseek-coder has tokens such as "À" that stand for a byte and for a letter; refact lacks some bytes."""
SEPARATOR = "\n__ggml_vocab_test__\n"

CHARACTERS = st.sampled_from("aBé1 \t\n\r日ſ🚀.,'\"s\u0301\u0000\u200b\u2028नि_") | st.characters(
    codec="utf-8"
)

_cache: dict[str, Tokenizer] = {}
_metadata: dict[str, dict[str, Any]] = {}


def source(name: str) -> Path:
    path = VOCABULARIES / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return path


def read(name: str) -> GGUFTokenizer:
    path = source(name)
    with GGUFFile(path) as file:
        return read_tokenizer(file.metadata, path)


def load(name: str) -> Tokenizer:
    if name not in _cache:
        _cache[name] = Tokenizer.from_str(json.dumps(read(name).tokenizer))
    return _cache[name]


@pytest.mark.parametrize("name", NAMES)
def test_published_ids(name: str) -> None:
    path = source(name)
    inputs = path.with_name(path.name + ".inp").read_bytes().decode().split(SEPARATOR)
    outputs = path.with_name(path.name + ".out").read_text().split("\n")
    assert len(inputs) == len(outputs) > 40
    tokenizer = load(name)
    for text, line in zip(inputs, outputs, strict=True):
        expected = [int(number) for number in line.split()]
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, repr(text)


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=150, deadline=None)
@given(
    text=st.text(
        st.sampled_from("aBé1 \t\n\r日ſ🚀.,'\"s\u0301\u0000\u200b\u2028नि_") | st.characters(codec="utf-8")
    )
)
def test_text_survives(name: str, text: str) -> None:
    tokenizer = load(name)
    # "▁" is how SentencePiece writes a space: a text that holds it cannot come back.
    text = text.replace("▁", "")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def join_by_score(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece's own rule, done slowly: join the neighbours with the best result, leftmost first."""
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [left + right for left, right in pairwise(parts)]
        ranked = [(-scores[ids[pair]], at) for at, pair in enumerate(pairs) if pair in ids]
        if not ranked:
            break
        at = min(ranked)[1]
        parts[at : at + 2] = [pairs[at]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_ranked_merges_do_what_scores_do(data: st.DataObject) -> None:
    path = source("llama-spm")
    if "llama-spm" not in _metadata:
        with GGUFFile(path) as file:
            _metadata["llama-spm"] = file.metadata
    metadata = _metadata["llama-spm"]
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    ids = {token: index for index, token in enumerate(tokens)}
    words = st.sampled_from(tokens[259:]).map(lambda token: token.replace("▁", " "))
    text = data.draw(st.lists(words | st.text("ab  .e,th=-*1é\n", max_size=6), max_size=8).map("".join))
    expected = join_by_score(text, ids, metadata["tokenizer.ggml.scores"])
    assert load("llama-spm").encode(text, add_special_tokens=False).ids == expected


def test_special_tokens_and_end_tokens() -> None:
    phi = read("phi-3")
    assert phi.eos_ids[0] == 32000
    assert load("phi-3").token_to_id("<|end|>") in phi.eos_ids
    assert load("llama-spm").encode("Hi").ids[0] == 1
    assert load("deepseek-coder").encode("Hi").ids[0] == 32013
    assert load("gpt-2").encode("<|endoftext|>").ids == [50256]
