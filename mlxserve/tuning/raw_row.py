"""A row as a file has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What a file of UTF-8 may begin with."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """``value`` is None exactly when ``problem`` says why."""

    place: str
    value: dict[str, Any] | None
    problem: str = ""
