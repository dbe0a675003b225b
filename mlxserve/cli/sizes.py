"""Sizes in bytes as people write them on a command line."""

from __future__ import annotations

import re

import typer

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of "12G", "800M", "1.5GiB" or a plain number; K, M, G and T are powers of 1024.

    Raises typer.BadParameter, which typer completes with the option's name, for anything else and
    for zero.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise typer.BadParameter(f"{text!r} is not a size; write one like 12G, 800M or a number of bytes.")
    return size
