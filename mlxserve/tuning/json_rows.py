"""Rows of JSON files, each with its line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any

from mlxserve.tuning.raw_row import BYTE_ORDER_MARK, RawRow

_OTHER_MARKS = (b"\xff\xfe", b"\xfe\xff")
_SHAPE = "must be a list of objects, or an object with the list data"


def _decoded(line: bytes) -> str:
    """Raises ValueError with the place of the fault in the line."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        if line.startswith(_OTHER_MARKS):
            raise ValueError("is UTF-16, not UTF-8: save the file as UTF-8") from None
        raise ValueError(
            f"is not UTF-8: byte 0x{line[error.start]:02x} in column {error.start + 1}"
        ) from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON: {error.msg} in column {error.colno}") from None
    except RecursionError:
        raise ValueError("is not valid JSON: nested too deeply") from None


def read_jsonl(file: IO[bytes], name: str) -> Iterator[RawRow]:
    for number, line in enumerate(file, start=1):
        place = f"{name}:{number}"
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line.strip():
            continue
        try:
            yield RawRow(place, _object(_loads(_decoded(line))))
        except ValueError as error:
            yield RawRow(place, None, str(error))
            if number == 1 and line.startswith(_OTHER_MARKS):
                return


def read_json(file: IO[bytes], name: str) -> Iterator[RawRow]:
    """A list of objects, or an object whose ``data`` is one. Lines of objects are read as .jsonl is."""
    content = file.read()
    try:
        text = _decoded(content.removeprefix(BYTE_ORDER_MARK))
    except ValueError:
        line = content.count(b"\n", 0, _first_fault(content)) + 1
        yield RawRow(f"{name}:{line}", None, "is not UTF-8: save the file as UTF-8")
        return
    yield from _JsonText(text, name).rows()


def _first_fault(content: bytes) -> int:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return len(content)


class _JsonFaultError(Exception):
    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position
        self.reason = reason


class _JsonText:
    """Walks the elements of the one list, to know the line of each."""

    _SPACE = re.compile(r"[ \t\r\n]*")

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._decoder = json.JSONDecoder()
        self._counted_to, self._line = 0, 1

    def rows(self) -> Iterator[RawRow]:
        try:
            start = self._skip(0)
            if self._text[start : start + 1] == "{":
                value, end = self._value(start)
                if self._skip(end) < len(self._text):
                    yield from self._lines()
                    return
                if not isinstance(value.get("data"), list):
                    raise _JsonFaultError(start, _SHAPE)
                start = self._start_of_data(start)
            elif self._text[start : start + 1] != "[":
                raise _JsonFaultError(start, _SHAPE)
            yield from self._elements(start)
        except _JsonFaultError as fault:
            yield RawRow(f"{self._name}:{self._line_at(fault.position)}", None, fault.reason)

    def _lines(self) -> Iterator[RawRow]:
        for number, line in enumerate(self._text.split("\n"), start=1):
            if line.strip():
                try:
                    yield RawRow(f"{self._name}:{number}", _object(_loads(line)))
                except ValueError as error:
                    yield RawRow(f"{self._name}:{number}", None, str(error))

    def _elements(self, start: int) -> Iterator[RawRow]:
        position = self._skip(start + 1)
        if self._text[position : position + 1] == "]":
            return
        while True:
            value, end = self._value(position)
            place = f"{self._name}:{self._line_at(position)}"
            if isinstance(value, dict):
                yield RawRow(place, value)
            else:
                yield RawRow(place, None, "is not a JSON object")
            end = self._skip(end)
            if self._text[end : end + 1] == "]":
                return
            if self._text[end : end + 1] != ",":
                raise _JsonFaultError(end, "is not valid JSON: expected , or ] after an element")
            position = self._skip(end + 1)

    def _start_of_data(self, start: int) -> int:
        """Where the list of the last key ``data`` begins, in an object that is known to be valid."""
        position, found = self._skip(start + 1), start
        while True:
            key, end = self._value(position)
            position = self._skip(self._skip(end) + 1)
            if key == "data":
                found = position
            _, end = self._value(position)
            position = self._skip(end)
            if self._text[position] == "}":
                return found
            position = self._skip(position + 1)

    def _skip(self, position: int) -> int:
        match = self._SPACE.match(self._text, position)
        assert match is not None
        return match.end()

    def _value(self, position: int) -> tuple[Any, int]:
        try:
            return self._decoder.raw_decode(self._text, position)
        except json.JSONDecodeError as error:
            raise _JsonFaultError(
                error.pos, f"is not valid JSON: {error.msg} in column {error.colno}"
            ) from None
        except RecursionError:
            raise _JsonFaultError(position, "is not valid JSON: nested too deeply") from None

    def _line_at(self, position: int) -> int:
        """Lines are counted on from the last place that was asked for."""
        if position < self._counted_to:
            self._counted_to, self._line = 0, 1
        self._line += self._text.count("\n", self._counted_to, position)
        self._counted_to = position
        return self._line
