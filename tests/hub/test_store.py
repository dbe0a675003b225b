"""The local store through its commands: convert without -o, list, show, rm; and import on first use."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from rich.console import Console

from mlxserve import cli
from mlxserve.cli.model_source import PreparedModel, prepare_model
from mlxserve.errors import ConversionError, MlxserveError
from mlxserve.hub.store import StoredModel, find_stored, import_folder, remove_stored
from tests.convert.checkpoints import LLAMA, random_weights, write_folder, write_gguf

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "source", LLAMA, random_weights(LLAMA))


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", LLAMA, random_weights(LLAMA), Kind.Q4_1)
    return tmp_path / "tiny.gguf"


def console() -> Console:
    return Console(stderr=True, quiet=True)


def test_parts_of_a_split_model_have_one_import(tmp_path: Path) -> None:
    parts = [tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"x")
    first = import_folder(parts[0])
    assert import_folder(parts[1]) == first
    assert first.name.startswith("big-")
    parts[1].write_bytes(b"longer")
    assert import_folder(parts[0]) != first


def test_convert_list_show_rm(run: Run, checkpoint: Path, home: Path) -> None:
    code, out, _ = run("convert", str(checkpoint), "--bits", "4", "--group-size", "32", "--recipe", "uniform")
    assert code == 0
    folder = home / "models" / "source-4bit"
    assert f"Wrote {folder}: 16 matrices quantized, 0 left unquantized" in out
    assert "Check: loads in mlx-lm" in out
    code, out, _ = run("list", "--json")
    (row,) = json.loads(out)
    assert (row["name"], row["format"], row["architecture"]) == ("source-4bit", "mlx", "llama")
    assert row["context_length"] == 256
    assert row["num_parameters"] == sum(values.size for values in random_weights(LLAMA).values())
    assert row["bits_per_weight"] == pytest.approx(6.0, rel=0.1)  # float32 scales and biases
    code, out, _ = run("list")
    assert out.splitlines()[0].split() == ["NAME", "FORMAT", "ARCHITECTURE", "BITS", "CONTEXT", "SIZE"]
    assert out.splitlines()[1].startswith("source-4bit")
    code, out, _ = run("show", "source-4bit", "--json")
    assert json.loads(out)["path"] == str(folder)
    code, out, _ = run("rm", "source-4bit", "--yes")
    assert code == 0
    assert not folder.exists()
    assert list((home / "models").iterdir()) == []
    code, out, _ = run("list")
    assert "no models in" in out


def test_convert_reports_as_json_and_plans_without_writing(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    code, out, _ = run("convert", "source", "-o", "out", "--dry-run", "--json")
    plan = json.loads(out)
    assert (code, plan["dry_run"], (tmp_path / "out").exists()) == (0, True, False)
    assert {entry["bits"] for entry in plan["tensors"]} == {4, 6, None}
    code, out, _ = run("convert", "source", "-o", "out", "--dry-run")
    assert "lm_head.weight  float32 [320, 64]  6-bit, group size 64" in out
    code, out, _ = run("convert", "source", "-o", "out", "--json")
    report = json.loads(out)
    assert report["num_bytes"] == plan["num_bytes"]
    assert report["verified"].startswith("loads in mlx-lm")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("convert", "source", "--bits", "7"), 2, "--bits 7 is not possible, only: 2, 3, 4, 5, 6, 8"),
        (
            ("convert", "source", "--group-size", "48"),
            2,
            "--group-size 48 is not possible, only: 32, 64, 128",
        ),
        (("convert", "source", "--mode", "mx4"), 2, "--mode mx4 is not possible, only: affine, mxfp4, mxfp8"),
        (("convert", "source", "--bits", "x"), 2, "Invalid value for '--bits'"),
        (("convert", "source", "--recipe", "x"), 2, "--recipe x is not possible, only: default"),
        (("convert", "none"), 1, "no model is named 'none'"),
        (("convert", "source", "-o", "."), 1, "holds the source source"),
        (("convert", "source", "-o", "source", "--force"), 1, "holds the source source"),
        (("convert", "source", "-o", "full"), 1, "the output folder is not empty, use --force"),
        (("show", "smollm2"), 1, "not on this machine; get it with: mlxserve pull smollm2"),
        (("show", "none.gguf"), 1, "no such file or folder"),
        (("rm", "none", "--yes"), 1, "no model named 'none' in the store, which holds: nothing"),
        (("rm", "smollm2", "--yes"), 1, "no model named 'smollm2'"),
        (("pull", "source"), 2, "is on this machine already"),
    ],
)
def test_errors_are_one_line(
    run: Run, checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    found, out, err = run(*arguments)
    assert (found, out) == (code, "")
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert message in err


def test_a_damaged_entry_does_not_hide_the_others(run: Run, checkpoint: Path, home: Path) -> None:
    shutil.copytree(checkpoint, home / "models" / "good")
    (home / "models" / "bad.gguf").write_bytes(b"GGUF")
    code, out, _ = run("list")
    assert code == 0
    assert "(damaged)" in out
    assert "good" in out
    assert run("show", "bad")[0] == 1


def test_a_gguf_file_is_imported_once_and_again_when_it_changes(gguf: Path, home: Path) -> None:
    first = prepare_model("tiny.gguf", console=console())
    assert first == PreparedModel("folder", "tiny", first.path)
    assert first.path.parent == home / "imports"
    written = (first.path / "config.json").stat().st_mtime_ns
    assert prepare_model(str(gguf), console=console()) == first
    assert (first.path / "config.json").stat().st_mtime_ns == written
    write_gguf(gguf, LLAMA, random_weights(LLAMA, seed=1), Kind.Q8_0)
    os.utime(gguf, (1, 1))
    assert prepare_model("tiny.gguf", console=console()).path != first.path


def test_folders_of_floats_are_used_as_they_are(checkpoint: Path) -> None:
    assert prepare_model("source", console=console()) == PreparedModel("folder", "source", Path("source"))


def test_a_file_that_cannot_be_imported_leaves_nothing(gguf: Path, home: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:-50])
    with pytest.raises(ConversionError, match="truncated"):
        prepare_model("tiny.gguf", console=console())
    assert not (home / "imports").exists() or list((home / "imports").iterdir()) == []


def test_rm_takes_the_import_of_a_file_along(run: Run, gguf: Path, home: Path) -> None:
    (home / "models").mkdir(parents=True)
    shutil.move(gguf, home / "models" / "tiny.gguf")
    folder = prepare_model("tiny", console=console()).path
    assert folder.is_dir()
    assert run("rm", "tiny", "--yes")[0] == 0
    assert not folder.exists()
    assert not (home / "models" / "tiny.gguf").exists()


@pytest.mark.parametrize(
    ("answer", "code", "is_kept"), [("n\n", 1, True), ("\n", 1, True), ("", 1, True), ("y\n", 0, False)]
)
def test_rm_asks_and_the_answer_counts(
    run: Run,
    checkpoint: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    is_kept: bool,
) -> None:
    shutil.copytree(checkpoint, home / "models" / "mine")
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    found, _, err = run("rm", "mine")
    assert found == code
    assert str(home / "models" / "mine") in err
    assert (home / "models" / "mine").is_dir() is is_kept


def test_rm_removes_a_link_and_never_what_lies_outside(checkpoint: Path, home: Path) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "linked").symlink_to(checkpoint)
    entry = find_stored("linked")
    assert entry is not None
    remove_stored(entry)
    assert (checkpoint / "config.json").is_file()
    assert not (home / "models" / "linked").exists()
    with pytest.raises(MlxserveError, match="lies outside the store"):
        remove_stored(StoredModel("source", "mlx", checkpoint, 0, False))
    assert (checkpoint / "config.json").is_file()
