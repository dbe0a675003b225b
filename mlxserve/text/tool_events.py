"""What tool parsers give, and the interface that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text for the user; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call. ``arguments`` is the JSON text of an object."""

    name: str
    arguments: str


ToolEvent = ContentDelta | ToolCall


class ToolParser(Protocol):
    """One a text. The events, with neighbouring deltas joined, do not depend on how the text is split."""

    def push(self, text: str) -> list[ToolEvent]: ...

    def finish(self, cut: bool) -> list[ToolEvent]:
        """The rest, once, at the end. ``cut`` says that a limit ended the text, not the model: then an
        unfinished call, or an unfinished opening tag, is left out."""
        ...
