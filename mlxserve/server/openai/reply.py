"""Wire types of OpenAI's replies."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

Reason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCallItem(msgspec.Struct):
    """A whole call. ``index`` is there in streams alone."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCallItem] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    finish_reason: Reason
    logprobs: None = None


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallItem] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: Reason | None = None
    logprobs: None = None


class ChatChunk(msgspec.Struct):
    """``usage`` is absent when the client did not ask, null before the last chunk when it did."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionChoice(msgspec.Struct):
    """The same in whole replies and in chunks, where ``finish_reason`` is null but in the last."""

    index: int
    text: str
    finish_reason: Reason | None = None
    logprobs: None = None


class Completion(msgspec.Struct):
    """A whole reply or a chunk; ``usage`` as in ChatChunk."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
