"""What was pulled from the hub, and whether it is whole.

A record is written before the first byte is fetched and names every file with its size, so that an
interrupted pull is known as such, without a network. The files lie in the hub's own cache.

    <home>/pulls/OWNER--NAME-HASH.json
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxserve.config import home_dir
from mlxserve.errors import MlxserveError
from mlxserve.hub.reference import RepoReference, parse_reference
from mlxserve.hub.selection import Patterns, gguf_of
from mlxserve.json_file import read_json_object


@dataclass(frozen=True, slots=True)
class Pull:
    """``files`` are the sizes in bytes by path below ``folder``, a snapshot of ``commit``."""

    reference: RepoReference
    patterns: Patterns
    commit: str
    folder: Path
    files: Mapping[str, int]

    @property
    def missing(self) -> tuple[str, ...]:
        """The files that are not there with their whole size."""
        return tuple(name for name, size in self.files.items() if not has_size(self.folder / name, size))

    @property
    def is_whole(self) -> bool:
        return not self.missing

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def model_path(self) -> Path:
        """The GGUF file, if that is what was pulled, else the folder."""
        gguf = gguf_of(tuple(self.files))
        return self.folder if gguf is None else self.folder / gguf

    def state(self) -> str:
        """How far it came, for messages."""
        missing = self.missing
        lacking = sum(self.files[name] for name in missing)
        return (
            f"{len(self.files) - len(missing)} of {len(self.files)} files, "
            f"{(self.num_bytes - lacking) / 1e6:.1f} of {self.num_bytes / 1e6:.1f} MB"
        )


def has_size(path: Path, size: int) -> bool:
    try:
        return path.is_file() and path.stat().st_size == size
    except OSError:
        return False


def pulls_dir() -> Path:
    return home_dir() / "pulls"


def write_pull(pull: Pull) -> None:
    """Raises MlxserveError when the record cannot be written."""
    content = {
        "reference": str(pull.reference),
        "include": list(pull.patterns.include),
        "exclude": list(pull.patterns.exclude),
        "commit": pull.commit,
        "folder": str(pull.folder),
        "files": dict(pull.files),
    }
    path = _path(pull.reference)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise MlxserveError(f"{path}: cannot be written: {error.strerror or error}") from error


def _path(reference: RepoReference) -> Path:
    name = reference.repo_id.replace("/", "--")
    return pulls_dir() / f"{name}-{hashlib.sha256(str(reference).encode()).hexdigest()[:10]}.json"


def find_pull(reference: RepoReference) -> Pull | None:
    """The record of what was pulled under this name, whole or not."""
    return _read(_path(reference))


def list_pulls() -> list[Pull]:
    """Every record whose files were not removed since, by name."""
    if not pulls_dir().is_dir():
        return []
    found = [_read(path) for path in sorted(pulls_dir().glob("[!.]*.json"))]
    return sorted((pull for pull in found if pull is not None), key=lambda pull: str(pull.reference))


def _read(path: Path) -> Pull | None:
    """None for a record that is not there, is damaged, or whose folder is gone: pulling writes it anew."""
    try:
        content = read_json_object(path)
        reference = parse_reference(content["reference"])
        files = {str(name): int(size) for name, size in content["files"].items()}
        patterns = Patterns(tuple(content["include"]), tuple(content["exclude"]))
        pull = (
            None
            if reference is None
            else Pull(reference, patterns, content["commit"], Path(content["folder"]), files)
        )
    except (MlxserveError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return pull if pull is not None and pull.folder.is_dir() else None
