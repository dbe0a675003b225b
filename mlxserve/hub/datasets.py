"""Data sets from the Hugging Face hub, into its own cache. Only data files are fetched, never code."""

from __future__ import annotations

import re
from pathlib import Path

from mlxserve.errors import MlxserveError

_WANTED = ("jsonl", "json", "csv", "tsv", "parquet")
_PACKED = ("", ".gz", ".zst")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/[\w.-]+)*", re.ASCII)


class DatasetError(MlxserveError):
    """A data set that cannot be had, and why."""

    code = "dataset_error"


def is_dataset_name(name: str) -> bool:
    """Whether ``name`` reads as ``owner/name`` or ``owner/name/folder``."""
    return bool(_NAME.fullmatch(name)) and ".." not in name.split("/")


def pull_dataset(name: str) -> Path:
    """The folder of a data set's files, or the folder in it that ``name`` ends with.

    Without a network the cached files are used. Raises DatasetError when it cannot be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    owner, repository, *folders = name.split("/")
    repo_id, inside = f"{owner}/{repository}", "/".join(folders)
    start = f"{inside}/" if inside else ""
    patterns = [f"{start}*.{suffix}{packed}" for suffix in _WANTED for packed in _PACKED]
    try:
        folder = Path(snapshot_download(repo_id, repo_type="dataset", allow_patterns=patterns))
    except GatedRepoError as error:
        raise DatasetError(f"{repo_id}: access is gated, accept its terms on the hub and log in") from error
    except RepositoryNotFoundError as error:
        raise DatasetError(f"{repo_id}: no such data set on the hub (or it is private)") from error
    except HFValidationError as error:
        raise DatasetError(f"{repo_id}: not a valid data set id") from error
    except LocalEntryNotFoundError as error:
        raise DatasetError(
            f"{repo_id}: the hub cannot be reached and the data set is not in its cache, "
            "is this machine online?"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise DatasetError(f"{repo_id}: the download failed: {reason}") from error
    if inside and not (folder / inside).is_dir():
        raise DatasetError(f"{repo_id}: has no data files in a folder {inside}")
    return folder / inside if inside else folder
