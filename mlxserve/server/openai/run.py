"""Runs a validated job and writes its reply, whole or as a stream; both routes share it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web

from mlxserve.engine.served_model import ServedModel
from mlxserve.errors import InvalidRequestError
from mlxserve.server.errors import error_reply
from mlxserve.server.generation import ChoiceEvent, End, TextReader, merge, read_choice, submit_all
from mlxserve.server.keys import PING_S, REGISTRY
from mlxserve.server.openai.decode import decode_body
from mlxserve.server.openai.reply import PromptTokensDetails, Usage
from mlxserve.server.openai.schema import ChatRequest, CompletionRequest
from mlxserve.server.openai.translate import Job
from mlxserve.server.sse import EventStream
from mlxserve.text.tool_parser import tool_parser_for

logger = logging.getLogger(__name__)

Body = TypeVar("Body", ChatRequest, CompletionRequest)

_MAX_INLINE_BYTES = 32 * 1024
"""Bodies up to this size take a few milliseconds to translate, little enough for the event loop."""


class Shape(Protocol):
    """How one route spells a job's events. One object a reply: it remembers what was sent."""

    def chunks(self, choice: int, event: ChoiceEvent) -> Sequence[msgspec.Struct]:
        """What the event adds to the stream."""

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The extra chunk with the totals."""

    def whole(self, events: Sequence[Sequence[ChoiceEvent]], usage: Usage) -> msgspec.Struct:
        """The reply without streaming; ``events`` by choice."""


async def translated(
    request: web.Request, wire_type: type[Body], translate: Callable[[Body, ServedModel], Job]
) -> Job:
    """The job that a request's body asks for; raises InvalidRequestError or ModelNotFoundError.

    A large body is read, rendered and tokenized on a worker thread: other streams must not wait for it.
    """
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:
        raise InvalidRequestError(
            "the body cannot be decoded: it does not match its Content-Encoding or Transfer-Encoding"
        ) from error

    def read() -> Job:
        body = decode_body(raw, wire_type)
        return translate(body, request.app[REGISTRY].get(body.model))

    return read() if len(raw) <= _MAX_INLINE_BYTES else await asyncio.to_thread(read)


class Run:
    """The generation of one job, from its submission on. ``abort`` must be called in the end."""

    def __init__(self, job: Job) -> None:
        self._job = job
        model = job.model
        streams = submit_all(model.engine, job.requests())
        self._readers = [TextReader(stream, model.tokenizer, job.options.stops) for stream in streams]

    def abort(self) -> None:
        """End what still runs; harmless for what has ended."""
        for reader in self._readers:
            reader.abort()

    def events(self, idle_s: float | None = None) -> AsyncGenerator[tuple[int, ChoiceEvent] | None]:
        """Events of all choices as they come; None after ``idle_s`` without one."""
        job = self._job
        if not job.generates:
            return merge([_nothing() for _ in range(job.num_choices)])
        return merge([self._choice(reader) for reader in self._readers], idle_s=idle_s)

    def usage(self) -> Usage:
        """Totals; each prompt counts once, whatever the number of its choices."""
        prompt = sum(len(prompt.ids) for prompt in self._job.prompts)
        completion = sum(reader.num_tokens for reader in self._readers)
        firsts = self._readers[:: self._job.options.choices_per_prompt]
        cached = sum(reader.num_cached_tokens for reader in firsts)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    def _choice(self, reader: TextReader) -> AsyncIterator[ChoiceEvent]:
        job = self._job
        parser = tool_parser_for(job.tool_format) if job.tool_format else None
        return read_choice(reader, parser, is_single_call=job.is_single_call)


async def _nothing() -> AsyncIterator[ChoiceEvent]:
    """A choice that was not to have a single token."""
    yield End("length")


async def answer(request: web.Request, job: Job, shape: Shape) -> web.StreamResponse:
    """The reply to a job. Cancellation, which is how a disconnect shows, aborts its generation."""
    run = Run(job)
    try:
        if job.options.is_stream:
            return await _answer_stream(request, job, run, shape)
        return await _answer_whole(job, run, shape)
    finally:
        run.abort()


async def _answer_whole(job: Job, run: Run, shape: Shape) -> web.Response:
    events: list[list[ChoiceEvent]] = [[] for _ in range(job.num_choices)]
    async with aclosing(run.events()) as merged:
        async for item in merged:
            assert item is not None
            choice, event = item
            events[choice].append(event)
    body = msgspec.json.encode(shape.whole(events, run.usage()))
    return web.Response(body=body, content_type="application/json")


async def _answer_stream(request: web.Request, job: Job, run: Run, shape: Shape) -> web.StreamResponse:
    """An engine failure after the first byte is one error event, and no ``[DONE]`` follows it."""
    out = EventStream(request)
    try:
        await _send_events(out, job, run, shape, request.app[PING_S])
    except ConnectionError:
        logger.debug("stream %s: the client has left", job.id)
    except Exception as error:
        if not out.is_open:
            raise
        logger.info("stream %s failed: %s", job.id, error)
        with suppress(ConnectionError):
            await out.send(error_reply(error).body)
            await out.close(is_done=False)
    return out.response


async def _send_events(out: EventStream, job: Job, run: Run, shape: Shape, ping_s: float) -> None:
    async with aclosing(run.events(ping_s)) as merged:
        async for item in merged:
            if item is None:
                await out.ping()
                continue
            for chunk in shape.chunks(*item):
                await out.send(msgspec.json.encode(chunk))
    if job.options.has_usage_chunk:
        await out.send(msgspec.json.encode(shape.usage_chunk(run.usage())))
    await out.close(is_done=True)
