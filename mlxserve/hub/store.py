"""The local store: what was pulled, converted without an output name, or imported.

    <home>/models/NAME.gguf     pulled files, under their own names
    <home>/models/NAME/         folders that ``mlxserve convert`` wrote without ``-o``
    <home>/imports/NAME-HASH/   MLX folders made from GGUF files that were served; a changed file gets a
                                new hash

Files and folders appear here by one rename, so what is here is whole. Hidden names are work in progress.
"""

from __future__ import annotations

import glob
import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlxserve.config import home_dir
from mlxserve.errors import MlxserveError

_IMPORT_VERSION = 1
"""Goes up when an importer writes other contents for the same file."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One entry of the store. ``path`` lies directly in one of its folders."""

    name: str
    format: Literal["gguf", "mlx"]
    path: Path
    num_bytes: int
    is_import: bool


def models_dir() -> Path:
    return home_dir() / "models"


def imports_dir() -> Path:
    return home_dir() / "imports"


def list_stored() -> list[StoredModel]:
    """Every entry, models first, by name."""
    return [*_entries(models_dir(), is_import=False), *_entries(imports_dir(), is_import=True)]


def _entries(folder: Path, *, is_import: bool) -> list[StoredModel]:
    if not folder.is_dir():
        return []
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_file() and path.suffix == ".gguf":
            found.append(StoredModel(path.stem, "gguf", path, path.stat().st_size, is_import))
        elif (path / "config.json").is_file():
            found.append(StoredModel(path.name, "mlx", path, _folder_bytes(path), is_import))
    return found


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def find_stored(name: str) -> StoredModel | None:
    """The entry of this name (a GGUF file also by its name with ``.gguf``), None if there is none."""
    return next((entry for entry in list_stored() if name in (entry.name, entry.path.name)), None)


_PART_STEM = re.compile(r"(.+)-\d{5}-of-(\d{5})")


def import_folder(gguf: Path) -> Path:
    """Where the import of a GGUF file lies, or would. Another content of the file is another folder. All
    parts of a split model have one import, whichever is given."""
    match = _PART_STEM.fullmatch(gguf.stem)
    stem, files = gguf.stem, [gguf]
    if match is not None:
        stem = match[1]
        pattern = f"{glob.escape(stem)}-[0-9][0-9][0-9][0-9][0-9]-of-{match[2]}.gguf"
        files = sorted(gguf.parent.glob(pattern))
    parts = [str(_IMPORT_VERSION)]
    for file in files or [gguf]:
        status = file.stat()
        parts.append(f"{file.resolve()}|{status.st_size}|{status.st_mtime_ns}")
    return imports_dir() / f"{stem}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:10]}"


def related_paths(entry: StoredModel) -> list[Path]:
    """What goes when an entry goes: itself, and for a GGUF file its import."""
    paths = [entry.path]
    if entry.format == "gguf" and import_folder(entry.path).exists():
        paths.append(import_folder(entry.path))
    return paths


def remove_stored(entry: StoredModel) -> int:
    """Removes an entry and its import; returns the bytes freed. A symbolic link goes, not its target."""
    freed = 0
    for path in related_paths(entry):
        if path.parent not in (models_dir(), imports_dir()):
            raise MlxserveError(f"{path} lies outside the store {home_dir()}, it was not removed")
        try:
            if path.is_symlink():
                path.unlink()
            elif path.is_dir():
                freed += _folder_bytes(path)
                _remove_folder(path)
            else:
                freed += path.stat().st_size
                path.unlink()
        except OSError as error:
            raise MlxserveError(f"{path}: cannot be removed: {error.strerror or error}") from error
    return freed


def _remove_folder(folder: Path) -> None:
    """Renames first, so that a stop in the middle leaves no half model under the model's name."""
    doomed = folder.with_name(f".removed-{folder.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    folder.rename(doomed)
    shutil.rmtree(doomed)
