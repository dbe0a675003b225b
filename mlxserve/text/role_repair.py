"""Other arrangements of the same turns, for templates that are strict about roles.

Nothing is dropped and no text is moved before another: turns are renamed and joined, with a blank line
between the texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlxserve.text.messages import Message, with_mapped_arguments

SEPARATOR = "\n\n"


def developer_as_system(messages: Sequence[Message]) -> list[Message]:
    return [_renamed(message, "developer", "system") for message in messages]


def arrangements(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The messages as they are, then ever stronger repairs, each different from those before."""
    seen: list[list[Message]] = []
    for arranged in _repairs(list(messages)):
        if arranged not in seen:
            seen.append(arranged)
            yield arranged
            mapped = with_mapped_arguments(arranged)
            if mapped != arranged:
                yield mapped


def _repairs(messages: list[Message]) -> Iterator[list[Message]]:
    yield messages
    yield join_same_roles(messages)
    head = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    later_folded = messages[:head] + [_renamed(m, "system", "user") for m in messages[head:]]
    yield join_same_roles(later_folded)
    yield fold_system(messages)


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """System text becomes part of the user turn that it precedes, or a user turn where none follows."""
    return join_same_roles([_renamed(message, "system", "user") for message in messages])


def join_same_roles(messages: Sequence[Message]) -> list[Message]:
    """Consecutive turns of one role as one turn. Tool results stay apart, and so do turns with calls."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last and last["role"] == message["role"] != "tool" and "tool_calls" not in last:
            texts = [text for text in (last["content"], message["content"]) if text]
            joined[-1] = {**last, **message, "content": SEPARATOR.join(texts)}
        else:
            joined.append(message)
    return joined


def _renamed(message: Message, old: str, new: str) -> Message:
    return {**message, "role": new} if message["role"] == old else message
