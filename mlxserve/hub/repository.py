"""Models from the Hugging Face hub, into its own cache. Only data files are fetched, never code."""

from __future__ import annotations

import json
from pathlib import Path

from mlxserve.errors import ModelLoadError, ModelNotFoundError

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]


def pull_repository(repo_id: str) -> Path:
    """The folder of a repository's files, downloaded where they are missing.

    Without a network the cached files are used if they are complete. Raises ModelNotFoundError for a
    repository that does not exist or is private, ModelLoadError when it cannot be had or is incomplete.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=_WANTED))
    except GatedRepoError as error:
        raise ModelLoadError(f"{repo_id}: access is gated, accept its terms on the hub and log in") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"{repo_id}: no such repository on the hub (or it is private)") from error
    except HFValidationError as error:
        raise ModelNotFoundError(f"{repo_id}: not a valid repository id") from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"{repo_id}: the hub cannot be reached and the model is not in its cache, is this machine online?"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ModelLoadError(f"{repo_id}: the download failed: {reason}") from error
    check_complete(folder, repo_id)
    return folder


def check_complete(folder: Path, name: str) -> None:
    """Raises ModelLoadError unless the folder has a config and every shard that its index names."""
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{name}: config.json is missing, this is not a model that can be loaded")
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if not any(folder.glob("*.safetensors")):
            raise ModelLoadError(f"{name}: has no .safetensors files")
        return
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: not a valid index of shards") from error
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        raise ModelLoadError(f"{name}: {len(missing)} of {len(shards)} files are missing, first {missing[0]}")
