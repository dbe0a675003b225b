"""Limits that no engine can run with are refused by name."""

from __future__ import annotations

import pytest

from mlxserve.config import EngineConfig
from mlxserve.errors import UsageError


@pytest.mark.parametrize(
    ("field", "least"),
    [
        ("max_running", 1),
        ("max_waiting", 0),
        ("page_size", 1),
        ("max_step_tokens", 1),
        ("memory_limit", 1),
        ("kv_pages", 1),
    ],
)
def test_a_limit_has_a_least_value(field: str, least: int) -> None:
    EngineConfig(**{field: least})
    with pytest.raises(UsageError, match=f"^{field} must be at least {least}, not {least - 1}$"):
        EngineConfig(**{field: least - 1})
