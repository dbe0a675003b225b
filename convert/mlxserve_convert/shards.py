"""Safetensors shards that are written block by block, by a thread of their own, and can be gone on with.

A tensor's place is decided when it begins, its blocks may come in any order, and a journal says which
tensors are on the disk. The layout depends on the tensors alone: a run that was killed and went on leaves the
same bytes as one that was not.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxserve_convert.output_folder import sync, write_json

MAX_SHARD_BYTES = 5 * 10**9
_ALIGNMENT = 64
_HEADER_BYTES = 64
_ENTRY_BYTES = 192
_SYNC_BYTES = 1 << 28
_QUEUED_BLOCKS = 4
_JOURNAL = "written.jsonl"
DTYPE_SIZES = {
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "U8": 1,
    "I8": 1,
    "I64": 8,
    "U16": 2,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a shard: ``begin`` counts from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        return self.begin + int(np.prod(self.shape, dtype=np.int64)) * DTYPE_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Stream:
    """An open tensor: where its bytes go."""

    entry: Entry
    shard: int
    position: int


class ShardedWriter:
    """Writes ``model.safetensors``, or numbered shards with an index, into a folder.

    ``names`` are all tensor names that will come (they size the space kept for the headers). Tensors come in
    groups that end together: ``begin``, any number of ``write``, ``end``. ``finish`` completes the files,
    ``close`` ends the thread. ``written`` are the names that an earlier writer in this folder ended.
    """

    def __init__(self, folder: Path, names: Iterable[str], *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder = folder
        space = _HEADER_BYTES + sum(_ENTRY_BYTES + len(name.encode()) for name in names)
        self._header_space = -(-space // _ALIGNMENT) * _ALIGNMENT
        self._max_shard_bytes = max_shard_bytes
        self._shards: list[list[Entry]] = []
        self._group: list[Stream] = []
        self._read_journal()
        self.written = frozenset(entry.name for shard in self._shards for entry in shard)
        self._writer = _WriterThread(folder)

    @property
    def num_bytes(self) -> int:
        return sum(shard[-1].end for shard in self._shards if shard)

    def _read_journal(self) -> None:
        """Takes over what is surely on the disk; a line that was cut off is nothing."""
        path = self._folder / _JOURNAL
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        for line in lines:
            value = json.loads(line)
            while len(self._shards) <= value["shard"]:
                self._shards.append([])
            for name, dtype, shape, begin in value["entries"]:
                self._shards[value["shard"]].append(Entry(name, dtype, tuple(shape), begin))
        path.write_bytes(b"".join(line + b"\n" for line in lines))

    def begin(self, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[Stream]:
        """Opens tensors, given by name, safetensors type and shape, side by side in one shard."""
        assert not self._group, "a group is open"
        position = self._shards[-1][-1].end if self._shards and self._shards[-1] else 0
        entries = _placed(tensors, position)
        if not self._shards or (position and entries[-1].end > self._max_shard_bytes):
            self._shards.append([])
            entries = _placed(tensors, 0)
        shard = len(self._shards) - 1
        self._group = [Stream(entry, shard, self._header_space + entry.begin) for entry in entries]
        return self._group

    def write(self, stream: Stream, offset: int, data: np.ndarray[Any, Any]) -> None:
        """Puts bytes at ``offset`` of a tensor. ``data`` must not change any more; it is written later."""
        assert offset + data.nbytes <= stream.entry.end - stream.entry.begin, stream.entry.name
        self._writer.put(stream.shard, stream.position + offset, data)

    def end(self) -> None:
        """The open tensors are complete."""
        shard = self._group[0].shard
        entries = [stream.entry for stream in self._group]
        self._shards[shard].extend(entries)
        line = {"shard": shard, "entries": [[e.name, e.dtype, e.shape, e.begin] for e in entries]}
        self._writer.journal(shard, json.dumps(line).encode() + b"\n")
        self._group = []

    def finish(self) -> list[str]:
        """Completes the files and returns their names."""
        self._writer.close()
        count = len(self._shards)
        names = [
            "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            for i in range(count)
        ]
        for shard, name in enumerate(names):
            self._write_header(shard)
            os.rename(_shard_path(self._folder, shard), self._folder / name)
        weight_map = {
            entry.name: name for shard, name in zip(self._shards, names, strict=True) for entry in shard
        }
        write_json(
            self._folder / "model.safetensors.index.json",
            {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(weight_map.items()))},
        )
        (self._folder / _JOURNAL).unlink()
        return names

    def _write_header(self, shard: int) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        for entry in self._shards[shard]:
            header[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [entry.begin, entry.end],
            }
        raw = json.dumps(header, separators=(",", ":")).encode()
        assert len(raw) + 8 <= self._header_space, f"{len(self._shards[shard])} tensors do not fit one header"
        path = _shard_path(self._folder, shard)
        with path.open("r+b") as file:
            # Bytes after the last tensor are those of one that was not ended.
            file.truncate(self._header_space + self._shards[shard][-1].end)
            # Trailing spaces are allowed by the format and keep the data where it was written.
            file.write((self._header_space - 8).to_bytes(8, "little") + raw.ljust(self._header_space - 8))
        sync(path)

    def close(self) -> None:
        """Ends the thread and closes files, whatever happened."""
        self._writer.abandon()


def _placed(tensors: Sequence[tuple[str, str, tuple[int, ...]]], position: int) -> list[Entry]:
    entries = []
    for name, dtype, shape in tensors:
        entries.append(Entry(name, dtype, shape, position))
        position = entries[-1].end
    return entries


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard}.data"


class _WriterThread:
    """Writes blocks behind the caller's back, a few at most, in order. An error of it is raised by the next
    call of the caller's thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, int] = {}
        self._queue: queue.Queue[tuple[int, int, Any] | None] = queue.Queue(_QUEUED_BLOCKS)
        self._error: OSError | None = None
        self._unsynced = 0
        self._lines: list[bytes] = []
        self._thread = threading.Thread(target=self._run, name="shard-writer", daemon=True)
        self._thread.start()

    def put(self, shard: int, position: int, data: np.ndarray[Any, Any]) -> None:
        self._check()
        self._queue.put((shard, position, data))

    def journal(self, shard: int, line: bytes) -> None:
        self._check()
        self._queue.put((shard, -1, line))

    def close(self) -> None:
        """Waits until all is on the disk."""
        self._stop()
        self._check()

    def abandon(self) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                if self._error is None:
                    self._do(*item)
            if self._error is None:
                self._sync()
        except OSError as error:
            self._error = error
            while self._queue.get() is not None:
                pass
        finally:
            for handle in self._files.values():
                os.close(handle)
            self._files = {}

    def _do(self, shard: int, position: int, data: Any) -> None:
        if position < 0:
            self._lines.append(data)
            if self._unsynced >= _SYNC_BYTES:
                self._sync()
            return
        view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        handle = self._handle(shard)
        while view:
            count = os.pwrite(handle, view, position)
            view, position = view[count:], position + count
            self._unsynced += count

    def _handle(self, shard: int) -> int:
        if shard not in self._files:
            flags = os.O_RDWR | os.O_CREAT
            self._files[shard] = os.open(_shard_path(self._folder, shard), flags, 0o644)
        return self._files[shard]

    def _sync(self) -> None:
        """Data first, then the lines that vouch for it."""
        for handle in self._files.values():
            os.fsync(handle)
        with (self._folder / _JOURNAL).open("ab") as journal:
            journal.write(b"".join(self._lines))
            journal.flush()
            os.fsync(journal.fileno())
        self._lines = []
        self._unsynced = 0
