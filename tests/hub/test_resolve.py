"""Names of models: what they mean, in which order, and what an unknown one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxserve.errors import ModelLoadError, ModelNotFoundError
from mlxserve.hub import ModelSource, resolve


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("MLXSERVE_HOME", str(home))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return home


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_builtin_name_needs_a_pull_first() -> None:
    assert resolve("smollm2") == ModelSource("builtin", "smollm2", None)


def test_a_builtin_name_wins_over_a_folder_and_a_path_prefix_over_it() -> None:
    folder(Path("smollm2"))
    assert resolve("smollm2").kind == "builtin"
    assert resolve("./smollm2") == ModelSource("folder", "smollm2", Path("smollm2"))


def test_a_half_file_of_a_builtin_does_not_count(home: Path) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"half")
    assert resolve("smollm2").path is None


def test_stored_names(home: Path) -> None:
    mine = folder(home / "models" / "mine")
    (home / "models" / "other.gguf").write_bytes(b"GGUF")
    imported = folder(home / "imports" / "other-123")
    folder(home / "models" / ".mine.partial-1-x")
    assert resolve("mine") == ModelSource("folder", "mine", mine)
    assert resolve("other") == resolve("other.gguf")
    assert resolve("other").kind == "gguf"
    assert resolve("other-123").path == imported


def test_paths() -> None:
    path = folder(Path("models/tiny"))
    assert resolve("models/tiny") == ModelSource("folder", "tiny", path)
    Path("x.gguf").write_bytes(b"GGUF")
    assert resolve("x.gguf") == ModelSource("gguf", "x", Path("x.gguf"))
    assert resolve(str(Path("x.gguf").absolute())).name == "x"


def test_a_folder_is_named_after_its_real_place() -> None:
    folder(Path("deep/model"))
    Path("deep/model/sub").mkdir()
    assert resolve("./deep/model/sub/..").name == "model"


def test_hub_ids_need_no_network() -> None:
    assert resolve("owner/some-model.v1") == ModelSource("hub", "owner/some-model.v1", None)


def test_scripted_models() -> None:
    Path("echo.json").write_text("{}")
    assert resolve("scripted:echo.json") == ModelSource("scripted", "echo", Path("echo.json"))
    with pytest.raises(ModelNotFoundError, match=r"none\.json: no such file of a scripted model"):
        resolve("scripted:none.json")


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("smollm", ModelNotFoundError, "no model is named 'smollm'; near it: smollm2"),
        ("qqq", ModelNotFoundError, "no model is named 'qqq'; known: smollm2"),
        ("", ModelNotFoundError, "no model is named ''"),
        ("none.gguf", ModelNotFoundError, r"none\.gguf: no such file or folder"),
        ("./none", ModelNotFoundError, "none: no such file or folder"),
        ("../here", ModelLoadError, r"not a model folder, config\.json is missing"),
        ("a/b/c", ModelNotFoundError, "no model is named 'a/b/c'"),
    ],
)
def test_what_is_no_model_says_why(name: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as error:
        resolve(name)
    assert "\n" not in str(error.value)


def test_other_files_are_refused() -> None:
    Path("notes.txt").write_text("")
    with pytest.raises(ModelLoadError, match=r"expected a folder or a \.gguf file"):
        resolve("notes.txt")
