"""Wire requests to engine requests: the only place where OpenAI's fields meet the engine's types."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import ContextLengthError, InvalidRequestError, TemplateError, UnsupportedFieldError
from mlxserve.server.openai.decode import refuse_unsupported
from mlxserve.server.openai.schema import (
    MAX_STOPS,
    NEUTRAL_CHAT_VALUES,
    NEUTRAL_COMPLETION_VALUES,
    NEUTRAL_MESSAGE_VALUES,
    NEUTRAL_STREAM_VALUES,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    Message,
)
from mlxserve.server.openai.tools import checked_tools
from mlxserve.text.messages import last_user_text
from mlxserve.types import GenerationRequest, SamplingParams

MAX_ROWS = 128
"""Choices of one completions request: prompts times ``n``."""

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request. ``text`` is what ``echo`` returns and what a script matches."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Options:
    """What both routes take, validated."""

    choices_per_prompt: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    ignores_end: bool
    is_stream: bool
    has_usage_chunk: bool


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request. Choice i belongs to prompt ``i // choices_per_prompt``. ``max_tokens`` holds each
    prompt's limit after the cut to the context; all are 0 when nothing is to be generated."""

    id: str
    created: int
    model: ServedModel
    options: Options
    prompts: tuple[Prompt, ...]
    max_tokens: tuple[int, ...]
    is_echo: bool = False
    tool_format: str | None = None
    is_single_call: bool = False

    @property
    def num_choices(self) -> int:
        """Of all prompts together."""
        return len(self.prompts) * self.options.choices_per_prompt

    @property
    def generates(self) -> bool:
        return any(self.max_tokens)

    def prompt_of(self, choice: int) -> Prompt:
        return self.prompts[choice // self.options.choices_per_prompt]

    def requests(self) -> list[GenerationRequest]:
        """The engine requests, in choice order; none when nothing is to be generated."""
        end_ids: frozenset[int] = frozenset() if self.options.ignores_end else self.model.tokenizer.eos_ids
        return [
            GenerationRequest(
                request_id=f"{self.id}-{prompt_index}-{choice}",
                prompt_ids=prompt.ids,
                max_tokens=limit,
                sampling=self._sampling_of(choice),
                stop_token_ids=end_ids,
                script_key=prompt.text,
                adapter_id=self.model.adapter_id,
            )
            for prompt_index, (prompt, limit) in enumerate(zip(self.prompts, self.max_tokens, strict=True))
            for choice in range(self.options.choices_per_prompt if limit else 0)
        ]

    def _sampling_of(self, choice: int) -> SamplingParams:
        """A seeded request still gives n different choices, each the same every time."""
        sampling = self.options.sampling
        seed = sampling.seed
        return replace(sampling, seed=None if seed is None else seed + choice)


def translate_chat(body: ChatRequest, model: ServedModel) -> Job:
    """Render, encode and check a chat request; raises InvalidRequestError."""
    refuse_unsupported(body, NEUTRAL_CHAT_VALUES)
    options = _options(body, model)
    _check_num_choices(1, options.choices_per_prompt, model)
    tools = checked_tools(body, model)
    prompt = _chat_prompt(body, model, tools)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return Job(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        options=options,
        prompts=(prompt,),
        max_tokens=_limits(model, (prompt,), asked, "messages"),
        tool_format=model.tool_format if tools else None,
        is_single_call=body.parallel_tool_calls is False,
    )


def translate_completion(body: CompletionRequest, model: ServedModel) -> Job:
    """Encode and check a completions request; raises InvalidRequestError."""
    refuse_unsupported(body, NEUTRAL_COMPLETION_VALUES)
    options = _options(body, model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UnsupportedFieldError(
            f"best_of must equal n ({body.n or 1}) in this version, not {body.best_of}", param="best_of"
        )
    prompts = _completion_prompts(body.prompt, model)
    _check_num_choices(len(prompts), options.choices_per_prompt, model)
    asked = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return Job(
        id=f"cmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        options=options,
        prompts=prompts,
        max_tokens=_limits(model, prompts, asked, "prompt"),
        is_echo=bool(body.echo),
    )


def _check_num_choices(num_prompts: int, choices_per_prompt: int, model: ServedModel) -> None:
    """More than this engine ever holds is no matter of trying again later."""
    limit = min(MAX_ROWS, model.engine.max_requests)
    num_choices = num_prompts * choices_per_prompt
    if num_choices <= limit:
        return
    if num_prompts == 1:
        raise InvalidRequestError(f"n must be at most {limit} on this server, not {num_choices}", param="n")
    raise InvalidRequestError(f"prompts times n must be at most {limit}, not {num_choices}", param="prompt")


def _options(body: GenerationFields, model: ServedModel) -> Options:
    if body.stream_options is not None:
        if not body.stream:
            raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
        refuse_unsupported(body.stream_options, NEUTRAL_STREAM_VALUES, "stream_options.")
    return Options(
        choices_per_prompt=body.n or 1,
        sampling=_sampling(body, model),
        stops=_stops(body.stop),
        ignores_end=bool(body.ignore_eos),
        is_stream=bool(body.stream),
        has_usage_chunk=bool(body.stream_options and body.stream_options.include_usage),
    )


def _sampling(body: GenerationFields, model: ServedModel) -> SamplingParams:
    """The model's own defaults, with what the request names laid over them. ``top_k`` 0 is off."""
    given: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "seed")
        if (value := getattr(body, name)) is not None
    }
    if given.get("top_k") == 0:
        given["top_k"] = None
    if body.logit_bias is not None:
        given["logit_bias"] = _logit_bias(body.logit_bias, model.tokenizer.vocab_size)
    return replace(model.default_sampling, **given)


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit()) or int(key) >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias takes token ids from 0 to {vocab_size - 1}, not {key!r}", param="logit_bias"
            )
        pairs[int(key)] = value
    return tuple(sorted(pairs.items()))


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"stop takes at most {MAX_STOPS} strings, not {len(stops)}", param="stop")
    if "" in stops:
        raise InvalidRequestError("stop takes no empty string", param="stop")
    return stops


