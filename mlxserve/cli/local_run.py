"""Generation inside this process, for ``generate`` and ``chat``, by the engine and text of the server."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import ContextLengthError, UsageError
from mlxserve.server.generation import TextReader
from mlxserve.types import GenerationRequest, SamplingParams

Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling as given on the command line; None leaves the model's own default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None

    def over(self, default: SamplingParams) -> SamplingParams:
        given = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": self.seed,
        }
        return replace(default, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


@dataclass(slots=True)
class RunStats:
    """What one run cost; filled in while its text is read. Times are in seconds."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    finish_reason: Literal["stop", "length", "abort"] = "abort"
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_first_tokens: int = 0
    started_at: float = field(default_factory=time.perf_counter)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens a second after the first text; None where that was all."""
        num_tokens = self.num_completion_tokens - self.num_first_tokens
        return num_tokens / self.decode_s if num_tokens and self.decode_s > 0 else None

    def update(self, reader: TextReader) -> None:
        """Take the reader's counts as they are now."""
        elapsed = time.perf_counter() - self.started_at
        if not self.num_first_tokens:
            self.prefill_s = elapsed
            self.num_first_tokens = reader.num_tokens
        self.decode_s = elapsed - self.prefill_s
        self.num_completion_tokens = reader.num_tokens
        self.num_cached_tokens = reader.num_cached_tokens
        self.finish_reason = reader.reason or "abort"

    def line(self) -> str:
        speed = f", {self.decode_tok_s:.1f} tok/s" if self.decode_tok_s is not None else ""
        cached = f" ({self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
        return (
            f"{self.num_prompt_tokens} prompt tokens{cached} in {self.prefill_s:.2f} s, "
            f"{self.num_completion_tokens} new tokens{speed}, finish: {self.finish_reason}"
        )


def chat_prompt(model: ServedModel, messages: Sequence[Message]) -> tuple[int, ...]:
    """Ids of the rendered conversation. Raises UsageError for a model without a chat template."""
    if model.template is None:
        raise UsageError(f"model {model.id} has no chat template; use: mlxserve generate --raw")
    return tuple(model.tokenizer.encode_rendered(model.template.render(messages)))


def build_request(
    model: ServedModel,
    prompt_ids: tuple[int, ...],
    *,
    max_tokens: int | None,
    sampling: SamplingOptions,
    script_key: str,
) -> GenerationRequest:
    """``max_tokens`` None means as many as the context holds."""
    limit = min(model.context_length, model.engine.max_sequence_tokens)
    room = limit - len(prompt_ids)
    if room < 1 or (max_tokens is not None and max_tokens > room):
        verb = f"and --max-tokens {max_tokens} do" if max_tokens is not None else "does"
        raise ContextLengthError(
            f"the prompt of {len(prompt_ids)} tokens {verb} not fit the context of {limit} tokens",
            param="prompt",
            num_prompt_tokens=len(prompt_ids),
            context_length=limit,
        )
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        prompt_ids=prompt_ids,
        max_tokens=max_tokens or room,
        sampling=sampling.over(model.default_sampling),
        stop_token_ids=model.tokenizer.eos_ids,
        script_key=script_key,
    )


async def stream_text(
    model: ServedModel, request: GenerationRequest, stats: RunStats, *, stops: Sequence[str] = ()
) -> AsyncGenerator[str, None]:
    """The text as it comes, up to the first of ``stops``. Close the iterator to leave early: that
    aborts the run. Raises the engine's error if there is one."""
    stats.num_prompt_tokens = len(request.prompt_ids)
    reader = TextReader(model.engine.submit(request), model.tokenizer, stops)
    try:
        async for text in reader:
            stats.update(reader)
            yield text
    finally:
        stats.update(reader)
        reader.abort()
