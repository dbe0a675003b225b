"""Sizes in bytes as people write them on a command line."""

from __future__ import annotations

import re

from mlxserve.errors import UsageError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str, *, option: str) -> int:
    """Bytes of "12G", "800M", "1.5GiB" or a plain number; K, M, G and T are powers of 1024.

    Raises UsageError naming ``option`` for anything else, zero included.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise UsageError(f"{option} must be a size such as 12G, 800M or a number of bytes, not {text!r}")
    return size
