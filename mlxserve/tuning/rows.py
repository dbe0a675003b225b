"""Rows of training data: what a file's row means, told from its fields.

    messages             a conversation, with ``tools`` where it has them; also ShareGPT's ``conversations``
    prompt, completion   two texts, or two lists of messages
    text                 text that is trained on as it is

The kind of a data set is that of its first row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlxserve.text.messages import json_kind

RowKind = Literal["messages", "prompt/completion", "text"]

_SHAREGPT_FIELD = "conversations"
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}


class BadRowError(Exception):
    """A row that cannot be trained on. ``str(error)`` is the reason, on one line."""


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names of the fields; None for the usual one. A name that is given also decides the kind."""

    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    tools: str | None = None


@dataclass(frozen=True, slots=True)
class ChatRow:
    """``messages`` are as the row has them; only the chat template knows what it accepts."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class CompletionRow:
    prompt: str
    completion: str
    tools: list[dict[str, Any]] | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": self.prompt},
            {"role": "assistant", "content": self.completion},
        ]


@dataclass(frozen=True, slots=True)
class TextRow:
    text: str


Row = ChatRow | CompletionRow | TextRow


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads rows of one kind. ``read`` raises BadRowError."""

    kind: RowKind
    fields: FieldNames

    def read(self, value: Mapping[str, Any]) -> Row:
        if self.kind == "text":
            return TextRow(_filled_text(value, self.fields.text or "text"))
        tools = _tools(value, self.fields.tools)
        if self.kind == "messages":
            return ChatRow(_messages(value, self._messages_field), tools)
        prompt_field, completion_field = _pair(self.fields)
        prompt, completion = _present(value, prompt_field), _present(value, completion_field)
        if isinstance(prompt, list) and isinstance(completion, list):
            turns = [*_turns(prompt, prompt_field), *_turns(completion, completion_field)]
            return ChatRow(turns, tools)
        return CompletionRow(_text(prompt, prompt_field), _text(completion, completion_field), tools)

    @property
    def _messages_field(self) -> str:
        return self.fields.messages or "messages"


def make_reader(first: Mapping[str, Any], fields: FieldNames) -> RowReader:
    """The reader for a data set that begins with ``first``; BadRowError when nothing fits it."""
    asked = _asked_kind(fields)
    if asked is not None:
        return RowReader(asked, fields)
    prompt, completion = _pair(fields)
    if prompt in first and completion in first:
        return RowReader("prompt/completion", fields)
    if "messages" in first:
        return RowReader("messages", fields)
    if _SHAREGPT_FIELD in first:
        return RowReader("messages", FieldNames(messages=_SHAREGPT_FIELD, tools=fields.tools))
    if "text" in first:
        return RowReader("text", fields)
    found = ", ".join(map(str, first)) or "nothing"
    raise BadRowError(
        f"has no field messages, text, or prompt and completion; it has {found} "
        "(--messages-field, --text-field, --prompt-field and --completion-field name others)"
    )


def asked_kinds(fields: FieldNames) -> set[RowKind]:
    """The kinds that named fields stand for; more than one cannot be."""
    kinds: set[RowKind] = set()
    if fields.messages is not None:
        kinds.add("messages")
    if fields.prompt is not None or fields.completion is not None:
        kinds.add("prompt/completion")
    if fields.text is not None:
        kinds.add("text")
    return kinds


def _asked_kind(fields: FieldNames) -> RowKind | None:
    return next(iter(asked_kinds(fields)), None)


def _pair(fields: FieldNames) -> tuple[str, str]:
    return fields.prompt or "prompt", fields.completion or "completion"


def _present(value: Mapping[str, Any], name: str) -> Any:
    if value.get(name) is None:
        state = "is null" if name in value else "is missing"
        raise BadRowError(f"{name} {state}")
    return value[name]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"{name} must be a string, not {json_kind(value)}")
    return value


def _filled_text(value: Mapping[str, Any], name: str) -> str:
    text = _text(_present(value, name), name)
    if not text:
        raise BadRowError(f"{name} is empty")
    return text


def _list(value: Any, name: str) -> list[Any]:
    """A list, or the JSON text of one: columns of a table hold texts."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRowError(f"{name} must be a list, or the JSON text of one") from None
    if not isinstance(value, list):
        raise BadRowError(f"{name} must be a list, not {json_kind(value)}")
    return value


def _messages(value: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return _turns(_list(_present(value, name), name), name)


def _turns(items: list[Any], name: str) -> list[dict[str, Any]]:
    if not items:
        raise BadRowError(f"{name} is empty")
    return [_turn(item, f"{name}[{index}]") for index, item in enumerate(items)]


def _turn(item: Any, name: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise BadRowError(f"{name} must be an object, not {json_kind(item)}")
    if "role" in item or "from" not in item or "value" not in item:
        # Columns of a table give every message every key.
        return {key: part for key, part in item.items() if part is not None}
    speaker = item["from"]
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        known = ", ".join(_SHAREGPT_ROLES)
        raise BadRowError(f"{name}.from must be one of {known}, not {json.dumps(speaker, default=str)}")
    return {"role": _SHAREGPT_ROLES[speaker], "content": _text(item["value"], f"{name}.value")}


def _tools(value: Mapping[str, Any], field: str | None) -> list[dict[str, Any]] | None:
    name = field or "tools"
    given = value.get(name)
    if given is None or given == "":
        return None
    tools = _list(given, name)
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise BadRowError(f"{name}[{index}] must be an object, not {json_kind(tool)}")
    return tools or None
