"""Tests marked ``real`` run SmolLM2 end to end; where its file was not pulled they are skipped by name."""

from __future__ import annotations

import pytest

from mlxserve.hub import BUILTIN_MODELS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernel-report", action="store_true", help="end with a table of the Metal kernels that were run"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if BUILTIN_MODELS["smollm2"].is_pulled:
        return
    skip = pytest.mark.skip(reason="smollm2 is not in the cache: mlxserve pull smollm2")
    for item in items:
        if item.get_closest_marker("real"):
            item.add_marker(skip)
