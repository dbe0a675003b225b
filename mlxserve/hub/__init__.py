"""Where models come from and where they lie: names, downloads, and the local store."""

from mlxserve.hub.builtin import BUILTIN_MODELS, pull_builtin
from mlxserve.hub.pulls import Pull, find_pull, list_pulls
from mlxserve.hub.reference import RepoReference, parse_reference
from mlxserve.hub.repository import OnPull, PullProgress, pull_repository
from mlxserve.hub.resolve import ModelSource, resolve
from mlxserve.hub.selection import Patterns
from mlxserve.hub.store import StoredModel, find_stored, import_folder, list_stored, remove_stored

__all__ = [
    "BUILTIN_MODELS",
    "ModelSource",
    "OnPull",
    "Patterns",
    "Pull",
    "PullProgress",
    "RepoReference",
    "StoredModel",
    "find_pull",
    "find_stored",
    "import_folder",
    "list_pulls",
    "list_stored",
    "parse_reference",
    "pull_builtin",
    "pull_repository",
    "remove_stored",
    "resolve",
]
