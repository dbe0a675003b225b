"""Models from the Hugging Face hub, into its own cache, whole and checked.

huggingface-hub lists the repository, fetches the small files and makes the snapshot; large ones come by
``download.py``, which goes on where an interrupted pull stopped. ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HOME``
and ``HF_HUB_OFFLINE`` act as they do there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlxserve.errors import MlxserveError, ModelLoadError, ModelNotFoundError
from mlxserve.hub.download import Blob, Place, Stopped, disk_full, fetch_blob
from mlxserve.hub.pulls import Pull, find_pull, has_size, write_pull
from mlxserve.hub.reference import RepoReference
from mlxserve.hub.selection import Patterns, choose_files
from mlxserve.json_file import read_json_object

_MAX_THREADS = 4
_RESERVE_BYTES = 64 << 20
"""Of the disk, left free."""


@dataclass(frozen=True, slots=True)
class PullProgress:
    """Bytes of all files: those that are here, and all of them."""

    done_bytes: int
    total_bytes: int


OnPull = Callable[[PullProgress], None]


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    git_id: str
    sha256: str | None


@dataclass(frozen=True, slots=True)
class _Listing:
    commit: str
    files: Mapping[str, _File]


@dataclass(slots=True)
class _Count:
    """Bytes that several threads count."""

    total: int
    on_pull: OnPull | None
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, num_bytes: int) -> None:
        with self.lock:
            self.done += num_bytes
            if self.on_pull is not None:
                self.on_pull(PullProgress(self.done, self.total))


def pull_repository(
    reference: RepoReference,
    patterns: Patterns | None = None,
    *,
    offline: bool = False,
    on_pull: OnPull | None = None,
) -> Pull:
    """Fetches what is missing of a repository and returns what is on this machine then.

    An interrupted pull keeps what came; the next one goes on with it. Sizes are checked for every file, the
    content by its hash for every file that is fetched. With ``offline``, or without a network, what was
    pulled before is returned if it is whole. Raises ModelNotFoundError for a repository, revision or file
    that does not exist or is private, ModelLoadError when it cannot be had, MlxserveError for a full disk.
    """
    from huggingface_hub import constants

    patterns = patterns or Patterns()
    if offline or constants.is_offline_mode():
        return _offline(reference, patterns, "offline mode is on")
    with _one_line(reference), _quiet():
        try:
            listing = _list(reference)
        except Exception as error:
            if not _is_network(error):
                raise
            return _offline(reference, patterns, f"the hub cannot be reached ({_reason(error)})")
        names = choose_files(reference, tuple(listing.files), patterns)
        files = [listing.files[name] for name in names]
        pull = Pull(
            reference,
            patterns,
            listing.commit,
            _storage(reference) / "snapshots" / listing.commit,
            {file.name: file.size for file in files},
        )
        pull.folder.mkdir(parents=True, exist_ok=True)
        write_pull(pull)
        _fetch_all(pull, files, on_pull)
        _write_ref(pull)
    return pull


def _offline(reference: RepoReference, patterns: Patterns, reason: str) -> Pull:
    pull = find_pull(reference)
    if pull is not None and pull.patterns == patterns and pull.is_whole:
        return pull
    pull = _found_in_cache(reference, patterns)
    if pull is not None:
        return pull
    known = find_pull(reference)
    held = "it was not pulled" if known is None else f"only a part of it was pulled ({known.state()})"
    raise ModelLoadError(f"{reference}: {reason}, and {held}")


def _found_in_cache(reference: RepoReference, patterns: Patterns) -> Pull | None:
    """A snapshot that another program made, if it has what is asked for."""
    ref = _storage(reference) / "refs" / (reference.revision or "main")
    try:
        commit = ref.read_text(encoding="utf-8").strip()
        folder = _storage(reference) / "snapshots" / commit
        sizes = {
            str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
        }
        names = choose_files(reference, tuple(sizes), patterns)
    except (OSError, MlxserveError):
        return None
    known = find_pull(reference)
    if known is not None and known.commit == commit and not known.is_whole:
        # Its record knows better than the files what is lacking.
        return None
    if not any(name.endswith(".gguf") for name in names):
        try:
            check_complete(folder, str(reference))
        except ModelLoadError:
            return None
    return Pull(reference, patterns, commit, folder, {name: sizes[name] for name in names})


def _is_network(error: Exception) -> bool:
    """Whether the hub was not reached, or does not work at all."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,
        OfflineModeIsEnabled,
    )

    if isinstance(error, HfHubHTTPError):
        return bool(error.response.status_code >= 500)
    return isinstance(error, HTTPError | OfflineModeIsEnabled)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _storage(reference: RepoReference) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=reference.repo_id, repo_type="model")


def _list(reference: RepoReference) -> _Listing:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    info = api.model_info(reference.repo_id, revision=reference.revision)
    if info.sha is None:
        raise ModelLoadError(f"{reference}: the hub names no commit")
    entries = api.list_repo_tree(reference.repo_id, recursive=True, revision=info.sha)
    files = {
        entry.path: _File(
            entry.path,
            entry.size if entry.lfs is None else entry.lfs.size,
            entry.blob_id,
            None if entry.lfs is None else entry.lfs.sha256,
        )
        for entry in entries
        if isinstance(entry, RepoFile)
    }
    return _Listing(info.sha, files)


