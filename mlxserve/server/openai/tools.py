"""The tools of a chat request: checked, and handed to the template as they were given."""

from __future__ import annotations

from typing import Any

from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import InvalidRequestError, UnsupportedFieldError
from mlxserve.server.openai.decode import convert_field, refuse_unsupported
from mlxserve.server.openai.schema import NEUTRAL_FUNCTION_VALUES, ChatRequest, Tool

_CHOICES = ("auto", "none")


def checked_tools(body: ChatRequest, model: ServedModel) -> list[dict[str, Any]] | None:
    """The tools to render and to parse calls of; None when there are none or ``tool_choice`` is "none"."""
    if body.tool_choice is not None and body.tool_choice not in _CHOICES:
        raise UnsupportedFieldError(
            f"tool_choice may be {' or '.join(_CHOICES)} in this version, not {body.tool_choice!r}",
            param="tool_choice",
        )
    if not body.tools:
        return None
    seen: set[str] = set()
    for index, raw in enumerate(body.tools):
        tool = convert_field(raw, Tool, f"tools[{index}]")
        refuse_unsupported(tool.function, NEUTRAL_FUNCTION_VALUES, f"tools[{index}].function.")
        if tool.function.name in seen:
            raise InvalidRequestError(
                f"tools[{index}].function.name: {tool.function.name!r} is there twice",
                param=f"tools[{index}].function.name",
            )
        seen.add(tool.function.name)
    if body.tool_choice == "none":
        return None
    if model.tool_format is None:
        raise UnsupportedFieldError(
            f"tools: the chat template of {model.id!r} has no tool call format that this version knows",
            param="tools",
        )
    return body.tools
