"""The config of a hub repository, without its weights."""

from __future__ import annotations

from pathlib import Path

from mlxserve.errors import ModelLoadError, ModelNotFoundError


def pull_config(repo_id: str) -> Path:
    """config.json of a repository, downloaded alone if it is not in the hub's cache.

    Raises ModelNotFoundError for a repository that does not exist or is private, ModelLoadError when the file
    cannot be had.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(hf_hub_download(repo_id, "config.json"))
    except GatedRepoError as error:
        raise ModelLoadError(f"{repo_id}: access is gated, accept its terms on the hub and log in") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(f"{repo_id}: no such repository on the hub (or it is private)") from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(f"{repo_id}: the hub cannot be reached, is this machine online?") from error
    except EntryNotFoundError as error:
        raise ModelLoadError(
            f"{repo_id}: has no config.json, so it is no model that can be loaded"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ModelLoadError(f"{repo_id}: the download failed: {reason}") from error