def _fetch_all(pull: Pull, files: list[_File], on_pull: OnPull | None) -> None:
    missing = [file for file in files if not has_size(pull.folder / file.name, file.size)]
    count = _Count(pull.num_bytes, on_pull)
    count.add(pull.num_bytes - sum(file.size for file in missing))
    place = Place(
        _storage(pull.reference) / "blobs",
        Path(_cache()) / ".locks" / _storage(pull.reference).name,
    )
    large = [(file, _blob(pull, file)) for file in missing if file.sha256 is not None]
    _check_space(pull, missing, [place.partial(blob) for _, blob in large], place.blobs)
    for file in missing:
        _drop_damaged(pull.folder / file.name)
    _fetch_blobs([blob for _, blob in large], place, count)
    for file in missing:
        _link(pull, file)
        if file.sha256 is None:
            _check_small(pull, file)
            count.add(file.size)


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def _blob(pull: Pull, file: _File) -> Blob:
    from huggingface_hub import constants, hf_hub_url

    assert file.sha256 is not None
    url = hf_hub_url(pull.reference.repo_id, file.name, revision=pull.commit, endpoint=constants.ENDPOINT)
    return Blob(file.name, url, file.sha256, file.size)


def _check_space(pull: Pull, missing: list[_File], partials: list[Path], folder: Path) -> None:
    held = sum(path.stat().st_size for path in partials if path.is_file())
    needed = sum(file.size for file in missing) - held
    free = shutil.disk_usage(pull.folder).free
    if needed > 0 and needed + _RESERVE_BYTES > free:
        raise MlxserveError(
            f"{pull.reference}: {needed / 1e9:.2f} GB are still to come, the disk of {folder} has "
            f"{free / 1e9:.2f} GB free"
        )


def _write_ref(pull: Pull) -> None:
    """By it other programs find the snapshot without a network."""
    revision = pull.reference.revision or "main"
    if revision == pull.commit:
        return
    ref = _storage(pull.reference) / "refs" / revision
    part = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
    ref.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(pull.commit, encoding="utf-8")
    os.replace(part, ref)


def _drop_damaged(pointer: Path) -> None:
    """A file of another size than the hub's, or a link to nothing: it and its content go."""
    if pointer.is_symlink():
        pointer.resolve().unlink(missing_ok=True)
    pointer.unlink(missing_ok=True)


def _fetch_blobs(blobs: list[Blob], place: Place, count: _Count) -> None:
    from huggingface_hub.utils import build_hf_headers

    headers: dict[str, str] = build_hf_headers()
    stop = threading.Event()
    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        pending = [
            threads.submit(fetch_blob, blob, place, dict(headers), count.add, stop)
            for blob in sorted(blobs, key=lambda blob: -blob.size)
        ]
        try:
            for done in pending:
                done.result()
        except BaseException:
            # Ctrl-C as well: each thread ends at its next chunk, and what came is kept.
            stop.set()
            threads.shutdown(cancel_futures=True)
            raise


def _link(pull: Pull, file: _File) -> None:
    """The file's place in the snapshot; a small one is fetched, a large one is there already."""
    from huggingface_hub import hf_hub_download

    hf_hub_download(pull.reference.repo_id, file.name, revision=pull.commit)
    path = pull.folder / file.name
    if not has_size(path, file.size):
        found = path.stat().st_size if path.is_file() else 0
        _drop_damaged(path)
        raise ModelLoadError(
            f"{pull.reference}: {file.name} has {found} bytes, the hub says {file.size}; pull again"
        )


def _check_small(pull: Pull, file: _File) -> None:
    """A file in git is named by the SHA-1 of its size and content."""
    path = pull.folder / file.name
    content = path.read_bytes()
    found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    if found != file.git_id:
        _drop_damaged(path)
        raise ModelLoadError(
            f"{pull.reference}: {file.name} is damaged: git id {found}, expected {file.git_id}; pull again"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without huggingface-hub's own bars and warnings: progress and errors are ours."""
    import logging as levels

    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars, logging

    before = logging.get_verbosity()
    logging.set_verbosity(levels.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
        logging.set_verbosity(before)


@contextmanager
def _one_line(reference: RepoReference) -> Iterator[None]:
    """huggingface-hub's exceptions, and those of its network library, as ours."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{reference}: access is gated, accept its terms on the hub and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{reference}: no such repository on the hub, or it is private (HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(
            f"{reference}: the repository has no revision {reference.revision or 'main'!r}"
        ) from error
    except HFValidationError as error:
        raise ModelNotFoundError(f"{reference}: not a valid repository id") from error
    except Stopped:
        raise ModelLoadError(f"{reference}: the download was stopped") from None
    except (HTTPError, EntryNotFoundError) as error:
        reason = _reason(error)
        raise ModelLoadError(
            f"{reference}: the download failed: {reason}; what came is kept, pull goes on from there"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(str(reference), _storage(reference)) from error
        raise ModelLoadError(f"{reference}: the download failed: {_reason(error)}") from error


def check_complete(folder: Path, name: str) -> None:
    """Raises ModelLoadError unless the folder has a config and every shard that its index names."""
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{name}: config.json is missing, this is not a model that can be loaded")
    for index_name, pattern in (
        ("model.safetensors.index.json", "*.safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model*.bin"),
    ):
        index = folder / index_name
        if index.is_file():
            _check_shards(folder, index, name)
            return
        if any(folder.glob(pattern)):
            return
    raise ModelLoadError(f"{name}: has no .safetensors files")


def _check_shards(folder: Path, index: Path, name: str) -> None:
    try:
        shards = set(read_json_object(index)["weight_map"].values())
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    except (ModelLoadError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: not a valid index of shards") from error
    if missing:
        raise ModelLoadError(f"{name}: {len(missing)} of {len(shards)} files are missing, first {missing[0]}")
