"""Damaged and unsupported GGUF files end in one line that names the file, and nothing is written."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.errors import ConversionError
from mlxserve_convert import ConvertOptions, convert
from mlxserve_convert.gguf_file import GGUFFile
from tests.convert.checkpoints import LLAMA, random_weights, write_gguf


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    write_gguf(path, LLAMA, random_weights(LLAMA), Kind.Q8_0)
    return path


def refusal(path: Path, **options: Any) -> str:
    output = path.parent / "out"
    with pytest.raises(ConversionError) as error:
        convert(path, output, ConvertOptions(**options))
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name]
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def changed(sound: Path, folder: Path, at: int, data: bytes) -> Path:
    raw = bytearray(sound.read_bytes())
    raw[at : at + len(data)] = data
    path = folder / "bad.gguf"
    path.write_bytes(raw)
    return path


def test_header_faults_state_expected_and_found(sound: Path, tmp_path: Path) -> None:
    assert "expected magic b'GGUF', found b'GGML'" in refusal(changed(sound, tmp_path, 0, b"GGML"))
    version = refusal(changed(sound, tmp_path, 4, struct.pack("<I", 9)))
    assert "unknown GGUF version: expected 2 or 3, found 9" in version
    assert "big-endian" in refusal(changed(sound, tmp_path, 4, struct.pack(">I", 3)))
    assert "truncated" in refusal(changed(sound, tmp_path, 8, struct.pack("<Q", 2**60)))
    assert "truncated" in refusal(changed(sound, tmp_path, 16, struct.pack("<Q", 2**60)))


@pytest.mark.parametrize("size", [0, 3, 4, 12, 30, 200, 2000])
def test_truncated_headers(sound: Path, tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(sound.read_bytes()[:size])
    assert "truncated" in refusal(path) or size == 0


def test_truncated_data_names_the_tensor(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    raw = sound.read_bytes()
    path.write_bytes(raw[: len(raw) - 1000])
    message = refusal(path)
    assert "truncated: tensor '" in message
    assert f"the file has {len(raw) - 1000}" in message


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_damage_to_a_header_escapes_as_another_error(sound: Path, data: st.DataObject) -> None:
    raw = bytearray(sound.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    path = sound.with_name("fuzzed.bin")
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    with contextlib.suppress(ConversionError):
        GGUFFile(path).close()


def tensor_type_at(sound: Path, name: str) -> int:
    """Where the type of a tensor stands: after its name, its dimension count and its dimensions."""
    raw = sound.read_bytes()
    at = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (num_dims,) = struct.unpack_from("<I", raw, at)
    return at + 4 + 8 * num_dims


def test_tensor_types(sound: Path, tmp_path: Path) -> None:
    at = tensor_type_at(sound, "token_embd.weight")
    unknown = refusal(changed(sound, tmp_path, at, struct.pack("<I", 99)))
    assert "tensor 'token_embd.weight' has unknown type 99" in unknown
    known = refusal(changed(sound, tmp_path, at, struct.pack("<I", Kind.I8)))
    assert "tensor types I8 (1 tensors) are not supported, only: F32, F16, BF16, " in known


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    config = {**LLAMA, "model_type": "gpt2"}
    weights = {"model.norm.weight": np.ones(64, np.float32)}
    write_gguf(path, config, weights, Kind.F32)
    assert "architecture 'gpt2' is not supported, only: cohere2, command-r, gemma, " in refusal(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count: a mixture of experts"),
        ({"llama.rope.dimension_count": 8}, "expected the head size 16, found 8"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
        ({"split.count": 3}, "is one of 3 parts, but is not called"),
    ],
)
def test_unsupported_metadata_is_named(tmp_path: Path, metadata: dict, message: str) -> None:
    path = tmp_path / "bad.gguf"
    write_gguf(path, LLAMA, random_weights(LLAMA), Kind.F16, metadata=metadata)
    assert message in refusal(path)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    weights = random_weights(LLAMA)
    del weights["model.layers.1.mlp.up_proj.weight"]
    write_gguf(path, LLAMA, weights, Kind.F16)
    assert "tensor 'model.layers.1.mlp.up_proj.weight' is missing" in refusal(path)
    extra = {"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)}
    write_gguf(path, LLAMA, random_weights(LLAMA), Kind.F16, extra=extra)
    assert "tensor 'blk.0.ffn_gate_inp.weight' has no place in a llama model" in refusal(path)
    wrong = random_weights({**LLAMA, "intermediate_size": 64})
    write_gguf(path, LLAMA, wrong, Kind.F16)
    assert "has shape (64, 64), the configuration asks for (96, 64)" in refusal(path)


def test_missing_file_and_wrong_kind(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="no such file or folder"):
        convert(tmp_path / "none.gguf", tmp_path / "out", ConvertOptions())
    with pytest.raises(ConversionError, match=r"config\.json is missing"):
        convert(tmp_path, tmp_path / "out", ConvertOptions())
