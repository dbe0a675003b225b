"""The clients of ``mlxserve bench serve``: what they count, and that a stream which is not whole is an
error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mlxserve.cli.side_process import SideProcess
from mlxserve.cli.stream_client import StreamTimes, _events, decode_rate, read_streams
from mlxserve.config import EngineConfig
from mlxserve.errors import RequestFailedError, UsageError
from tests.server.serving import reply, scripted, serving


def times(*pieces: float, num_tokens: int | None = None, started: float = 0.0) -> StreamTimes:
    return StreamTimes(started, pieces, pieces[-1] + 0.01, len(pieces) if num_tokens is None else num_tokens)


def test_the_rate_counts_whole_steps_in_which_all_decode() -> None:
    # One step a second; the second stream begins two steps later, and its part of a step comes 0.1 s later.
    early = times(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    late = times(3.1, 4.1, 5.1, 6.1, 7.1, 8.1)
    assert decode_rate([early, late]) == pytest.approx(2.0)
    assert decode_rate([late, early]) == pytest.approx(2.0)
    assert decode_rate([early]) == pytest.approx(1.0)
    # The order within a step does not matter.
    first = times(2.9, 3.9, 4.9, 5.9, 6.9, 7.9)
    assert decode_rate([early, first]) == pytest.approx(2.0)


def test_tokens_without_text_count() -> None:
    assert decode_rate([times(1.0, 2.0, 3.0, 4.0, num_tokens=8)]) == pytest.approx(2.0)


def test_no_step_with_all_streams_is_an_error() -> None:
    with pytest.raises(UsageError, match="3 new tokens are too few for 2 streams"):
        decode_rate([times(1.0, 2.0, 3.0), times(4.0, 5.0, 6.0)])
    with pytest.raises(UsageError, match="1 new tokens are too few for 1 streams"):
        decode_rate([times(1.0)])


def test_latencies() -> None:
    stream = times(3.0, 3.5, 4.5, started=1.0)
    assert stream.first_s == 2.0
    assert stream.gaps_s == [0.5, 1.0]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events_are_found_wherever_they_are_cut(size: int) -> None:
    raw = b"data: one\n\n: keep-alive\n\ndata: two\n\n"
    received = [(float(at), raw[at : at + size]) for at in range(0, len(raw), size)]
    found = _events(received)
    assert [event for _, event in found] == [b"one", b"two"]
    assert found[0][0] == max(at for at, _ in received if at <= 10)


async def test_a_real_server(tmp_path: Path) -> None:
    """Whole streams, past the end token of the script; the two bytes of a character are one piece."""
    replies = [reply("x", ["a", {"hex": "c3"}, {"hex": "a9"}, "b"]), reply("", ["c"], "run")]
    async with serving(scripted(tmp_path, replies)) as api:
        character, plain = await read_streams(api.url, [list(b"x"), list(b"yy")], 6)
    assert (len(character.pieces), character.num_tokens) == (3, 6)
    assert (len(plain.pieces), plain.num_tokens) == (6, 6)
    for stream in (character, plain):
        assert stream.started < stream.pieces[0] <= stream.pieces[-1] <= stream.ended
        assert list(stream.pieces) == sorted(stream.pieces)


async def test_a_stream_that_the_context_cuts_is_an_error(tmp_path: Path) -> None:
    model = scripted(tmp_path, [reply("", ["c"], "run")], context_length=20)
    async with serving(model) as api:
        with pytest.raises(RequestFailedError, match=r"^stream 1 ended early: 5 of 10 tokens, .* length$"):
            await read_streams(api.url, [[100] * 10, [100] * 15], 10)


async def test_a_refused_stream_is_an_error(tmp_path: Path) -> None:
    config = EngineConfig(max_running=1, max_waiting=0)
    model = scripted(tmp_path, [reply("", ["c"], "run", delay_ms=20)], config=config)
    async with serving(model) as api:
        with pytest.raises(RequestFailedError, match=r"^stream \d: status 429: .*queue_full"):
            await read_streams(api.url, [[100], [100], [100]], 50)
        # What the others had begun is over.
        await api.wait_running(0)


def chunk(text: str, reason: str | None = None) -> str:
    return json.dumps({"choices": [{"text": text, "finish_reason": reason}]})


def usage(count: int) -> str:
    return json.dumps({"choices": [], "usage": {"completion_tokens": count}})


WHOLE = [chunk("a"), chunk("b"), chunk("", "length"), usage(2), "[DONE]"]


@asynccontextmanager
async def answering(events: Sequence[str], *, is_cut: bool = False) -> AsyncIterator[str]:
    """A server that answers every request with these events."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {event}\n\n".encode())
        if is_cut and request.transport is not None:
            request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def test_a_whole_stream_from_a_plain_server() -> None:
    async with answering(WHOLE) as url:
        (stream,) = await read_streams(url, [[5]], 2)
    assert (len(stream.pieces), stream.num_tokens) == (2, 2)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (
            [chunk("a"), chunk("", "stop"), usage(1), "[DONE]"],
            "ended early: 1 of 2 tokens, finish_reason stop",
        ),
        ([chunk("a"), chunk("b"), chunk("", "stop"), usage(2), "[DONE]"], "finish_reason stop"),
        ([chunk("a"), chunk("", "length"), usage(1), "[DONE]"], "1 of 2 tokens, finish_reason length"),
        ([chunk("a"), chunk("", "length"), "[DONE]"], "0 of 2 tokens"),
        (WHOLE[:-1], "ended early: 2 of 2 tokens"),
        ([chunk("a")], "0 of 2 tokens, finish_reason None"),
        ([], "0 of 2 tokens"),
        ([chunk("a"), '{"error": {"message": "the engine failed"}}'], "^stream 0: the engine failed$"),
        ([chunk("", "length"), usage(2), "[DONE]"], "its 2 tokens are no text"),
    ],
)
async def test_a_stream_that_is_not_whole_is_an_error(events: list[str], message: str) -> None:
    async with answering(events) as url:
        with pytest.raises(RequestFailedError, match=message):
            await read_streams(url, [[5]], 2)


async def test_a_connection_that_breaks_is_an_error() -> None:
    async with answering(WHOLE[:1], is_cut=True) as url:
        with pytest.raises(RequestFailedError, match=r"^stream 0: "):
            await read_streams(url, [[5]], 2)
    with pytest.raises(RequestFailedError, match=r"^stream 0: "):
        await read_streams(url, [[5]], 2)


# The processes of the sides


def open_adder(start: int) -> Callable[[Any], Any]:
    if start < 0:
        raise UsageError(f"start must be at least 0, got {start}")

    def answer(question: int) -> int:
        if question == 0:
            raise SystemExit(3)
        return start // (question - 1)

    return answer


def test_a_side_answers_and_its_errors_come_over() -> None:
    with SideProcess("adder", open_adder, 6) as side:
        assert side.ask(3) == 3
        with pytest.raises(RequestFailedError, match=r"^the adder: ZeroDivisionError: "):
            side.ask(1)
        assert side.ask(4) == 2
        with pytest.raises(RequestFailedError, match=r"^the adder ended with exit code 3$"):
            side.ask(0)
    assert not side._process.is_alive()


def test_a_side_that_cannot_open_says_why() -> None:
    with SideProcess("adder", open_adder, -1) as side, pytest.raises(UsageError, match="at least 0, got -1"):
        side.ask(3)
    assert not side._process.is_alive()


def test_a_side_ends_with_an_error_of_ours() -> None:
    with pytest.raises(KeyError), SideProcess("adder", open_adder, 6) as side:
        raise KeyError
    assert not side._process.is_alive()
