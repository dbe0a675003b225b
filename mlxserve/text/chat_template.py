"""Chat templates: messages in, one prompt out, or an error in the template's own words."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError as JinjaError
from jinja2.exceptions import TemplateSyntaxError, UndefinedError
from jinja2.meta import find_undeclared_variables

from mlxserve.errors import InvalidRequestError, ModelLoadError, TemplateError
from mlxserve.text.jinja_env import RaisedByTemplateError, chat_environment
from mlxserve.text.messages import Message, normalize_messages
from mlxserve.text.rendered import ControlPattern, Marks, RenderedPrompt
from mlxserve.text.role_repair import arrangements, developer_as_system
from mlxserve.text.template_source import find_template_source

if TYPE_CHECKING:
    from mlxserve.text.folder_tokenizer import FolderTokenizer

# What a template's expressions can raise for messages that it does not expect.
_RENDER_ERRORS = (
    JinjaError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_PROBE = "system-text-probe-"
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


@cache
def _builtin(name: str) -> str:
    return resources.files("mlxserve.text").joinpath(f"templates/{name}.jinja").read_text("utf-8")


BUILTIN_TEMPLATES: Mapping[str, str] = {"chatml": _builtin("chatml")}
"""Template sources by name. ``chatml`` renders tools and tool calls in Hermes form."""


class _Compiled:
    """One template text, compiled, and how it is given one conversation."""

    def __init__(self, source: str) -> None:
        environment = chat_environment()
        try:
            self._variables = find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelLoadError(
                f"chat template, line {error.lineno}: {_one_line(error.message or '')}"
            ) from None
        except RecursionError:
            raise ModelLoadError("chat template: nested too deeply") from None
        self.source = source

    def render_arranged(self, turns: Sequence[Message], context: Mapping[str, Any]) -> str:
        """The first arrangement that renders with all system text in it, else the first that renders of a
        template that writes system text in its own way (without a switch like /think, say).

        Raises TemplateError when none renders, or when system text would be lost.
        """
        first_error: Exception | None = None
        incomplete: str | None = None
        for arranged in arrangements(turns):
            try:
                text = self._render(arranged, context)
            except _RENDER_ERRORS as error:
                first_error = first_error or error
                continue
            if self._keeps_system_text(text, arranged, turns, context):
                return text
            incomplete = text if incomplete is None else incomplete
        if incomplete is not None:
            if self._rewrites_system_text(turns, context):
                return incomplete
            raise TemplateError("the chat template leaves out the text of a system message", param="messages")
        raise TemplateError(_sentence(first_error), param="messages") from None

    def _keeps_system_text(
        self, text: str, arranged: Sequence[Message], turns: Sequence[Message], context: Mapping[str, Any]
    ) -> bool:
        """Whether the system text of ``turns`` is in ``text``, the rendering of ``arranged``."""
        system_texts = [turn["content"].strip() for turn in turns if turn["role"] == "system"]
        if not all(system_text in text for system_text in system_texts):
            return False
        others = [turn["content"] for turn in turns if turn["role"] != "system"]
        if not any(_may_be_elsewhere(system_text, others) for system_text in system_texts):
            return True
        probed = _with_probes(arranged)
        try:
            rendered = self._render(probed, context)
        except _RENDER_ERRORS:
            return True  # this template judges system text itself
        return all(turn["content"] in rendered for turn in probed if turn["role"] == "system")

    def _rewrites_system_text(self, turns: Sequence[Message], context: Mapping[str, Any]) -> bool:
        """Whether other system text does reach the prompt, so that the template has changed this one."""
        probed = _with_probes(turns)
        probes = [turn["content"] for turn in probed if turn["role"] == "system"]
        for arranged in arrangements(probed):
            try:
                text = self._render(arranged, context)
            except _RENDER_ERRORS:
                continue
            return all(probe in text for probe in probes)
        return True  # this template judges system text itself

    def _render(self, turns: Sequence[Message], context: Mapping[str, Any]) -> str:
        values = {**self._legacy_variables(context), **context, "messages": list(turns)}
        try:
            return self._template.render(values)
        except (TypeError, UndefinedError):
            # Templates that are only published for use with tools walk over the list unasked.
            if context["tools"] is not None:
                raise
            return self._template.render({**values, "tools": []})

    def _legacy_variables(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Names from before ``tools`` and ``strftime_now``, for templates that use them."""
        values: dict[str, Any] = {}
        if "functions" in self._variables:
            values["functions"] = json.dumps(context["tools"] or [], ensure_ascii=False, indent=4)
        if "datetime" in self._variables:
            values["datetime"] = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        return values


