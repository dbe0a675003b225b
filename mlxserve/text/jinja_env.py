"""The Jinja environment that chat templates are written for: sandboxed, with the names and filters
that the Hugging Face template format defines."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope keeps assignments inside the block, as in templates written for the original format.
        return nodes.Scope(body, lineno=line)


class RaisedByTemplateError(JinjaError):
    """The template called ``raise_exception``; the message is its own sentence."""


def _raise_exception(message: object) -> None:
    raise RaisedByTemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, unlike Jinja's own filter, which escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def chat_environment() -> ImmutableSandboxedEnvironment:
    """A fresh environment. Templates cannot change what they are given, nor reach Python's internals."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(functions)
    return environment
