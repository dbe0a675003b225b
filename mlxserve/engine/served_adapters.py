"""Adapters as models of their own: ``base:name``, on the engine of their base."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import InvalidRequestError
from mlxserve.models.adapter_folder import low_rank_changes, read_adapter

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def adapter_model_id(base: ServedModel, name: str) -> str:
    """Raises InvalidRequestError for a name that cannot be part of a model's id."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"an adapter's name has 1 to 64 letters, digits, dots, dashes and underscores, not {name!r}",
            param="name",
        )
    return f"{base.id}:{name}"


def load_adapter(base: ServedModel, name: str, folder: Path) -> ServedModel:
    """Loads an adapter beside its base, between two steps of the engine; blocks until it is there.

    Raises ModelLoadError or UnsupportedModelError for a folder that is no adapter or does not fit, and then
    nothing has changed.
    """
    model_id = adapter_model_id(base, name)
    folder = folder.expanduser().absolute()
    loaded = base.engine.load_adapter(lambda: low_rank_changes(read_adapter(folder)))
    adapter_id = loaded.result()
    return replace(base, id=model_id, created=int(time.time()), adapter_id=adapter_id, parent=base.id)
