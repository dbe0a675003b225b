"""From engine streams to text: what every API dialect needs of a generation, in no dialect's words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from mlxserve.engine.async_engine import AsyncEngine, TokenStream
from mlxserve.errors import EngineDeadError
from mlxserve.text.stop import StopMatcher
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_parser import ContentDelta, ToolCall, ToolEvent, ToolParser
from mlxserve.types import GenerationRequest

T = TypeVar("T")

EndReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class End:
    """The last event of a choice."""

    reason: EndReason


ChoiceEvent = ToolEvent | End


class TextReader:
    """The text of one engine stream, cut before the first stop string.

    Iterate once. Text that may still become a stop string is held back and comes, if it did not, as the
    last piece. ``num_tokens`` counts what was generated up to the last piece, end token and cut text
    included. ``reason`` is set when the iteration ends; ``is_cut`` says that a limit or a stop string ended
    the text, not the model. At a stop string the engine stream is aborted.
    Raises what the engine reports, and EngineDeadError when the engine is closed meanwhile.
    """

    def __init__(self, stream: TokenStream, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._stream = stream
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopMatcher(stops)
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.reason: Literal["stop", "length"] | None = None
        self.is_cut = False

    def abort(self) -> None:
        """Stop generating; harmless after the end."""
        self._stream.abort()

    async def __aiter__(self) -> AsyncIterator[str]:
        async for output in self._stream:
            if output.error is not None:
                raise output.error
            if output.finish_reason == "abort":
                raise EngineDeadError("the request was aborted: the server is shutting down")
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
            has_end_token = output.finish_reason == "stop"
            text = self._read(output.token_ids[:-1] if has_end_token else output.token_ids)
            if self.reason is None and output.finish_reason is not None:
                self.num_tokens += has_end_token
                text += self._read_tail("stop" if has_end_token else "length")
            if text:
                yield text
            if self.reason is not None:
                return

    def _read(self, token_ids: Sequence[int]) -> str:
        """The text that is free to go; sets ``reason`` at a stop string, where reading ends."""
        parts = []
        for token_id in token_ids:
            self.num_tokens += 1
            result = self._matcher.push(self._detokenizer.push(token_id))
            parts.append(result.text)
            if result.matched:
                self.reason = "stop"
                self.is_cut = True
                self.abort()
                break
        return "".join(parts)

    def _read_tail(self, reason: Literal["stop", "length"]) -> str:
        """What the detokenizer and the matcher still hold at the end of the stream."""
        result = self._matcher.push(self._detokenizer.finish())
        self.reason = "stop" if result.matched else reason
        self.is_cut = bool(result.matched) or reason == "length"
        return result.text if result.matched else result.text + self._matcher.finish()


async def read_choice(
    reader: TextReader, parser: ToolParser | None = None, *, is_single_call: bool = False
) -> AsyncIterator[ChoiceEvent]:
    """The events of one choice; exactly one End, as the last.

    With ``is_single_call`` the choice ends with its first tool call, and so does the generation.
    """
    num_calls = 0
    async for text in reader:
        for event in parser.push(text) if parser else (ContentDelta(text),):
            yield event
            num_calls += isinstance(event, ToolCall)
            if num_calls and is_single_call:
                reader.abort()
                yield End("tool_calls")
                return
    assert reader.reason is not None
    for event in parser.finish(reader.is_cut) if parser else ():
        if num_calls and is_single_call:
            break
        num_calls += isinstance(event, ToolCall)
        yield event
    yield End("tool_calls" if num_calls and reader.reason == "stop" else reader.reason)


def submit_all(engine: AsyncEngine, requests: Sequence[GenerationRequest]) -> list[TokenStream]:
    """All streams, or none: a refusal takes back what was queued before it."""
    streams: list[TokenStream] = []
    try:
        for request in requests:
            streams.append(engine.submit(request))
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return streams


async def merge(
    sources: Sequence[AsyncIterator[T]], *, idle_s: float | None = None
) -> AsyncGenerator[tuple[int, T] | None]:
    """Items of all sources as they come, each with its source's index; None after ``idle_s`` without one.

    Sources are read on, whatever the pace of the consumer. The first error of any of them is raised.
    """
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, source: AsyncIterator[T]) -> None:
        try:
            async for item in source:
                queue.put_nowait((index, item))
        except Exception as error:  # noqa: BLE001 - handed over to the consumer, which raises it
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(index, source)) for index, source in enumerate(sources)]
    num_open = len(tasks)
    try:
        while num_open:
            try:
                async with asyncio.timeout(idle_s):
                    item = await queue.get()
            except TimeoutError:
                yield None
                continue
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
