"""Damaged and hostile files: success or one line, in bounded memory (scripts/fuzz_readers)."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mlxserve.errors import ConversionError, ModelLoadError
from mlxserve.models.architectures import build_model
from mlxserve.models.safetensors_file import read_header
from mlxserve_convert.gguf_file import GGUFFile
from mlxserve_convert.gguf_tokenizer import read_tokenizer
from mlxserve_convert.prequantized import find_prequantized
from tests.convert.checkpoints import LLAMA
from tests.convert.mutations import Readers

CASES = 100
MAX_BYTES = 64 << 20


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Readers:
    return Readers(tmp_path_factory.mktemp("readers"))


@pytest.mark.parametrize(
    "kind",
    [
        "safetensors bytes",
        "safetensors header",
        "gguf bytes",
        "gguf fields",
        "gguf metadata",
        "config",
        "index",
    ],
)
def test_nothing_escapes_and_both_outcomes_occur(readers: Readers, kind: str) -> None:
    tracemalloc.start()
    outcomes = {readers.run(kind, seed) for seed in range(CASES)}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "read" in outcomes
    assert len(outcomes) > 1
    assert peak < MAX_BYTES


def safetensors(path: Path, header: str | bytes, data: int = 64) -> Path:
    raw = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(data))
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {}}', "'a' occurs twice"),
        ("[" * 50_000, "damaged"),
        ('{"a":' * 50_000, "damaged"),
        (b'{"\xff": 1}', "damaged"),
        (json.dumps({"a": entry(shape=[float("nan")])}), "NaN is no JSON"),
        (json.dumps({"a": entry(shape=[-2, -2])}), "whole number"),
        (json.dumps({"a": entry(shape=[2.0, 2])}), "whole number"),
        (json.dumps({"a": entry(shape=[True, 4])}), "whole number"),
        (json.dumps({"a": entry(shape=["2", 2])}), "whole number"),
        (json.dumps({"a": entry(shape="22")}), "expected a list"),
        (json.dumps({"a": entry(shape=[2**62, 2**62])}), "spans 0 to 16"),
        (json.dumps({"a": entry(data_offsets=[0, 2**70])}), "whole number"),
        (json.dumps({"a": entry(data_offsets=[16, 0])}), "spans 16 to 0"),
        (json.dumps({"a": entry(dtype=["F32"])}), "has type"),
        (json.dumps({"a": entry(), "b": entry(data_offsets=[8, 24])}), "'b' begins at byte"),
        (json.dumps({"a": entry(data_offsets=[16, 32])}), "'a' begins at byte"),
        (json.dumps({"a": entry(shape=[8, 4], data_offsets=[0, 128])}), "truncated"),
        ("1" * 5000, "damaged"),
    ],
)
def test_hostile_safetensors_headers(tmp_path: Path, header: str | bytes, message: str) -> None:
    path = safetensors(tmp_path / "x.safetensors", header)
    with pytest.raises(ModelLoadError, match=message) as error:
        read_header(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**62, 2**63, 2**64 - 1])
def test_a_header_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" * 8)
    tracemalloc.start()
    with pytest.raises(ModelLoadError):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf(path: Path, pairs: bytes, tensors: bytes, num_pairs: int, num_tensors: int, data: int = 256) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + pairs + tensors
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(data))
    return path


def tensor(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


ARRAY = text(b"k") + struct.pack("<I", 9)
ALIGNMENT = text(b"general.alignment") + struct.pack("<I", 4)


@pytest.mark.parametrize(
    ("pairs", "tensors", "counts", "message"),
    [
        (b"", b"", (2**60, 0), "occurs twice"),
        (b"", b"", (0, 2**60), "occurs twice"),
        (ARRAY + struct.pack("<IQ", 0, 2**40), b"", (1, 0), "truncated"),
        (ARRAY + struct.pack("<IQ", 8, 2**40), b"", (1, 0), "truncated"),
        (ARRAY + struct.pack("<IQ", 9, 1), b"", (1, 0), "array of unknown type 9"),
        (ARRAY + struct.pack("<IQ", 10, 2**61), b"", (1, 0), "truncated"),
        (struct.pack("<Q", 2**63) + b"abc", b"", (1, 0), "truncated"),
        (ALIGNMENT + struct.pack("<I", 0), b"", (1, 0), "power of two"),
        (ALIGNMENT + struct.pack("<I", 2**31), tensor(b"t", (8,), 0, 0), (1, 1), "truncated"),
        (b"", tensor(b"t", (8,), 0, 4), (0, 1), "no multiple of the alignment 32"),
        (b"", tensor(b"t", (8,), 0, 0) + tensor(b"u", (8,), 0, 0), (0, 2), "'t' and 'u' share bytes"),
        (b"", tensor(b"t", (8,), 0, 0) + tensor(b"t", (8,), 0, 32), (0, 2), "occurs twice"),
        (b"", tensor(b"t", (2**62, 2**62), 0, 0), (0, 1), "truncated"),
        (b"", tensor(b"t", (8, 0), 0, 0), (0, 1), "is empty"),
        (b"", tensor(b"t" * 600, (8,), 0, 0), (0, 1), "a name of 600 characters"),
    ],
)
def test_hostile_gguf_headers(
    tmp_path: Path, pairs: bytes, tensors: bytes, counts: tuple[int, int], message: str
) -> None:
    path = gguf(tmp_path / "x.gguf", pairs, tensors, *counts)
    tracemalloc.start()
    with pytest.raises(ConversionError, match=message) as error:
        GGUFFile(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [1.5, 2.5]}, "tokens is no list of texts"),
        ({"tokens": 7}, "tokens is no list of texts"),
        ({"tokens": ["a" * 5000, "b"]}, "a token of 5000 characters"),
        ({"scores": [0.0]}, "2 tokens but 1 scores"),
        ({"scores": [0.0, float("nan")]}, "no list of finite numbers"),
        ({"token_type": [1, "x"]}, "no list of integers"),
        ({"bos_token_id": True}, "bos_token_id is True"),
        ({"bos_token_id": 2}, "bos_token_id is 2"),
        ({"bos_token_id": "a\nb"}, r"bos_token_id is 'a\\nb'"),
        ({"model": "gpt2", "pre": "llama-bpe", "merges": 5}, "merges is no list of texts"),
        ({"model": "gpt2", "pre": "llama-bpe", "merges": [""]}, "joins tokens that the vocabulary lacks"),
        ({"model": "gpt2", "pre": "llama-bpe", "merges": ["x" * 5000]}, "joins tokens that"),
    ],
)
def test_hostile_tokenizers(changes: dict[str, Any], message: str) -> None:
    values = {"model": "llama", "tokens": ["a", "b"], "scores": [0.0, -1.0], **changes}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    with pytest.raises(ConversionError, match=message) as error:
        read_tokenizer(metadata, Path("x.gguf"))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
    with pytest.raises(ConversionError, match="chat_template is no text"):
        read_tokenizer(
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.scores": [0.0]}
            | {"tokenizer.chat_template": 5},
            Path("x.gguf"),
        )


@pytest.mark.parametrize("depth", [-1, 10**9, 10**30])
def test_a_config_of_too_many_layers_is_not_built(depth: int) -> None:
    with pytest.raises(ModelLoadError, match="num_hidden_layers"):
        build_model({**LLAMA, "num_hidden_layers": depth}, Path("x"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"a\nb": 1, "x" * 5000: 2}, "without a quant_method"),
        ({"quant_method": "x" * 5000}, "quant_method 'xxx"),
        ({"quant_method": "fp8", "fmt": "x" * 5000}, "quant_method 'fp8', format 'xxx"),
        ({"quant_method": "awq", "bits": "x" * 5000, "version": "gemm"}, "quant_method 'awq'.*bits 'xxx"),
    ],
)
def test_odd_settings_of_a_quantization_are_refused_in_one_line(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConversionError, match=message) as error:
        find_prequantized({**LLAMA, "quantization_config": settings}, tmp_path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700
