"""Hermes tool calls: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number, in any text.

* A closing tag inside a JSON string is part of the string.
* Whitespace next to a call is dropped, all other text is content.
* A complete block that is no call (broken JSON, no name) is content, tags and all.
* A model that ends its turn without the closing tag has still made the call, if it is whole.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from mlxserve.text.tool_events import ContentDelta, ToolCall, ToolEvent

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class HermesParser:
    """Incremental and linear: every character is looked at a fixed number of times."""

    __slots__ = ("_after_call", "_body", "_held", "_in_call", "_in_string", "_is_escaped", "_tail")

    def __init__(self) -> None:
        self._held = ""  # content that may yet be dropped or become a tag: whitespace, then a tag's beginning
        self._after_call = False
        self._enter_content()

    def push(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        while text:
            text = self._push_call(text, events) if self._in_call else self._push_content(text, events)
        return events

    def finish(self, cut: bool) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        while self._in_call:
            body = "".join(self._body)
            call = None if cut else _read_call(body)
            if call is not None:
                self._enter_content()
                self._after_call, self._held = True, ""
                return [*events, call]
            # A stray quote can hide a closing tag: what ends there is a broken block, and the rest is text.
            block, closing, rest = body.partition(_CLOSE)
            if not closing and cut:
                self._enter_content()
                return events
            self._enter_content()
            self._emit(f"{_OPEN}{block}{closing}", events)
            events += self.push(rest)
        held, self._held = self._held, ""
        spaces, tag = _split_spaces(held)
        if tag and cut:
            tag = ""
        if (spaces and not self._after_call) or tag:
            events.append(ContentDelta(("" if self._after_call else spaces) + tag))
        return events

    def _enter_content(self) -> None:
        self._in_call = False
        self._body: list[str] = []
        self._tail = ""
        self._in_string = self._is_escaped = False

    def _push_content(self, text: str, events: list[ToolEvent]) -> str:
        seen = self._held + text
        start = seen.find(_OPEN)
        if start >= 0:
            self._held = ""
            self._emit(seen[:start].rstrip(), events)
            self._in_call = True
            return seen[start + len(_OPEN) :]
        sure = len(seen) - _tag_beginning(seen)
        sure = len(seen[:sure].rstrip())
        self._held = seen[sure:]
        self._emit(seen[:sure], events)
        return ""

    def _push_call(self, text: str, events: list[ToolEvent]) -> str:
        for index, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif char == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._is_escaped = char == "\\"
            self._tail = (self._tail + char)[-len(_CLOSE) :]
            if self._tail == _CLOSE and not self._in_string:
                body = ("".join(self._body) + text[: index + 1])[: -len(_CLOSE)]
                self._close_call(body, events)
                return text[index + 1 :]
        self._body.append(text)
        return ""

    def _close_call(self, body: str, events: list[ToolEvent]) -> None:
        self._enter_content()
        call = _read_call(body)
        if call is None:
            self._emit(f"{_OPEN}{body}{_CLOSE}", events)
        else:
            events.append(call)
            self._after_call = True

    def _emit(self, text: str, events: list[ToolEvent]) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            events.append(ContentDelta(text))
            self._after_call = False


def _tag_beginning(text: str) -> int:
    """Length of the longest end of ``text`` that begins the opening tag."""
    return next((n for n in range(min(len(_OPEN) - 1, len(text)), 0, -1) if text.endswith(_OPEN[:n])), 0)


def _split_spaces(held: str) -> tuple[str, str]:
    tag = held.lstrip()
    return held[: len(held) - len(tag)], tag


def _read_call(body: str) -> ToolCall | None:
    call = _read_object(body)
    name = call.get("name") if call is not None else None
    if call is None or not isinstance(name, str) or not name:
        return None
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = _read_object(arguments or "{}")
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _read_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
