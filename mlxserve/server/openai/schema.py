"""Wire types of OpenAI's requests. Strict: an unknown field or a wrong type is an error that names it.

The last block of each request type lists fields of OpenAI's API which are accepted only at a value that
asks for nothing (``NEUTRAL_…_VALUES``), or which label a request and never change its output
(``user``, ``metadata``, ``service_tier``, ``safety_identifier``, ``prompt_cache_key``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_CHOICES = 16
MAX_STOPS = 4

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=0)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
PositiveInt = Annotated[int, Meta(ge=1)]
NaturalInt = Annotated[int, Meta(ge=0)]
NonEmptyStr = Annotated[str, Meta(min_length=1)]


class Wire(msgspec.Struct, forbid_unknown_fields=True):
    """Base of everything that a client sends."""


class TextPart(Wire, tag_field="type", tag="text"):
    text: str


class RefusalPart(Wire, tag_field="type", tag="refusal"):
    refusal: str


class ImagePart(Wire, tag_field="type", tag="image_url"):
    image_url: Any


class AudioPart(Wire, tag_field="type", tag="input_audio"):
    input_audio: Any


class FilePart(Wire, tag_field="type", tag="file"):
    file: Any


ContentPart = TextPart | RefusalPart | ImagePart | AudioPart | FilePart


class CalledFunction(Wire, omit_defaults=True):
    """``arguments`` is JSON text in OpenAI's form; a decoded object is taken, too."""

    name: str
    arguments: str | dict[str, Any] | None = None


class PastToolCall(Wire, kw_only=True, omit_defaults=True):
    """A call in the history. ``index`` comes back from clients that replay stream deltas."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Wire, omit_defaults=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[PastToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class Function(Wire):
    name: NonEmptyStr
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: Function


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(Wire):
    """What both generation routes take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None

    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChatRequest(GenerationFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    logprobs: bool | None = None
    modalities: list[str] | None = None
    prediction: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    store: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: NaturalInt | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    echo: bool | None = None

    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    suffix: str | None = None


Neutral = dict[str, tuple[Any, ...]]
"""Fields that this version does not support, with the values beside null that ask for nothing."""

_NEUTRAL_VALUES: Neutral = {"frequency_penalty": (0.0,), "presence_penalty": (0.0,)}

NEUTRAL_CHAT_VALUES: Neutral = _NEUTRAL_VALUES | {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

NEUTRAL_COMPLETION_VALUES: Neutral = _NEUTRAL_VALUES | {"logprobs": (), "suffix": ("",)}

NEUTRAL_MESSAGE_VALUES: Neutral = {"annotations": ([],), "audio": (), "function_call": ()}

NEUTRAL_STREAM_VALUES: Neutral = {"include_obfuscation": (False,)}

NEUTRAL_FUNCTION_VALUES: Neutral = {"strict": (False,)}
