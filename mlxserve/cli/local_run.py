"""Generation inside this process, for ``generate`` and ``chat``, by the engine and text of the server."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import ContextLengthError, RequestFailedError, UsageError
from mlxserve.text.stop import StopMatcher
from mlxserve.text.tokenizer import Detokenizer
from mlxserve.types import FinishReason, GenerationRequest, SamplingParams, TokenOutput

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
    finish_reason: FinishReason = "abort"
    prefill_s: float = 0.0
    decode_s: float = 0.0
    started_at: float = field(default_factory=time.perf_counter)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens a second after the first; None where there was no second one."""
        if self.num_completion_tokens < 2 or self.decode_s <= 0:
            return None
        return (self.num_completion_tokens - 1) / self.decode_s

    def count(self, output: TokenOutput) -> None:
        now = time.perf_counter()
        if output.token_ids and not self.num_completion_tokens:
            self.prefill_s = now - self.started_at
        self.decode_s = now - self.started_at - self.prefill_s
        self.num_completion_tokens += len(output.token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason

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
        wanted = f" and --max-tokens {max_tokens}" if max_tokens is not None else ""
        raise ContextLengthError(
            f"the prompt of {len(prompt_ids)} tokens{wanted} does not fit the context of {limit} tokens",
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
    detokenizer = model.tokenizer.detokenizer()
    matcher = StopMatcher(stops)
    stream = model.engine.submit(request)
    try:
        async for output in stream:
            stats.count(output)
            if output.finish_reason == "error":
                raise output.error or RequestFailedError("the engine failed this request without a reason")
            for text, is_stop in _texts(output, detokenizer, matcher):
                if text:
                    yield text
                if is_stop:
                    stats.finish_reason = "stop"
                    return
    finally:
        stream.abort()


def _texts(output: TokenOutput, detokenizer: Detokenizer, matcher: StopMatcher) -> Iterator[tuple[str, bool]]:
    """Pieces of text of one engine output, each with whether a stop string ended it."""
    visible = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
    for token_id in visible:
        result = matcher.push(detokenizer.push(token_id))
        yield result.text, result.matched is not None
    if output.finish_reason is not None:
        result = matcher.push(detokenizer.finish())
        yield result.text, result.matched is not None
        yield matcher.finish(), False
