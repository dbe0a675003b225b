"""Request bodies to wire types; whatever is wrong with them becomes one InvalidRequestError."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from mlxserve.errors import InvalidRequestError, UnsupportedFieldError

T = TypeVar("T")

_MAX_SHOWN = 60
_JSON_NAMES = {
    "int": "integer",
    "float": "number",
    "str": "string",
    "bool": "boolean",
    "dict": "object",
    "null": "null",
}
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"^Object missing required field `(?P<name>.*)`$")
_WRONG_TYPE = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `[^`]*`$")
_OUT_OF_LIMIT = re.compile(r"^Expected `(?P<expected>[^`]*)` (?P<limit>[<>].*)$")
_ITEM = re.compile(r"(\[\d+\])+$")
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")


def decode_body(body: bytes, wire_type: type[T]) -> T:
    """The body as ``wire_type``."""
    try:
        return msgspec.json.decode(body, type=wire_type)
    except msgspec.ValidationError as error:
        raise _explain(str(error), _decode_untyped(body)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is no valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply", code="invalid_json") from None


def convert_field(value: object, wire_type: type[T], field: str) -> T:
    """An already decoded part of the body, which lies at ``field``, as ``wire_type``."""
    try:
        return msgspec.convert(value, wire_type)
    except msgspec.ValidationError as error:
        raise _explain(str(error), value, root=field) from None


def refuse_unsupported(fields: Any, neutral_values: Mapping[str, tuple[Any, ...]], place: str = "") -> None:
    """Raise for the first field of a wire struct that asks for something we do not have.

    ``neutral_values`` lists for each such field what, beside null, asks for nothing.
    """
    for name, neutral in neutral_values.items():
        value = getattr(fields, name, None)
        if value is None or any(type(value) is type(other) and value == other for other in neutral):
            continue
        accepted = ", ".join(["null", *(_shown(other) for other in neutral)])
        raise UnsupportedFieldError(
            f"{place}{name} is not supported by this version: it may be {accepted}, not {_shown(value)}",
            param=f"{place}{name}",
        )


def _decode_untyped(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None


def _explain(message: str, value: object, root: str = "") -> InvalidRequestError:
    """msgspec's sentence as an error of ours, with place and given value; ``param`` is the field, without
    the index of an item in it."""
    match = _PLACE.match(message)
    assert match is not None
    what, path = match["what"], (match["path"] or "$").removeprefix("$")
    place = (root + path).removeprefix(".").replace("[...]", "")
    if unknown := _UNKNOWN_FIELD.match(what):
        name = f"{place}.{unknown['name']}".removeprefix(".")
        return UnsupportedFieldError(f"unknown field: {name}", param=name)
    if missing := _MISSING_FIELD.match(what):
        name = f"{place}.{missing['name']}".removeprefix(".")
        return InvalidRequestError(f"{name} is required", param=name, code="missing_required_parameter")
    given = _shown(_find(value, path))
    subject = place or "the body"
    param = _ITEM.sub("", place) or None
    if wrong := _WRONG_TYPE.match(what):
        expected = " or ".join(_JSON_NAMES.get(name, name) for name in wrong["expected"].split(" | "))
        return InvalidRequestError(
            f"{subject} must be of type {expected}, not {given}", param=param, code="invalid_type"
        )
    if limit := _OUT_OF_LIMIT.match(what):
        return InvalidRequestError(f"{subject} must be {limit['limit']}, not {given}", param=param)
    return InvalidRequestError(f"{subject}: {what[:1].lower()}{what[1:]}", param=param)


def _find(value: Any, path: str) -> object:
    """The value at msgspec's path; of a mapping's ``[...]``, which names no key, the whole mapping."""
    for step in _STEP.finditer(path):
        key, index = step["key"], step["index"]
        if key is not None and isinstance(value, dict):
            value = value.get(key)
        elif index is not None and index.isdigit() and isinstance(value, list):
            value = value[int(index)]
    return value


def _shown(value: object) -> str:
    """The value as JSON, shortened."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
