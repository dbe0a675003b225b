"""Output that is either whole or not there: a folder that appears by one rename, and safetensors shards
that are written tensor by tensor, so that memory holds one tensor and not a model."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from mlxserve.errors import ConversionError

MAX_SHARD_BYTES = 5 * 10**9
_SPARE_BYTES = 16 * 2**20
_ALIGNMENT = 64
_HEADER_BYTES = 64
_ENTRY_BYTES = 192
_DTYPE_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "U8": 1, "I8": 1, "I64": 8, "U16": 2}


class OutputFolder:
    """Context manager: ``path`` is a hidden folder beside ``target``. A clean exit moves it to
    ``target``; any exception, KeyboardInterrupt included, removes it and leaves ``target`` as it was.

    An existing target is refused unless it is an empty folder or ``force`` is set.
    """

    def __init__(self, target: Path, *, force: bool = False) -> None:
        self.target = target.absolute()
        self._force = force
        self.path = self.target

    def check(self, num_bytes: int) -> None:
        """Raises ConversionError when the target is taken, cannot be written or lacks space."""
        if self.target.exists() and not self._force:
            if not self.target.is_dir():
                raise ConversionError(f"{self.target}: the output exists and is a file, choose another name")
            if any(self.target.iterdir()):
                raise ConversionError(
                    f"{self.target}: the output folder is not empty, use --force to replace it"
                )
        parent = self._existing_parent()
        if not os.access(parent, os.W_OK | os.X_OK):
            raise ConversionError(f"{self.target}: cannot be written: no permission in {parent}")
        free = shutil.disk_usage(parent).free
        if free < num_bytes + _SPARE_BYTES:
            raise ConversionError(
                f"{self.target}: needs {num_bytes / 1e9:.2f} GB, only {free / 1e9:.2f} GB are free in "
                f"{parent}"
            )

    def _existing_parent(self) -> Path:
        parent = self.target.parent
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise ConversionError(f"{self.target}: cannot be written: {parent} is not a folder")
        return parent

    def __enter__(self) -> OutputFolder:
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(self.target)
            prefix = f"{_prefix(self.target)}{os.getpid()}-"
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=self.target.parent))
        except OSError as error:
            raise ConversionError(f"{self.target}: cannot be written: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._publish()
        finally:
            shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConversionError(f"{self.target}: cannot be written: {error.strerror or error}") from error

    def _publish(self) -> None:
        try:
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
        replaced = Path(f"{self.path}.replaced")
        os.rename(self.target, replaced)
        return replaced


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _remove_stale(target: Path) -> None:
    """Removes what a killed process left for the same target."""
    for path in target.parent.glob(f"{_prefix(target)}*"):
        pid = path.name[len(_prefix(target)) :].split("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sync(path: Path) -> None:
    """Forces a file's or folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class ShardedWriter:
    """Writes ``model.safetensors``, or numbered shards with an index, into a folder.

    ``names`` are all tensor names that will come (they size the space kept for the headers). ``add``
    writes one tensor at once; ``finish`` completes the files. Not finished means not readable.
    """

    def __init__(self, folder: Path, names: Iterable[str], *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder = folder
        space = _HEADER_BYTES + sum(_ENTRY_BYTES + len(name.encode()) for name in names)
        self._header_space = -(-space // _ALIGNMENT) * _ALIGNMENT
        self._max_shard_bytes = max_shard_bytes
        self._paths: list[Path] = []
        self._entries: list[_Entry] = []
        self._shard_of: dict[str, int] = {}
        self._data: BinaryIO | None = None
        self.num_bytes = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: np.ndarray[Any, Any]) -> None:
        """``data`` is a contiguous array of the tensor's bytes, ``dtype`` a safetensors type name."""
        expected = int(np.prod(shape, dtype=np.int64)) * _DTYPE_SIZES[dtype]
        assert data.nbytes == expected, f"{name}: {data.nbytes} bytes, expected {expected}"
        assert name not in self._shard_of, f"{name} is written twice"
        position = self._entries[-1].end if self._entries else 0
        if self._data is not None and position and position + data.nbytes > self._max_shard_bytes:
            self._close_shard()
            position = 0
        if self._data is None:
            self._open_shard()
        assert self._data is not None
        self._data.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
        self._entries.append(_Entry(name, dtype, shape, position, position + data.nbytes))
        self._shard_of[name] = len(self._paths) - 1
        self.num_bytes += data.nbytes

    def _open_shard(self) -> None:
        path = self._folder / f"shard-{len(self._paths)}.data"
        self._paths.append(path)
        self._data = path.open("wb")
        self._entries = []
        self._data.write(bytes(self._header_space))

    def _close_shard(self) -> None:
        assert self._data is not None
        header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        for entry in self._entries:
            header[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [entry.begin, entry.end],
            }
        raw = json.dumps(header, separators=(",", ":")).encode()
        assert len(raw) + 8 <= self._header_space, (
            f"{len(self._entries)} tensors do not fit one shard's header"
        )
        self._data.seek(0)
        self._data.write((self._header_space - 8).to_bytes(8, "little"))
        # Trailing spaces are allowed by the format and keep the data where it was written.
        self._data.write(raw.ljust(self._header_space - 8))
        self._data.close()
        self._data = None

    def finish(self) -> list[str]:
        """Completes the files and returns their names."""
        if self._data is not None:
            self._close_shard()
        count = len(self._paths)
        names = [
            "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            for i in range(count)
        ]
        for path, name in zip(self._paths, names, strict=True):
            os.rename(path, self._folder / name)
        weight_map = {tensor: names[shard] for tensor, shard in sorted(self._shard_of.items())}
        write_json(
            self._folder / "model.safetensors.index.json",
            {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map},
        )
        return names

    def abandon(self) -> None:
        """Closes an open file after an error; the folder's owner removes it."""
        if self._data is not None:
            self._data.close()
            self._data = None
