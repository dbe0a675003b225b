"""Tool calls out of streamed text, by the format that the model's template writes them in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from mlxserve.errors import UsageError
from mlxserve.text.hermes_parser import HermesParser
from mlxserve.text.tool_events import ContentDelta, ToolCall, ToolEvent, ToolParser

__all__ = [
    "TOOL_FORMATS",
    "ContentDelta",
    "ToolCall",
    "ToolEvent",
    "ToolParser",
    "detect_tool_format",
    "tool_parser_for",
]

# The tag, then a JSON object. In the source of a template the newline and the quotes may be escaped, and an
# expression may end and another begin in between.
_HERMES_CALL = re.compile(r"""<tool_call>(?:\\n|\s|["'+~-]|\{\{|\}\})*\{\\?["']""")

_PARSERS: Mapping[str, Callable[[], ToolParser]] = {"hermes": HermesParser}
TOOL_FORMATS = tuple(_PARSERS)
"""Names that ``tool_parser_for`` takes."""


def tool_parser_for(format_name: str) -> ToolParser:
    """A fresh parser. Raises UsageError, listing the formats, for a name that has none."""
    if format_name not in _PARSERS:
        raise UsageError(f"no parser for tool format {format_name!r}; there is: {', '.join(TOOL_FORMATS)}")
    return _PARSERS[format_name]()


def detect_tool_format(template_source: str) -> str | None:
    """The format in which a template itself writes calls; None when it writes none that can be read."""
    if "<function=" not in template_source and _HERMES_CALL.search(template_source):
        return "hermes"
    return None
