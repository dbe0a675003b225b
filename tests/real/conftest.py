"""The real model, imported once a session, and a running engine on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from mlxserve.cli.model_source import prepare_model
from mlxserve.hub import BUILTIN_MODELS
from tests.real.numpy_reference import NumpyModel


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    return _imported("smollm2")


@pytest.fixture(scope="session")
def gemma3_folder() -> Path:
    return _imported("gemma3-270m")


def _imported(name: str) -> Path:
    if not BUILTIN_MODELS[name].is_pulled:
        pytest.skip(f"{name} is not in the cache: mlxserve pull {name}")
    return prepare_model(name, console=Console(stderr=True, quiet=True)).path


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_folder: Path) -> NumpyModel:
    return NumpyModel(BUILTIN_MODELS["smollm2"].path)


@pytest.fixture(scope="module")
def gemma3_reference(gemma3_folder: Path) -> NumpyModel:
    return NumpyModel(BUILTIN_MODELS["gemma3-270m"].path)
