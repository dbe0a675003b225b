"""What a model's name on a command line means. No network, no loading: only names and files."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlxserve.errors import ModelLoadError, ModelNotFoundError
from mlxserve.hub.builtin import BUILTIN_MODELS
from mlxserve.hub.pulls import find_pull
from mlxserve.hub.reference import parse_reference
from mlxserve.hub.store import find_stored, list_stored

SourceKind = Literal["builtin", "folder", "gguf", "hub", "scripted"]

_SCRIPTED = "scripted:"
_PATH_STARTS = ("/", "./", "../", "~")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """``name`` is the id that clients use. ``path`` is None for what has to be downloaded first: a
    built-in model or a hub repository that was not pulled, or only a part of it."""

    kind: SourceKind
    name: str
    path: Path | None


def resolve(name: str) -> ModelSource:
    """Finds a model by name, in this order: ``scripted:FILE``, built-in names, the store, files and
    folders, hub repositories (``OWNER/NAME``, then ``@REVISION`` and ``:FILE.gguf`` if wanted). A name
    that begins with ``/``, ``./``, ``../`` or ``~`` is a path.

    Raises ModelNotFoundError with the nearest known names, ModelLoadError for a file or folder that
    exists and is no model.
    """
    if name.startswith(_SCRIPTED):
        return _scripted(Path(name.removeprefix(_SCRIPTED)).expanduser())
    if name.startswith(_PATH_STARTS):
        return _path(Path(name).expanduser())
    if name in BUILTIN_MODELS:
        model = BUILTIN_MODELS[name]
        return ModelSource("builtin", name, model.path if model.is_pulled else None)
    stored = find_stored(name)
    if stored is not None:
        return ModelSource("gguf" if stored.format == "gguf" else "folder", stored.name, stored.path)
    path = Path(name)
    reference = parse_reference(name)
    is_in_repo = reference is not None and reference.file is not None
    if name and (path.exists() or (path.suffix == ".gguf" and not is_in_repo)):
        return _path(path)
    if reference is not None:
        pull = find_pull(reference)
        is_ready = pull is not None and pull.is_whole and not pull.patterns.include
        return ModelSource("hub", name, pull.model_path if pull is not None and is_ready else None)
    raise ModelNotFoundError(_unknown(name))


def _scripted(path: Path) -> ModelSource:
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: no such file of a scripted model")
    return ModelSource("scripted", path.stem, path)


def _path(path: Path) -> ModelSource:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{path}: not a model folder, config.json is missing")
        return ModelSource("folder", path.resolve().name, path)
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or folder")
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path}: not a model, expected a folder or a .gguf file")
    return ModelSource("gguf", path.stem, path)


def _unknown(name: str) -> str:
    known = [*BUILTIN_MODELS, *(entry.name for entry in list_stored())]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"near it: {', '.join(near)}" if near else f"known: {', '.join(known)}"
    return (
        f"no model is named {name!r}; {hint}; "
        "a folder, a .gguf file or a hub repository id (owner/name) works, too"
    )
