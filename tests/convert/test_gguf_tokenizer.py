"""Tokenizers from hand-written metadata: both kinds, every pre-tokenizer, special tokens, bad metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlxserve.errors import ConversionError
from mlxserve_convert.gguf_tokenizer import GGUFTokenizer, merges_from_scores, read_tokenizer
from mlxserve_convert.pretokenizers import PRE_TOKENIZERS
from tests.convert.checkpoints import BYTE_CHARACTERS

PATH = Path("model.gguf")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level(**changes: Any) -> dict[str, Any]:
    tokens = [*BYTE_CHARACTERS, "he", "ll", "hell", "<s>", "</s>", "  ", "Ġhe"]
    types = [NORMAL] * 259 + [CONTROL, CONTROL, USER_DEFINED, NORMAL]
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": ["h e", "l l", "he ll", "Ġ he"],
        "bos_token_id": 259,
        "eos_token_id": 260,
    }
    return _metadata(keys | changes)


def sentence_piece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    scores = [0.0] * 259
    pieces = [("▁", -9.0), ("a", -8.0), ("b", -8.5), ("ab", -2.0), ("▁a", -1.0), ("ba", -3.0), ("▁ab", -4.0)]
    tokens += [piece for piece, _ in pieces]
    types += [NORMAL] * len(pieces)
    scores += [score for _, score in pieces]
    keys = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _metadata(keys | changes)


def _metadata(keys: dict[str, Any]) -> dict[str, Any]:
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": "llama", "llama.context_length": 128, **named}


def load(metadata: dict[str, Any]) -> tuple[Tokenizer, GGUFTokenizer]:
    read = read_tokenizer(metadata, PATH)
    return Tokenizer.from_str(json.dumps(read.tokenizer)), read


def test_merges_run_in_rank_order_inside_the_pieces() -> None:
    tokenizer, _ = load(byte_level())
    assert tokenizer.encode("hell hell").tokens == ["hell", "Ġ", "hell"]


def test_user_defined_tokens_come_first_and_stay_text() -> None:
    tokenizer, _ = load(byte_level())
    encoding = tokenizer.encode("a  b</s>")
    assert encoding.tokens == ["a", "  ", "b", "</s>"]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=True) == "a  b"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["a"]),
        ({"add_bos_token": True}, ["<s>", "a"]),
        ({"add_eos_token": True}, ["a", "</s>"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "a", "</s>"]),
        ({"pre": "llama-bpe"}, ["<s>", "a"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["a"]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(changes: dict[str, Any], expected: list[str]) -> None:
    tokenizer, read = load(byte_level(**changes))
    assert tokenizer.encode("a").tokens == expected
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]
    assert read.config["add_bos_token"] is (expected[0] == "<s>")


def test_end_tokens_of_every_source() -> None:
    tokens = [*byte_level()["tokenizer.ggml.tokens"], "<|im_end|>", "<|eot_id|>", "<turn>"]
    types = [*byte_level()["tokenizer.ggml.token_type"], CONTROL, NORMAL, CONTROL]
    _, read = load(byte_level(tokens=tokens, token_type=types, eot_token_id=265))
    assert read.eos_ids == (260, 265, 263)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_compiles_and_loses_nothing(name: str) -> None:
    tokenizer, _ = load(byte_level(pre=name, token_type=[NORMAL] * 263, add_bos_token=False))
    text = "Hello, world's 12345 x=3.14!!\n\n\tÀé日本 한국 🚀 \u0915\u094d  end  \r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def pieces(name: str, text: str) -> list[str]:
    tokenizer, _ = load(byte_level(pre=name))
    assert tokenizer.pre_tokenizer is not None
    return [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["It", "'s", " 1234", "  ", " 5", " A", "'", "LL", " ==", "\n", "\n", "x"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "   ", "5", " A", "'", "LL", " =="]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", "  ", " ", "5", " A", "'LL", " ==\n\n", "x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "  ", " ", "5", " A", "'LL", " ==\n\n", "x"]),
        ("deepseek-v3", ["It", "'s", " ", "123", "4", "   ", "5", " A", "'LL", " ==\n\n", "x"]),
    ],
)
def test_pieces(name: str, expected: list[str]) -> None:
    found = pieces(name, "It's 1234   5 A'LL ==\n\nx")
    assert found[: len(expected)] == expected


def test_scores_decide_and_not_the_order_of_the_vocabulary() -> None:
    tokenizer, _ = load(sentence_piece(add_bos_token=False))
    # "▁a" (-1) is joined before "ab" (-2), then "▁ab".
    assert tokenizer.encode("ab").tokens == ["▁ab"]
    assert tokenizer.encode("bab").tokens == ["▁", "b", "ab"]
    assert tokenizer.encode("aba").tokens == ["▁a", "ba"]


def test_sentence_piece_bytes_spaces_and_bos() -> None:
    tokenizer, read = load(sentence_piece())
    encoding = tokenizer.encode("a é")
    assert encoding.tokens == ["<s>", "▁a", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoding.ids) == "a é"
    assert read.config["unk_token"] == "<unk>"
    plain, _ = load(sentence_piece(add_space_prefix=False, add_bos_token=False))
    assert plain.encode("a").tokens == ["a"]
    assert plain.decode(plain.encode(" a").ids) == " a"


def test_merges_rank_by_score_then_by_longer_parts() -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "ba": 3, "aba": 4}
    scores = [-1.0, -1.0, -5.0, -4.0, -3.0]
    assert merges_from_scores(vocabulary, scores) == [["ab", "a"], ["a", "ba"], ["b", "a"], ["a", "b"]]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level(pre="no-such"), "pre-tokenizer 'no-such' is not known .*only: .*smollm"),
        (byte_level(pre=None), "no pre-tokenizer is named"),
        (byte_level(model="bert"), "tokenizer model 'bert' is not supported, only: gpt2, llama"),
        (byte_level(tokens=None), "has no tokenizer"),
        (byte_level(merges=None), "needs merges"),
        (byte_level(merges=["h zz"]), "merge 'h zz' joins tokens that the vocabulary lacks"),
        (byte_level(token_type=[1]), "263 tokens but 1 token types"),
        (byte_level(eos_token_id=9999), "eos_token_id is 9999, the vocabulary has 263 tokens"),
        (byte_level(tokens=["a", "a"], token_type=[1, 1]), "token 'a' occurs twice"),
        (sentence_piece(scores=[0.0]), "266 tokens but 1 scores"),
    ],
)
def test_bad_metadata_is_one_line(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message) as error:
        read_tokenizer(metadata, PATH)
    assert str(error.value).startswith("model.gguf: ")
    assert "\n" not in str(error.value)
