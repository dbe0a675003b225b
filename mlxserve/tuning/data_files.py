"""Files of training data: which there are, and to which split each belongs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlxserve.errors import UsageError
from mlxserve.hub.datasets import is_dataset_name, pull_dataset
from mlxserve.tuning.file_rows import FORMATS, PACKINGS, data_format, read_rows
from mlxserve.tuning.raw_row import RawRow

SplitName = Literal["train", "valid", "test"]
_SPLITS: dict[str, SplitName] = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "test": "test",
}
_SPLIT_NAME = re.compile(r"(training|train|validation|valid|val|test)(?![a-z])")
_PATH_STARTS = ("/", "./", "../", "~")
_NOT_DATA = frozenset({"dataset_infos.json", "dataset_dict.json", "dataset_info.json", "state.json"})


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Files by split, those of a split by name. ``folder`` is what they are named relative to."""

    folder: Path
    splits: dict[SplitName, list[Path]]

    def rows(self, split: SplitName) -> Iterator[RawRow]:
        """All rows of a split. Raises UsageError for a file that as a whole cannot be read."""
        for path in self.splits.get(split, ()):
            yield from read_rows(path, str(path.relative_to(self.folder)))


def find_data(data: str, main: SplitName | None = "train") -> DataFiles:
    """The files of train, valid and test, where there are any; always some of ``main``, or with None of any
    of them, ``main`` being test where it stands for a name.

    ``data`` is a file (all of it is ``main``), a folder, or a hub data set ``owner/name``, or a folder in
    one, ``owner/name/folder`` (downloaded first). In a folder a file belongs to the split that its own name,
    or else that of a folder above it, begins with (train…, valid… or val…, test…); if none does, the only
    data file is ``main``. Raises UsageError, MlxserveError subclasses of a download.
    """
    path = Path(data).expanduser()
    if path.is_file():
        if data_format(path) is None:
            raise UsageError(f"{path}: not a data file; these are {_known_formats()}")
        return DataFiles(path.parent, {main or "test": [path]})
    if path.is_dir():
        return _find_in(path, main)
    if not data.startswith(_PATH_STARTS) and data_format(path) is None and is_dataset_name(data):
        return _find_in(pull_dataset(data), main)
    raise UsageError(f"{data}: no such file or folder (a hub data set is owner/name)")


def _known_formats() -> str:
    return f"{', '.join(FORMATS)}, also with {' or '.join(PACKINGS)}"


def _find_in(folder: Path, main: SplitName | None) -> DataFiles:
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if data_format(path) and path.name not in _NOT_DATA and _is_visible(path.relative_to(folder))
    ]
    splits: dict[SplitName, list[Path]] = {}
    for path in files:
        split = _split_of(path.relative_to(folder))
        if split is not None:
            splits.setdefault(split, []).append(path)
    if not splits and len(files) == 1:
        splits[main or "test"] = files
    if not splits or (main is not None and main not in splits):
        found = ", ".join(str(path.relative_to(folder)) for path in files[:5]) or "no data file"
        wanted = main or "train, valid or test"
        raise UsageError(
            f"{folder}: no data file whose name begins with {wanted} ({_known_formats()}); there is {found}"
        )
    for split, paths in splits.items():
        _check_alike(folder, split, paths)
    return DataFiles(folder, splits)


def _is_visible(path: Path) -> bool:
    return not any(part.startswith(".") for part in path.parts)


def _split_of(path: Path) -> SplitName | None:
    for part in reversed(path.parts):
        match = _SPLIT_NAME.match(part.lower())
        if match:
            return _SPLITS[match[1]]
    return None


def _check_alike(folder: Path, split: str, paths: Sequence[Path]) -> None:
    """One set of files: the same rows in two formats, or two subsets of a repository, are not meant."""
    formats = sorted({data_format(path) or "" for path in paths})
    if len(formats) > 1:
        raise UsageError(f"{folder}: the {split} files have several formats ({', '.join(formats)}), keep one")
    homes = sorted({str(_home(path.relative_to(folder))) for path in paths})
    if len(homes) > 1:
        raise UsageError(
            f"{folder}: {split} files lie in several folders ({', '.join(homes)}); name one of these"
        )


def _home(path: Path) -> Path:
    """The folder of a file, that of its split aside."""
    home = path.parent
    return home.parent if _SPLIT_NAME.match(home.name.lower()) else home
