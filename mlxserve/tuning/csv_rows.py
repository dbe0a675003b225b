"""Rows of tables in text."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from typing import IO

from mlxserve.tuning.raw_row import BYTE_ORDER_MARK, RawRow


def read_csv(file: IO[bytes], name: str, delimiter: str) -> Iterator[RawRow]:
    """The first record names the fields. A record may span lines; its place is its first line."""
    csv.field_size_limit(1 << 30)
    reader = csv.reader(_csv_lines(file), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        place = f"{name}:{reader.line_num + 1}"
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # Where this record ends is anyone's guess, so nothing after it can be read.
            yield RawRow(place, None, f"is not valid CSV: {error}; the rest of the file was not read")
            return
        if not record:
            continue
        if names is None:
            problem = _header_problem(record)
            if problem:
                yield RawRow(place, None, problem)
                return
            names = record
            continue
        yield _csv_row(place, names, record)


def _csv_lines(file: IO[bytes]) -> Iterator[str]:
    """Bytes that are no UTF-8 become lone surrogates, which are looked for in the record."""
    for number, line in enumerate(file):
        yield (line.removeprefix(BYTE_ORDER_MARK) if number == 0 else line).decode("utf-8", "surrogateescape")


def _header_problem(names: Sequence[str]) -> str:
    if any(_bad_bytes(name) for name in names):
        return "the header is not UTF-8: save the file as UTF-8"
    twice = sorted({name for name in names if names.count(name) > 1})
    return f"the header names {twice[0]!r} twice" if twice else ""


def _csv_row(place: str, names: Sequence[str], record: Sequence[str]) -> RawRow:
    if len(record) != len(names):
        return RawRow(place, None, f"has {len(record)} fields, the header names {len(names)}")
    for name, value in zip(names, record, strict=True):
        bad = _bad_bytes(value)
        if bad:
            return RawRow(place, None, f"{name} is not UTF-8: byte 0x{bad:02x}")
    return RawRow(place, dict(zip(names, record, strict=True)))


def _bad_bytes(text: str) -> int:
    """The first byte that was no UTF-8, 0 if there is none."""
    return next((ord(char) - 0xDC00 for char in text if "\udc80" <= char <= "\udcff"), 0)
