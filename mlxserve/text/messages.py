"""Chat messages in the shape that templates expect, from the shapes that clients send.

``normalize_messages`` never changes its input. What it gives:

* ``role`` is one of ROLES; ``content`` is always a string (text parts joined with nothing between; null,
  missing and an empty list are an empty string);
* ``tool_calls`` is a non-empty list or absent; each call's ``function.arguments`` is a mapping ("" and
  null are ``{}``). Text that is no JSON object stays as the raw string, so that one bad old call does not
  end a session (``with_mapped_arguments`` is for templates that insist on a mapping);
* other keys (``name``, ``tool_call_id``, ``reasoning_content``) pass through.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
RAW_ARGUMENTS_KEY = "raw_arguments"
"""Where ``with_mapped_arguments`` keeps the text of arguments that are no JSON object."""

Message = dict[str, Any]


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Raises InvalidRequestError whose ``param`` is "messages" or a place in it."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError(f"messages must be a list, not {json_kind(messages)}", param="messages")
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def last_user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last user message as the client sent it, parts joined; "" when there is none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "user":
            return _text(messages[index].get("content"), f"messages[{index}]")
    return ""


def with_mapped_arguments(messages: Sequence[Message]) -> list[Message]:
    """Normalized messages with every raw argument text put into a mapping, under RAW_ARGUMENTS_KEY."""
    mapped = copy.deepcopy(list(messages))
    for message in mapped:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                call["function"]["arguments"] = {RAW_ARGUMENTS_KEY: arguments}
    return mapped


def _message(message: Mapping[str, Any], place: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{place} must be an object, not {json_kind(message)}", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            f"{place}.role must be one of {', '.join(ROLES)}, not {json.dumps(role, default=str)}",
            param="messages",
        )
    result: Message = copy.deepcopy({key: value for key, value in message.items() if value is not None})
    result["content"] = _text(message.get("content"), place)
    calls = result.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list | tuple):
        raise InvalidRequestError(
            f"{place}.tool_calls must be a list, not {json_kind(calls)}", param="messages"
        )
    if calls:
        if role != "assistant":
            raise InvalidRequestError(
                f"{place}.tool_calls belongs to the assistant, not to {role}", param="messages"
            )
        result["tool_calls"] = [_call(call, f"{place}.tool_calls[{j}]") for j, call in enumerate(calls)]
    return result


def _text(content: object, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_part(part, f"{place}.content[{i}]") for i, part in enumerate(content))
    raise InvalidRequestError(
        f"{place}.content must be a string or a list of parts, not {json_kind(content)}", param="messages"
    )


def _part(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{place} must be an object, not {json_kind(part)}", param="messages")
    kind = part.get("type")
    key = {"text": "text", "refusal": "refusal"}.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise InvalidRequestError(
            f"{place}: this model takes text only, not a part of type {json.dumps(kind, default=str)}",
            param="messages",
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{place}.{key} must be a string, not {json_kind(text)}", param="messages")
    return text


def _call(call: object, place: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequestError(f"{place}.function must be an object", param=place)
    if not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{place}.function.name must be a string", param=place)
    arguments = _arguments(function.get("arguments"), place)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: object, place: str) -> Mapping[str, Any] | str:
    if arguments is None or isinstance(arguments, Mapping):
        return arguments or {}
    if not isinstance(arguments, str):
        raise InvalidRequestError(
            f"{place}.function.arguments must be a JSON string or an object, not {json_kind(arguments)}",
            param=place,
        )
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def json_kind(value: object) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an object" if isinstance(value, Mapping) else "a list"
