"""Clients that leave, clients that are slow, silence, and the server's own end."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mlxserve.config import EngineConfig
from mlxserve.server.app import create_app, make_runner
from tests.server.serving import CHAT, Client, parse_stream, reply, scripted, serving, user

# Long enough that only an abort can end it within a test's patience.
ENDLESS = reply("endless", ["tick "], "run", delay_ms=5)
SLOW_START = reply("slow start", ["tick "], "run", prefill_delay_ms=600_000)
QUICK = reply("", ["quick"])
LONG = {"context_length": 1_000_000}


async def open_request(
    api: Client, text: str, **fields: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a chat request over a connection of its own, and read nothing."""
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": "m", "messages": user(text), **fields}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["endless", "slow start"])
async def test_a_client_that_leaves_frees_its_rows(tmp_path: Path, text: str, stream: bool, n: int) -> None:
    async with serving(scripted(tmp_path, [ENDLESS, SLOW_START, QUICK], **LONG)) as api:
        _, writer = await open_request(api, text, stream=stream, n=n)
        await api.wait_running(n)
        writer.close()
        await api.wait_running(0)
        assert (await api.chat("hello")).text == "quick"


async def test_a_client_that_leaves_the_queue_is_forgotten(tmp_path: Path) -> None:
    config = EngineConfig(max_running=1)
    async with serving(scripted(tmp_path, [ENDLESS, QUICK], config=config, **LONG)) as api:
        _, first = await open_request(api, "endless", stream=True)
        await api.wait_running(1)
        _, second = await open_request(api, "endless")
        await api.wait_running(1, waiting=1)
        second.close()
        await api.wait_running(1, waiting=0)
        first.close()
        await api.wait_running(0)


async def test_a_client_that_does_not_read_blocks_nobody(tmp_path: Path) -> None:
    bulky = reply("bulky", ["x" * 50_000] * 200)
    async with serving(scripted(tmp_path, [bulky, QUICK])) as api:
        reader, writer = await open_request(api, "bulky", stream=True)
        await api.wait_running(0)
        assert (await api.chat("hello")).text == "quick"
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"text/event-stream" in head
        num_bytes = 0
        while b"[DONE]" not in (data := await reader.readuntil(b"\n\n")):
            num_bytes += len(data)
        assert num_bytes > 200 * 50_000
        writer.close()


async def test_silence_is_filled_with_comments(tmp_path: Path) -> None:
    pause = reply("", ["a", "b"], prefill_delay_ms=300)
    async with serving(scripted(tmp_path, [pause]), ping_s=0.02) as api:
        stream = await api.stream_chat("x")
    assert stream.num_comments >= 2
    assert stream.text() == "ab"


async def test_no_comments_without_silence(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, [QUICK])) as api:
        assert (await api.stream_chat("x")).num_comments == 0


async def test_an_engine_that_ends_is_one_error_event_and_no_done(tmp_path: Path) -> None:
    model = scripted(tmp_path, [ENDLESS, QUICK], **LONG)
    async with serving(model) as api:
        body = {"model": "m", "messages": user("endless"), "stream": True}
        async with api.session.post(api.url + CHAT, json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            await model.close()
            stream = parse_stream(first + await response.read())
        assert not stream.is_done
        *chunks, last = stream.events
        assert set(last) == {"error"}
        assert last["error"]["type"] == "server_error"
        assert all("error" not in chunk for chunk in chunks)

        health = await api.get("/health")
        assert (health.status, health.body["status"]) == (503, "engine_dead")
        for is_stream in (False, True):
            refused = await api.chat("x", stream=is_stream)
            assert (refused.status, refused.error["code"]) == (503, "engine_dead")


async def test_an_engine_that_ends_before_the_first_token_is_a_plain_error(tmp_path: Path) -> None:
    model = scripted(tmp_path, [SLOW_START])
    async with serving(model) as api:
        asking = [
            asyncio.create_task(api.chat("slow start", stream=is_stream)) for is_stream in (False, True)
        ]
        await api.wait_running(2)
        await model.close()
        for refused in await asyncio.gather(*asking):
            assert (refused.status, refused.error["type"]) == (503, "server_error")


async def test_shutdown_ends_streams_and_frees_the_port(tmp_path: Path) -> None:
    model = scripted(tmp_path, [ENDLESS], **LONG)
    runner = make_runner(create_app([model]))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession() as session:
        body = {"messages": user("endless"), "stream": True}
        async with session.post(f"http://127.0.0.1:{port}{CHAT}", json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            async with asyncio.timeout(5):
                await runner.cleanup()
            assert not parse_stream(first + await response.read()).is_done
    assert not model.engine.stats().is_alive
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


async def test_a_full_queue_is_a_429_with_a_hint(tmp_path: Path) -> None:
    config = EngineConfig(max_running=1, max_waiting=1)
    async with serving(scripted(tmp_path, [ENDLESS], config=config, **LONG)) as api:
        writers = [(await open_request(api, "endless", stream=True))[1] for _ in range(2)]
        await api.wait_running(1, waiting=1)
        refused = await api.chat("endless", stream=True)
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert int(refused.headers["Retry-After"]) >= 1
        for writer in writers:
            writer.close()
        await api.wait_running(0)


async def test_large_bodies_are_served_beside_small_ones(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, [QUICK], context_length=1_000_000)) as api:
        large = "many words " * 20_000
        answers = await asyncio.gather(*(api.chat(text) for text in (large, "small", large)))
        assert [answer.text for answer in answers] == ["quick"] * 3
        refused = await api.chat(large, temperature=9)
        assert (refused.status, refused.error["param"]) == (400, "temperature")
