"""The output is whole or not there, whatever stops the conversion."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from mlxserve.errors import ConversionError
from mlxserve_convert import ConvertOptions, Progress, convert, output_folder, shards
from mlxserve_convert.output_folder import OutputBusyError, OutputFolder
from mlxserve_convert.shards import ShardedWriter
from tests.convert.checkpoints import LLAMA, random_weights, write_folder, write_gguf


@pytest.fixture(params=["gguf", "folder"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    place = tmp_path / "in"
    place.mkdir()
    if request.param == "folder":
        return write_folder(place / "source", LLAMA, random_weights(LLAMA))
    write_gguf(place / "tiny.gguf", LLAMA, random_weights(LLAMA), Kind.Q4_1)
    return place / "tiny.gguf"


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", [Stop, SystemExit])
def test_an_error_in_the_middle_leaves_nothing(
    source: Path, tmp_path: Path, kind: type[BaseException]
) -> None:
    def stop(progress: Progress) -> None:
        assert [path.name for path in (tmp_path / "o").iterdir()] == [".out.partial"]
        if progress.done_bytes * 2 > progress.total_bytes:
            raise kind

    with pytest.raises(kind):
        convert(source, tmp_path / "o" / "out", ConvertOptions(), stop)
    assert list((tmp_path / "o").iterdir()) == []


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("options", [ConvertOptions(), ConvertOptions(bits=4)], ids=["default", "4-bit"])
def test_an_interrupted_run_goes_on_where_it_was(
    source: Path, tmp_path: Path, options: ConvertOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_SYNC_BYTES", 1)
    convert(source, tmp_path / "whole", options)
    seen: list[str] = []

    def stop(progress: Progress) -> None:
        seen.append(progress.tensor)
        if progress.done_bytes * 2 > progress.total_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", options, stop)
    assert not (tmp_path / "out").exists()
    report = convert(source, tmp_path / "out", options)
    assert report.num_resumed >= len(set(seen)) - 1 > 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))


def test_another_conversion_does_not_go_on_with_it(source: Path, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", ConvertOptions(bits=8), stop)
    assert convert(source, tmp_path / "out", ConvertOptions(bits=4)).num_resumed == 0
    convert(source, tmp_path / "whole", ConvertOptions(bits=4))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_an_existing_output_is_refused_and_kept(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    with pytest.raises(ConversionError, match="not empty, use --force"):
        convert(source, output, ConvertOptions())
    assert [path.name for path in output.iterdir()] == ["notes.txt"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConversionError, match="is a file"):
        convert(source, tmp_path / "file", ConvertOptions())


def test_an_empty_output_folder_is_filled(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", ConvertOptions())
    assert (tmp_path / "out" / "config.json").is_file()


def test_force_replaces_the_whole_folder_only_after_success(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "o" / "out"
    output.mkdir(parents=True)
    (output / "old.txt").write_text("old")
    (output / "config.json").write_text("{}")

    def stop(progress: Progress) -> None:
        raise Stop

    with pytest.raises(Stop):
        convert(source, output, ConvertOptions(force=True), stop)
    assert sorted(path.name for path in output.iterdir()) == ["config.json", "old.txt"]
    convert(source, output, ConvertOptions(force=True))
    assert not (output / "old.txt").exists()
    assert (output / "model.safetensors").is_file()
    assert [path.name for path in output.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["data", "repository", "current", "home", "file"])
def test_force_replaces_nothing_but_model_folders(
    source: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "o"
    (output / "inner").mkdir(parents=True)
    (output / "thesis.txt").write_text("mine")
    if kind != "data":
        (output / "config.json").write_text("{}")
    if kind == "repository":
        (output / ".git").mkdir()
    elif kind == "current":
        monkeypatch.chdir(output / "inner")
    elif kind == "home":
        monkeypatch.setenv("HOME", str(output / "inner"))
    before = sorted(path.name for path in output.iterdir())
    place = output / "thesis.txt" if kind == "file" else output
    with pytest.raises(ConversionError, match=r"no model folder|holds the current|is a file"):
        convert(source, place, ConvertOptions(force=True))
    if kind == "current":
        with pytest.raises(ConversionError, match="holds the current"):
            convert(source, Path(""), ConvertOptions(force=True))
    assert sorted(path.name for path in output.iterdir()) == before
    assert (output / "thesis.txt").read_text() == "mine"


def test_an_output_below_a_file_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match="is not a folder"):
        convert(source, tmp_path / "file" / "sub" / "out", ConvertOptions())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_place_is_refused(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "readonly"
    place.mkdir(mode=0o500)
    with pytest.raises(ConversionError, match="no permission"):
        convert(source, place / "out", ConvertOptions())


def test_too_little_space_is_refused_before_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(ConversionError, match=r"needs 0\.02 GB, only 0\.00 GB are free"):
        convert(source, tmp_path / "out", ConvertOptions())
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards.os, "pwrite", full)
    with pytest.raises(ConversionError, match="cannot be written: No space left on device"):
        convert(source, tmp_path / "o" / "out", ConvertOptions())
    assert list((tmp_path / "o").iterdir()) == []


def test_two_writers_of_one_output_do_not_mix(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out", purpose="one") as folder:
        (folder.path / "one").write_text("")
        with (
            pytest.raises(OutputBusyError, match="is being written by another process"),
            OutputFolder(tmp_path / "out", purpose="two"),
        ):
            pass
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["one"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_target_that_was_filled_meanwhile_is_kept(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out", purpose="one").__enter__()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(ConversionError, match="meanwhile"):
        folder.__exit__(None, None, None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_shards_hold_every_dtype_and_shape(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": ("F32", rng.standard_normal((3, 5)).astype(np.float32)),
        "b": ("F16", rng.standard_normal((7,)).astype(np.float16)),
        "c": ("U32", rng.integers(0, 2**32, (2, 2, 3), dtype=np.uint32)),
        "scalar": ("F32", np.array(3.0, np.float32)),
        "empty": ("F32", np.zeros((0, 4), np.float32)),
        "transposed": ("F32", rng.standard_normal((4, 6)).astype(np.float32).T),
    }
    writer = ShardedWriter(tmp_path, arrays, max_shard_bytes=100)
    for name, (dtype, array) in arrays.items():
        (stream,) = writer.begin([(name, dtype, array.shape)])
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        half = data.size // 2
        writer.write(stream, half, data[half:])
        writer.write(stream, 0, data[:half])
        writer.end()
    files = writer.finish()
    found: dict[str, mx.array] = {}
    for file in files:
        found |= mx.load(str(tmp_path / file))
    assert len(files) == 3
    for name, (_, array) in arrays.items():
        assert np.array_equal(np.array(found[name]), array), name
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == arrays.keys()
