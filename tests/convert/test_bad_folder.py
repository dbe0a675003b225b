"""Damaged safetensors folders end in one line that names the file, before any work."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.errors import MlxserveError, ModelLoadError
from mlxserve.models.safetensors_file import read_header
from mlxserve_convert import ConvertOptions, convert
from tests.convert.checkpoints import LLAMA, random_weights, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "source", LLAMA, random_weights(LLAMA), num_shards=3)


def refusal(folder: Path) -> str:
    with pytest.raises(MlxserveError) as error:
        convert(folder, folder.parent / "out", ConvertOptions())
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert "\n" not in str(error.value)
    return str(error.value)


def test_truncated_shard(folder: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    for length in (size - 1, size // 2, 500, 9, 4, 0):
        shard.write_bytes(shard.read_bytes()[:length])
        message = refusal(folder)
        assert shard.name in message
        assert f"{length}" in message


def test_missing_shard_and_stale_index(folder: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    raw = shard.read_bytes()
    shard.unlink()
    assert f"1 of 3 files that the index names are missing, first {shard.name}" in refusal(folder)
    shard.write_bytes(raw)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.7.mlp.up_proj.weight"] = shard.name
    index.write_text(json.dumps(content))
    assert "the index names 1 tensors that no file has, first 'model.layers.7.mlp.up_proj.weight'" in refusal(
        folder
    )


def test_an_index_cannot_lead_out_of_the_folder(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    assert "is not the name of a file beside it" in refusal(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "nul\x00"])
def test_broken_json(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in refusal(folder)


def test_config_without_what_the_architecture_needs(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False}))
    assert "config.json does not describe a llama model" in refusal(folder)
    (folder / "config.json").write_text("{}")
    assert "has no model_type" in refusal(folder)


def test_other_weight_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert "has no model*.safetensors files" in refusal(folder)
    (folder / "consolidated.00.pth").write_bytes(b"")
    assert "consolidated.00.pth is not read" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin: is empty" in refusal(folder)


def test_float8_tensors_are_refused_by_name(tmp_path: Path) -> None:
    config = {**LLAMA, "tie_word_embeddings": True}
    folder = write_folder(tmp_path / "source", config, {"x": np.ones(4, np.float32)})
    header = {"model.embed_tokens.weight": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))
    assert "'model.embed_tokens.weight' has type F8_E4M3, which is not supported" in refusal(folder)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_no_header_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, body: bytes, length: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + body)
    with contextlib.suppress(ModelLoadError):
        read_header(path)
