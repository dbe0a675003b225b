"""Output that is either whole or not there: a folder that appears by one rename.

Until then it is a hidden folder beside the target. It survives an interruption (Ctrl-C, a killed process,
a power cut), and the same conversion goes on with it; another one starts afresh.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from mlxserve.errors import ConversionError

_SPARE_BYTES = 16 * 2**20
_PURPOSE = "conversion.json"


class OutputBusyError(ConversionError):
    """Another process writes the same output."""


class OutputFolder:
    """Context manager: ``path`` is a hidden folder beside ``target``, locked while it is open. A clean exit
    moves it to ``target``; an error removes it and leaves ``target`` as it was; KeyboardInterrupt keeps it.

    ``purpose`` names what is written: what an interrupted run left for the same purpose is kept, anything
    else is removed. An existing target is refused unless it is an empty folder or ``force`` is set.
    """

    def __init__(self, target: Path, *, purpose: str, force: bool = False) -> None:
        self.target = target.absolute()
        self.path = self.target.with_name(f".{self.target.name}.partial")
        self._purpose = purpose
        self._force = force
        self._lock: int | None = None

    def check(self, num_bytes: int) -> None:
        """Raises ConversionError when the target is taken, cannot be written or lacks space."""
        if self.target.exists() and not self._force:
            if not self.target.is_dir():
                raise ConversionError(f"{self.target}: the output exists and is a file, choose another name")
            if any(self.target.iterdir()):
                raise ConversionError(
                    f"{self.target}: the output folder is not empty, use --force to replace it"
                )
        self._check_replaceable()
        parent = self._existing_parent()
        if not os.access(parent, os.W_OK | os.X_OK):
            raise ConversionError(f"{self.target}: cannot be written: no permission in {parent}")
        needed = num_bytes + _SPARE_BYTES - self._bytes_there()
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise ConversionError(
                f"{self.target}: needs {needed / 1e9:.2f} GB, only {free / 1e9:.2f} GB are free in {parent}"
            )

    def _check_replaceable(self) -> None:
        """Only what a conversion has written may be replaced, never a folder of other things."""
        target = self.target.resolve()
        if not self.target.exists():
            return
        if not target.is_dir():
            raise ConversionError(f"{self.target}: the output exists and is a file, choose another name")
        if Path.cwd().resolve().is_relative_to(target) or Path.home().resolve().is_relative_to(target):
            raise ConversionError(
                f"{self.target}: holds the current or the home folder, choose another output"
            )
        if any(target.iterdir()) and ((target / ".git").exists() or not (target / "config.json").is_file()):
            raise ConversionError(
                f"{self.target}: is no model folder (it has no config.json), --force does not replace it"
            )

    def _existing_parent(self) -> Path:
        parent = self.target.parent
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise ConversionError(f"{self.target}: cannot be written: {parent} is not a folder")
        return parent

    def _bytes_there(self) -> int:
        """What is left of an interrupted run, and will be gone on with or removed."""
        if not self.path.is_dir():
            return 0
        return sum(file.stat().st_blocks * 512 for file in self.path.iterdir() if file.is_file())

    def __enter__(self) -> OutputFolder:
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
            if self._read_purpose() != self._purpose:
                _empty(self.path)
                write_json(self.path / _PURPOSE, {"purpose": self._purpose})
        except OSError as error:
            self._unlock()
            raise ConversionError(f"{self.target}: cannot be written: {error.strerror}") from error
        return self

    def _locked(self) -> int:
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            try:
                handle = lock_folder(self.path)
            except BlockingIOError:
                raise OutputBusyError(f"{self.target}: is being written by another process") from None
            # Whoever held the lock may have moved the folder away in between.
            if self.path.is_dir() and os.path.samestat(os.fstat(handle), self.path.stat()):
                return handle
            os.close(handle)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read_purpose(self) -> str | None:
        try:
            value = json.loads((self.path / _PURPOSE).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        purpose = value.get("purpose") if isinstance(value, dict) else None
        return purpose if isinstance(purpose, str) else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._publish()
        finally:
            if not isinstance(error, KeyboardInterrupt):
                shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()
        if isinstance(error, OSError):
            raise ConversionError(f"{self.target}: cannot be written: {error.strerror or error}") from error

    def _publish(self) -> None:
        try:
            (self.path / _PURPOSE).unlink()
            self.path.chmod(0o755)
            for file in self.path.rglob("*"):
                sync(file)
            sync(self.path)
            replaced = self._move_target_away()
            os.rename(self.path, self.target)
            sync(self.target.parent)
        except OSError as error:
            raise ConversionError(f"{self.target}: cannot be written: {error.strerror or error}") from error
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def _move_target_away(self) -> Path | None:
        if not self.target.exists() or (self.target.is_dir() and not any(self.target.iterdir())):
            return None
        if not self._force:
            raise ConversionError(
                f"{self.target}: was filled by someone else meanwhile, nothing was replaced"
            )
        self._check_replaceable()
        replaced = self.target.with_name(f".{self.target.name}.replaced-{os.getpid()}")
        os.rename(self.target, replaced)
        return replaced


def lock_folder(folder: Path) -> int:
    """Locks a folder for this process; closing the handle, or its end, unlocks it. Raises BlockingIOError
    where another has it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def sync(path: Path) -> None:
    """Forces a file's or folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
