"""Clients of the completions API that note when each piece of a stream came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from mlxserve.errors import RequestFailedError, UsageError

_SILENCE_S = 120.0
"""A server that lives sends a comment more often than that."""


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Seconds of one clock: when the request went out, when each piece of text came, when the stream ended.
    ``num_tokens`` were generated; a token that is no text by itself comes with a later one's piece."""

    started: float
    pieces: tuple[float, ...]
    ended: float
    num_tokens: int

    @property
    def first_s(self) -> float:
        return self.pieces[0] - self.started

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]

    def num_tokens_within(self, start: float, end: float) -> float:
        """Tokens that came after ``start``, up to ``end``. Exact where each token is a piece; else each piece
        counts as its share of all tokens."""
        return sum(start < at <= end for at in self.pieces) * self.num_tokens / len(self.pieces)


def decode_rate(streams: Sequence[StreamTimes]) -> float:
    """Tokens a second of all streams while all of them decode: from the last one's first token to the end of
    the first one. Both ends are put to pieces of the stream that began last, so that whole steps lie between.

    Raises UsageError when there is no such time.
    """
    last = max(streams, key=lambda stream: stream.pieces[0])
    start, first_end = last.pieces[0], min(stream.ended for stream in streams)
    end = next((at for at in last.pieces if at >= first_end), last.pieces[-1])
    num_tokens = sum(stream.num_tokens_within(start, end) for stream in streams)
    if first_end <= start or not num_tokens:
        raise UsageError(
            f"{streams[0].num_tokens} new tokens are too few for {len(streams)} streams: the first one ends "
            "before the last one has begun"
        )
    return num_tokens / (end - start)


async def read_streams(url: str, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[StreamTimes]:
    """Greedy completions of all prompts (token ids), each a request of its own, sent together.

    Raises RequestFailedError when one of them is refused, fails or ends before it has ``num_tokens``.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        tasks = [
            asyncio.create_task(_read_stream(session, url, index, prompt, num_tokens))
            for index, prompt in enumerate(prompts)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _read_stream(
    session: aiohttp.ClientSession, url: str, index: int, prompt: Sequence[int], num_tokens: int
) -> StreamTimes:
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    received: list[tuple[float, bytes]] = []
    try:
        async with session.post(f"{url}/v1/completions", data=msgspec.json.encode(body)) as response:
            if response.status != 200:
                raise RequestFailedError(f"stream {index}: status {response.status}: {await response.text()}")
            # Read as it comes and understood later: the client has no core of its own.
            async for data in response.content.iter_any():
                received.append((time.perf_counter(), data))
    except aiohttp.ClientError as error:
        raise RequestFailedError(f"stream {index}: {error or type(error).__name__}") from error
    return _times(index, started, received, num_tokens)


def _times(
    index: int, started: float, received: Sequence[tuple[float, bytes]], num_tokens: int
) -> StreamTimes:
    pieces: list[float] = []
    reason, count, is_done = None, 0, False
    for at, event in _events(received):
        if event == b"[DONE]":
            is_done = True
            continue
        chunk: dict[str, Any] = msgspec.json.decode(event)
        if "error" in chunk:
            raise RequestFailedError(f"stream {index}: {chunk['error']['message']}")
        for choice in chunk["choices"]:
            reason = choice["finish_reason"] or reason
            if choice["text"]:
                pieces.append(at)
        if chunk.get("usage"):
            count = chunk["usage"]["completion_tokens"]
    if not is_done or reason != "length" or count != num_tokens:
        raise RequestFailedError(
            f"stream {index} ended early: {count} of {num_tokens} tokens, finish_reason {reason}"
        )
    if not pieces:
        raise RequestFailedError(f"stream {index}: its {count} tokens are no text, so nothing can be timed")
    return StreamTimes(started, tuple(pieces), received[-1][0], count)


def _events(received: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The data of each event, and when its last byte came."""
    events, rest = [], b""
    for at, data in received:
        *whole, rest = (rest + data).split(b"\n\n")
        events += [(at, event.removeprefix(b"data: ")) for event in whole if event.startswith(b"data: ")]
    return events
