"""One large file of the hub into the hub's cache: gone on with after an interruption, checked, then named.

Large files lie on the hub under the SHA-256 of their content (Git LFS), which is their name in the cache,
too (``blobs/<sha256>``). huggingface-hub begins such a file anew when its process ended; here the part that
came stays as ``<sha256>.incomplete`` and only the rest is asked for (HTTP Range).
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlxserve.errors import MlxserveError, ModelLoadError

_CHUNK = 1 << 20
_MAX_FAILURES = 5
"""In a row, without a byte in between."""
_FIRST_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of a repository by its content. ``size`` is in bytes."""

    file: str
    url: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Place:
    """``blobs`` and ``locks`` are folders of the repository in the hub's cache."""

    blobs: Path
    locks: Path

    def blob(self, blob: Blob) -> Path:
        return self.blobs / blob.sha256

    def partial(self, blob: Blob) -> Path:
        return self.blobs / f"{blob.sha256}.incomplete"


class Stopped(Exception):
    """The download was told to stop; what came is kept."""


OnBytes = Callable[[int], None]
"""Bytes that came (or were there); negative when they turned out to be of no use."""


def fetch_blob(
    blob: Blob, place: Place, headers: dict[str, str], on_bytes: OnBytes, stop: threading.Event
) -> None:
    """The blob in its place, whole and with the right checksum; nothing if it is there.

    Raises ModelLoadError for another content than expected, MlxserveError for a full disk, and what
    huggingface-hub raises for the network. Another process that fetches the same file is waited for.
    """
    from huggingface_hub.utils import WeakFileLock

    for folder in (place.blobs, place.locks):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(place.locks / f"{blob.sha256}.lock"):
        target = place.blob(blob)
        if target.is_file() and target.stat().st_size == blob.size:
            on_bytes(blob.size)
            return
        try:
            _fetch(blob, place.partial(blob), headers, on_bytes, stop)
            os.replace(place.partial(blob), target)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise disk_full(blob.file, place.blobs) from error
            raise


def disk_full(what: str, folder: Path) -> MlxserveError:
    return MlxserveError(
        f"{what}: the disk of {folder} is full; what came so far is kept, pull goes on from there"
    )


def _fetch(
    blob: Blob, partial: Path, headers: dict[str, str], on_bytes: OnBytes, stop: threading.Event
) -> None:
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    with partial.open("a+b") as file:
        transfer = _Transfer(blob, file, on_bytes, stop)
        failures = 0
        while not transfer.is_whole:
            before = transfer.num_bytes
            try:
                transfer.go_on(headers)
            except HfHubHTTPError as error:
                if error.response.status_code < 500:
                    raise
                failure: Exception = error
            except HTTPError as error:
                failure = error
            else:
                failure = ModelLoadError(
                    f"{blob.file}: the hub ends after {transfer.num_bytes} of {blob.size} bytes"
                )
            if transfer.is_whole:
                break
            failures = 1 if transfer.num_bytes > before else failures + 1
            if failures >= _MAX_FAILURES:
                raise failure
            stop.wait(_FIRST_PAUSE_S * 2 ** (failures - 1))
        file.flush()
        os.fsync(file.fileno())
    if transfer.sha256 != blob.sha256:
        partial.unlink()
        on_bytes(-transfer.num_bytes)
        raise ModelLoadError(
            f"{blob.file}: the download is damaged and was thrown away: sha256 {transfer.sha256}, "
            f"expected {blob.sha256}; pull again"
        )


class _Transfer:
    """The part of a blob that is in ``file``, hashed as far as it goes."""

    def __init__(self, blob: Blob, file: BinaryIO, on_bytes: OnBytes, stop: threading.Event) -> None:
        self._blob = blob
        self._file = file
        self._on_bytes = on_bytes
        self._stop = stop
        self._digest = hashlib.sha256()
        self.num_bytes = 0
        file.seek(0)
        while chunk := file.read(_CHUNK):
            self._take(chunk)
        if self.num_bytes > blob.size:
            self._begin_anew()

    @property
    def is_whole(self) -> bool:
        return self.num_bytes == self._blob.size

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def _take(self, chunk: bytes) -> None:
        if self._stop.is_set():
            raise Stopped
        self._digest.update(chunk)
        self.num_bytes += len(chunk)
        self._on_bytes(len(chunk))

    def _begin_anew(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._on_bytes(-self.num_bytes)
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def go_on(self, headers: dict[str, str]) -> None:
        """One request for the rest."""
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session, hf_raise_for_status

        # Compressed bytes have other offsets.
        wanted = {**headers, "Accept-Encoding": "identity"}
        if self.num_bytes:
            wanted["Range"] = f"bytes={self.num_bytes}-"
        session: Any = get_session()
        with session.stream(
            "GET",
            self._blob.url,
            headers=wanted,
            follow_redirects=True,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        ) as response:
            if response.status_code == 416:
                self._begin_anew()
                return
            hf_raise_for_status(response)
            if self.num_bytes and response.status_code != 206:
                self._begin_anew()
            # As they come: what is gathered to a larger chunk is lost when the connection is cut.
            for chunk in response.iter_bytes():
                if self.num_bytes + len(chunk) > self._blob.size:
                    raise ModelLoadError(
                        f"{self._blob.file}: the hub sends more than the {self._blob.size} bytes it names"
                    )
                self._file.write(chunk)
                self._take(chunk)
