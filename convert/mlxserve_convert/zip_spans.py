"""The entries of a zip archive as spans of its file, for archives that compress nothing.

Only the central directory and the head of each entry are read (PKWARE, APPNOTE.TXT 6.3.10, sections 4.3 to
4.5), so that a hostile archive costs no more than its directory.
"""

from __future__ import annotations

import struct
from typing import Any

from mlxserve_convert.mapped_file import MappedFile

Span = tuple[int, int]
"""Offset and length in bytes."""

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_HEAD = struct.Struct("<4s5H3L2H")
_MAX_COMMENT = (1 << 16) - 1
_MAX_ENTRIES = 1 << 20
_NOT_HERE = (1 << 32) - 1
_EXTRA_64 = 1
_IS_ENCRYPTED = 1


class ZipError(ValueError):
    """What an archive has that is damaged or not stored as it is; one line."""


def zip_spans(file: MappedFile) -> dict[str, Span]:
    """Where each entry's bytes lie."""
    count, at, end = _directory(file)
    if count > _MAX_ENTRIES:
        raise ZipError(f"is a zip archive of {count} entries, at most {_MAX_ENTRIES} are read")
    spans: dict[str, Span] = {}
    for _ in range(count):
        if at + _ENTRY.size > end:
            raise ZipError(
                f"is a damaged zip archive: its directory ends after {len(spans)} of {count} entries"
            )
        name, offset, length, at = _entry(file, at, end)
        if name in spans:
            raise ZipError(f"is a zip archive with {name[:80]} twice")
        spans[name] = (_start(file, name, offset, length), length)
    return spans


def _fields(file: MappedFile, form: struct.Struct, at: int, magic: bytes) -> tuple[Any, ...]:
    if at < 0 or at + form.size > len(file):
        raise ZipError("is a damaged or truncated zip archive")
    fields = form.unpack(file.span(at, form.size).tobytes())
    if fields[0] != magic:
        raise ZipError(f"is a damaged zip archive: byte {at} does not begin what its directory says")
    return fields


def _directory(file: MappedFile) -> tuple[int, int, int]:
    """How many entries there are, and the bytes at which their list begins and ends."""
    length = min(len(file), _END.size + _MAX_COMMENT)
    tail = file.span(len(file) - length, length).tobytes()
    found = tail.rfind(b"PK\x05\x06")
    if found < 0:
        raise ZipError("is a truncated zip archive: it has no directory")
    at = len(file) - length + found
    _, _, _, _, count, size, begin, _ = _fields(file, _END, at, b"PK\x05\x06")
    locator = at - _LOCATOR.size
    if locator >= 0 and file.span(locator, 4).tobytes() == b"PK\x06\x07":
        at = _fields(file, _LOCATOR, locator, b"PK\x06\x07")[2]
        *_, count, size, begin = _fields(file, _END_64, at, b"PK\x06\x06")
    if begin + size > at:
        raise ZipError("is a damaged zip archive: its directory reaches over its end")
    return count, begin, begin + size


def _entry(file: MappedFile, at: int, end: int) -> tuple[str, int, int, int]:
    """Name, head, length, and where the next entry is."""
    (_, _, _, flags, method, _, _, _, packed, length, names, extras, comments, _, _, _, offset) = _fields(
        file, _ENTRY, at, b"PK\x01\x02"
    )
    at += _ENTRY.size
    if at + names + extras + comments > end:
        raise ZipError("is a damaged zip archive: an entry reaches over the directory")
    name = file.span(at, names).tobytes().decode("utf-8", "replace")
    wide = _wide_numbers(file.span(at + names, extras).tobytes())
    length, packed, offset = (
        next(wide, number) if number == _NOT_HERE else number for number in (length, packed, offset)
    )
    if method != 0 or packed != length or flags & _IS_ENCRYPTED:
        raise ZipError(f"holds {name[:80]} compressed or encrypted, which torch.save does not do")
    return name, offset, length, at + names + extras + comments


def _wide_numbers(extras: bytes) -> Any:
    """The numbers of 64 bits that did not fit into an entry, in their order."""
    at = 0
    while at + 4 <= len(extras):
        kind, length = struct.unpack_from("<HH", extras, at)
        at += 4
        if kind == _EXTRA_64:
            part = extras[at : at + length]
            yield from (number for (number,) in struct.iter_unpack("<Q", part[: len(part) // 8 * 8]))
            return
        at += length


def _start(file: MappedFile, name: str, offset: int, length: int) -> int:
    """The first byte of an entry: its head repeats the name, with extra fields of another length."""
    *_, names, extras = _fields(file, _HEAD, offset, b"PK\x03\x04")
    start = offset + _HEAD.size + names + extras
    if start + length > len(file):
        raise ZipError(f"is truncated: {name[:80]} ends at byte {start + length}, the file has {len(file)}")
    return int(start)