class ChatTemplate:
    """One model's chat template, compiled. Rendering has no state and can run in any thread.

    ``tools_source`` is used instead of ``source`` when a request has tools (models that publish two
    templates). ``control_tokens`` are the texts that the tokenizer reads as control tokens: where a
    user writes one, the rendered prompt says that it is text.
    Raises ModelLoadError for a template that does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        control_tokens: Collection[str] = (),
        tools_source: str | None = None,
    ) -> None:
        self.source = source
        self.tools_source = source if tools_source is None else tools_source
        self._template = _Compiled(source)
        self._tools_template = self._template if tools_source is None else _Compiled(tools_source)
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        self._controls = ControlPattern.of(control_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt for ``messages``, which are normalized first and never changed.

        A template that refuses the turns as they are, or leaves system text out, is given other
        arrangements of them (see role_repair) before the request is refused. ``variables`` reach the
        template as they are. A list that ends with an assistant turn is refused: the reply would be a
        second assistant turn.
        Raises TemplateError with the template's own sentence, or InvalidRequestError.
        """
        turns = normalize_messages(messages)
        if add_generation_prompt and turns[-1]["role"] == "assistant":
            raise InvalidRequestError(
                "messages must not end with an assistant message: continuing one is not supported",
                param="messages",
            )
        template = self._tools_template if tools else self._template
        context = self._context(tools, add_generation_prompt, variables)
        if "developer" not in template.source:
            turns = developer_as_system(turns)
        if not self._controls.occurs_in([turns, context["tools"], dict(variables or {})]):
            return RenderedPrompt(template.render_arranged(turns, context))
        marks = Marks.for_input(self._controls, [turns, context])
        marked = {
            **context,
            **{key: marks.mark(value) for key, value in context.items() if key not in self._special},
        }
        # A role is one of five known words, and templates compare it.
        marked_turns = [{**marks.mark(turn), "role": turn["role"]} for turn in turns]
        return marks.read(template.render_arranged(marked_turns, marked))

    def _context(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        reserved = _RESERVED & (variables or {}).keys()
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {', '.join(sorted(reserved))}",
                param="chat_template_kwargs",
            )
        return {
            **copy.deepcopy(dict(variables or {})),
            **self._special,
            "tools": copy.deepcopy(list(tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }


def _with_probes(turns: Sequence[Message]) -> list[Message]:
    return [
        {**turn, "content": f"{_PROBE}{i}."} if turn["role"] == "system" else turn
        for i, turn in enumerate(turns)
    ]


def _may_be_elsewhere(system_text: str, others: Sequence[str]) -> bool:
    """Whether finding this text in a prompt says little: it is short, or other turns hold it too."""
    return len(system_text) < 32 or any(system_text in other for other in others)


def _sentence(error: Exception | None) -> str:
    message = _one_line(str(error))
    return message if isinstance(error, RaisedByTemplateError) else f"the chat template failed: {message}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def load_chat_template(folder: Path, tokenizer: FolderTokenizer) -> ChatTemplate | None:
    """The template of a model folder (see template_source), None when it has none.

    Raises ModelLoadError for a file that cannot be read or a template that does not compile.
    """
    found = find_template_source(folder)
    if found is None:
        return None
    try:
        return ChatTemplate(
            found.source,
            bos_token=tokenizer.bos_text,
            eos_token=tokenizer.eos_text,
            control_tokens=tokenizer.control_tokens,
            tools_source=found.tools_source,
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{found.path}: {error}") from None
