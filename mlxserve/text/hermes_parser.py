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

    __slots__ = (
        "_after_call",
        "_body",
        "_held",
        "_in_call",
        "_in_string",
        "_is_escaped",
        "_reads_strings",
        "_spaces",
        "_tail",
    )

    def __init__(self) -> None:
        self._reads_strings = True
        self._held = ""  # the beginning of an opening tag, perhaps
        self._spaces: list[str] = []  # whitespace that is dropped should a call come next
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
            block, closing, rest = body.partition(_CLOSE)
            call = None if cut else _read_call(body)
            self._enter_content()
            if call is not None:
                self._emit_call(call, events)
            elif closing or not cut:
                # A stray quote can hide a closing tag: what ends there is a broken block, and the rest is
                # read once more, by tags alone.
                self._reads_strings = False
                self._emit(f"{_OPEN}{block}{closing}", events)
                events += self.push(rest)
            else:
                return events
        if not cut:
            self._emit(self._held, events)
        if self._spaces and not (cut and self._held):
            events.append(ContentDelta("".join(self._spaces)))
        return events

    def _enter_content(self) -> None:
        self._in_call = False
        self._body: list[str] = []
        self._tail = ""
        self._in_string = self._is_escaped = False

    def _push_content(self, text: str, events: list[ToolEvent]) -> str:
        seen = self._held + text
        start = seen.find(_OPEN)
        self._in_call = start >= 0
        sure = start if self._in_call else len(seen) - _tag_beginning(seen)
        self._emit(seen[:sure], events)
        self._held = "" if self._in_call else seen[sure:]
        return seen[start + len(_OPEN) :] if self._in_call else ""

    def _push_call(self, text: str, events: list[ToolEvent]) -> str:
        for index, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif char == '"' and self._reads_strings:
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
            self._emit_call(call, events)

    def _emit_call(self, call: ToolCall, events: list[ToolEvent]) -> None:
        events.append(call)
        self._after_call = True
        self._spaces.clear()

    def _emit(self, text: str, events: list[ToolEvent]) -> None:
        if self._after_call:
            text = text.lstrip()
        kept = text.rstrip()
        if kept:
            events.append(ContentDelta("".join(self._spaces) + kept))
            self._spaces.clear()
            self._after_call = False
        if len(kept) < len(text):
            self._spaces.append(text[len(kept) :])


def _tag_beginning(text: str) -> int:
    """Length of the longest end of ``text`` that begins the opening tag."""
    return next((n for n in range(min(len(_OPEN) - 1, len(text)), 0, -1) if text.endswith(_OPEN[:n])), 0)


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