def _chat_prompt(body: ChatRequest, model: ServedModel, tools: list[dict[str, Any]] | None) -> Prompt:
    if model.template is None:
        raise TemplateError(f"model {model.id!r} has no chat template; use /v1/completions", param="messages")
    messages = _plain_messages(body.messages)
    rendered = model.template.render(
        messages, tools=tools, add_generation_prompt=True, variables=body.chat_template_kwargs
    )
    ids = tuple(model.tokenizer.encode_rendered(rendered))
    if not ids:
        raise TemplateError("the chat template made an empty prompt of these messages", param="messages")
    return Prompt(ids, last_user_text(messages))


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """New mappings, in OpenAI's shapes, without the fields that were not given."""
    plain = []
    for index, message in enumerate(messages):
        refuse_unsupported(message, NEUTRAL_MESSAGE_VALUES, f"messages[{index}].")
        fields: dict[str, Any] = msgspec.to_builtins(message)
        refusal = fields.pop("refusal", None)
        fields.setdefault("content", refusal)
        plain.append(fields)
    return plain


def _completion_prompts(prompt: str | list[str | int | list[int]], model: ServedModel) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (_text_prompt(prompt, model),)
    if not prompt:
        raise InvalidRequestError("prompt must not be an empty list", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequestError(
            "prompt must be a string, or a list of only strings, only token ids, or only lists of token ids",
            param="prompt",
            code="invalid_type",
        )
    if kinds == {int}:
        return (_id_prompt(cast(list[int], prompt), model, "prompt"),)
    return tuple(
        _text_prompt(item, model)
        if isinstance(item, str)
        else _id_prompt(cast(list[int], item), model, f"prompt[{index}]")
        for index, item in enumerate(prompt)
    )


def _text_prompt(text: str, model: ServedModel) -> Prompt:
    ids = tuple(model.tokenizer.encode(text))
    if not ids:
        if model.tokenizer.bos_id is None:
            raise InvalidRequestError(
                "prompt is empty, and this model has no begin token to start from", param="prompt"
            )
        ids = (model.tokenizer.bos_id,)
    return Prompt(ids, text)


def _id_prompt(ids: Sequence[int], model: ServedModel, place: str) -> Prompt:
    """Ids are used as they are: no begin token is added."""
    if not ids:
        raise InvalidRequestError(f"{place} has no token ids", param="prompt")
    vocab_size = model.tokenizer.vocab_size
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{place} takes token ids from 0 to {vocab_size - 1}, not {token_id}", param="prompt"
            )
    return Prompt(tuple(ids), model.tokenizer.decode(ids))


def _limits(model: ServedModel, prompts: Sequence[Prompt], asked: int | None, param: str) -> tuple[int, ...]:
    """Each prompt's token limit: what was asked, cut to the room that the context leaves."""
    window = model.context_length
    for prompt in prompts:
        if len(prompt.ids) >= window:
            raise ContextLengthError(
                f"the prompt has {len(prompt.ids)} tokens, the context window is {window} tokens"
                " and must leave room for at least one more",
                param=param,
                num_prompt_tokens=len(prompt.ids),
                context_length=window,
            )
    rooms = (window - len(prompt.ids) for prompt in prompts)
    return tuple(room if asked is None else min(asked, room) for room in rooms)
