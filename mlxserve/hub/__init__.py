"""Where models come from and where they lie: names, downloads, and the local store."""

from mlxserve.hub.builtin import BUILTIN_MODELS, pull_builtin
from mlxserve.hub.repository import pull_repository
from mlxserve.hub.resolve import ModelSource, resolve
from mlxserve.hub.store import StoredModel, find_stored, import_folder, list_stored, remove_stored

__all__ = [
    "BUILTIN_MODELS",
    "ModelSource",
    "StoredModel",
    "find_stored",
    "import_folder",
    "list_stored",
    "pull_builtin",
    "pull_repository",
    "remove_stored",
    "resolve",
]
