"""What a run leaves on the disk, so that it can be used, gone on with and compared.

    OUTPUT/adapters.safetensors      the newest parameters, in mlx-lm's layout
    OUTPUT/adapter_config.json       what they change, and the settings of the run
    OUTPUT/best/                     the same of the best evaluation
    OUTPUT/state/                    optimizer, position in the data, random state: for --resume
    OUTPUT/metrics.jsonl             a line a report

Each save is one rename of a folder, and the newest parameters are a file of the newest save: a run that is
killed at any moment leaves the last whole save.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxserve.errors import UsageError
from mlxserve.json_file import read_json_object
from mlxserve_convert.output_folder import lock_folder, sync, write_json

ADAPTERS = "adapters.safetensors"
CONFIG = "adapter_config.json"
_STATE = "state"
_OPTIMIZER = "optimizer.safetensors"
_PROGRESS = "progress.json"
_BEST = "best"


@dataclass(frozen=True, slots=True)
class Saved:
    """One save. ``progress`` is plain JSON: steps done, position in the data, settings, losses."""

    weights: dict[str, mx.array]
    optimizer: dict[str, mx.array]
    progress: dict[str, Any]


class Checkpoints:
    """The saves of one output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Makes the folder and keeps other runs out of it. Raises UsageError where one is in it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = lock_folder(self.folder)
        except BlockingIOError:
            raise UsageError(
                f"{self.folder}: another run is being trained there, choose another --output"
            ) from None
        except OSError as error:
            raise UsageError(f"{self.folder}: cannot be written: {error.strerror}") from None
        try:
            yield
        finally:
            os.close(handle)

    @property
    def has_state(self) -> bool:
        return any((place / _PROGRESS).is_file() for place in self._places(_STATE))

    def save(self, saved: Saved, config: dict[str, Any]) -> None:
        """Replaces the last save as a whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self._fresh_folder(_STATE)
        mx.save_safetensors(str(fresh / ADAPTERS), saved.weights)
        mx.save_safetensors(str(fresh / _OPTIMIZER), saved.optimizer)
        write_json(fresh / _PROGRESS, saved.progress)
        self._replace(fresh, self.folder / _STATE)
        _write_json_in_place(self.folder / CONFIG, config)
        _link_in_place(self.folder / _STATE / ADAPTERS, self.folder / ADAPTERS)

    def save_best(self, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
        fresh = self._fresh_folder(_BEST)
        mx.save_safetensors(str(fresh / ADAPTERS), weights)
        write_json(fresh / CONFIG, config)
        self._replace(fresh, self.folder / _BEST)

    def adopt_best(self, other: Path) -> None:
        """Takes over the best evaluation's parameters of the run that goes on in this folder."""
        if other.resolve() == self.folder.resolve() or not (other / _BEST).is_dir():
            return
        fresh = self._fresh_folder(_BEST)
        for name in (ADAPTERS, CONFIG):
            shutil.copyfile(other / _BEST / name, fresh / name)
        self._replace(fresh, self.folder / _BEST)

    def load(self) -> Saved:
        """The last save. Raises UsageError when there is none or it is damaged."""
        place = self._last(_STATE)
        progress = read_json_object(place / _PROGRESS)
        try:
            weights = mx.load(str(place / ADAPTERS))
            optimizer = mx.load(str(place / _OPTIMIZER))
        except (RuntimeError, ValueError, FileNotFoundError) as error:
            raise UsageError(f"{place}: the saved state cannot be read: {error}") from None
        assert isinstance(weights, dict)
        assert isinstance(optimizer, dict)
        return Saved(weights, optimizer, progress)

    def _last(self, name: str) -> Path:
        """A folder, or the one that was about to be replaced when the process was killed."""
        for place in self._places(name):
            if (place / _PROGRESS).is_file():
                return place
        raise UsageError(f"{self.folder}: has no saved state to resume from")

    def _places(self, name: str) -> tuple[Path, Path]:
        return self.folder / name, self.folder / f".{name}.old"

    def _fresh_folder(self, name: str) -> Path:
        fresh = self.folder / f".{name}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        return fresh

    def _replace(self, fresh: Path, place: Path) -> None:
        for file in fresh.iterdir():
            sync(file)
        old = place.with_name(f".{place.name}.old")
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(place, old)
        os.rename(fresh, place)
        sync(place.parent)
        shutil.rmtree(old, ignore_errors=True)


def _write_json_in_place(path: Path, value: dict[str, Any]) -> None:
    fresh = path.with_name(f".{path.name}.new")
    write_json(fresh, value)
    sync(fresh)
    os.replace(fresh, path)


def _link_in_place(source: Path, path: Path) -> None:
    """A second name for a file, or a copy where the file system has no links."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    try:
        os.link(source, fresh)
    except OSError:
        shutil.copyfile(source, fresh)
    os.replace(fresh, path)
