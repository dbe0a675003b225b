"""The real model, imported once a session, and a running engine on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from mlxserve.cli.model_source import prepare_model
from mlxserve.hub import BUILTIN_MODELS


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    if not BUILTIN_MODELS["smollm2"].is_pulled:
        pytest.skip("smollm2 is not in the cache: mlxserve pull smollm2")
    return prepare_model("smollm2", console=Console(stderr=True, quiet=True)).path
