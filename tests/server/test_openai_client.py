"""The official Python client against the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from mlxserve.config import EngineConfig
from tests.server.serving import Client, reply, scripted, serving, user

REPLIES = [
    reply("harbour", ["Cape", " Town", "."]),
    reply("call", ['<tool_call>{"name": "moon", "arguments": {"phase": 1}}</tool_call>']),
    reply("hash", "hash", "run"),
    reply("endless", ["tick "], "run", delay_ms=5),
    reply("", ["one", " two", " three", " four"]),
]
TOOLS: Any = [{"type": "function", "function": {"name": "moon", "parameters": {"type": "object"}}}]


@asynccontextmanager
async def clients(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Client, openai.AsyncOpenAI]]:
    config = options.pop("config", None)
    model = scripted(tmp_path, REPLIES, config=config, context_length=100_000)
    async with (
        serving(model, **options) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield api, client


async def test_chat(tmp_path: Path) -> None:
    async with clients(tmp_path) as (_, client):
        answer = await client.chat.completions.create(model="m", messages=user("a harbour"), temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "Cape Town."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_chat_stream(tmp_path: Path) -> None:
    async with clients(tmp_path) as (_, client):
        stream = await client.chat.completions.create(
            model="m",
            messages=user("a harbour"),  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Cape Town."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_the_clients_own_stream_helper(tmp_path: Path) -> None:
    async with (
        clients(tmp_path) as (_, client),
        client.chat.completions.stream(model="m", messages=user("call"), tools=TOOLS) as stream,  # type: ignore[arg-type]
    ):
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert (calls[0].function.name, calls[0].function.arguments) == ("moon", '{"phase": 1}')
    assert final.choices[0].finish_reason == "tool_calls"


async def test_completions(tmp_path: Path) -> None:
    async with clients(tmp_path) as (_, client):
        whole = await client.completions.create(model="m", prompt="x", max_tokens=3, stop=" three")
        stream = await client.completions.create(model="m", prompt="x", max_tokens=2, echo=True, stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("one two", "stop")
    assert "".join(texts) == "xone two"


async def test_models(tmp_path: Path) -> None:
    async with clients(tmp_path) as (_, client):
        assert [model.id async for model in client.models.list()] == ["m"]
        card = await client.models.retrieve("m")
    assert card.model_extra == {"context_length": 100_000, "max_model_len": 100_000}


async def test_errors_are_the_right_exceptions(tmp_path: Path) -> None:
    async with clients(tmp_path, config=EngineConfig(max_running=1, max_waiting=0)) as (api, client):
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model="m", messages=[])
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="other", messages=user("x"))  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError) as too_long:
            await create(model="m", messages=user("x" * 100_001), stream=True)  # type: ignore[arg-type]
        busy = await create(model="m", messages=user("endless"), stream=True)  # type: ignore[arg-type]
        await anext(aiter(busy))
        with pytest.raises(openai.RateLimitError):
            await create(model="m", messages=user("x"))  # type: ignore[arg-type]
        await busy.close()
        await api.wait_running(0)
    assert bad.value.param == "messages"
    assert missing.value.code == "model_not_found"
    assert too_long.value.code == "context_length_exceeded"


async def test_a_wrong_key(tmp_path: Path) -> None:
    async with clients(tmp_path, api_key="right") as (api, client):
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        async with client.with_options(api_key="right") as allowed:
            assert [model.id async for model in allowed.models.list()] == ["m"]
        assert (await api.get("/health")).status == 200


async def test_an_error_inside_a_stream_is_raised(tmp_path: Path) -> None:
    model = scripted(tmp_path, REPLIES)
    async with (
        serving(model) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(model="m", messages=user("endless"), stream=True)  # type: ignore[arg-type]
        await anext(aiter(stream))
        await model.close()
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass


async def test_sixteen_streams_at_once_equal_each_alone(tmp_path: Path) -> None:
    """The scripted reply "hash" depends on every earlier token of its own row, as read from the pages."""

    async def text(client: openai.AsyncOpenAI, index: int) -> str:
        stream = await client.chat.completions.create(
            model="m",
            messages=user(f"hash {'long shared start ' * 9} {index}"),  # type: ignore[arg-type]
            max_tokens=40,
            temperature=0,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with clients(tmp_path) as (_, client):
        alone = [await text(client, index) for index in range(16)]
    async with clients(tmp_path) as (_, client):
        together = await asyncio.gather(*(text(client, index) for index in range(16)))
    assert together == alone
    assert len(set(alone)) == 16


async def test_the_synchronous_client(tmp_path: Path) -> None:
    def ask(url: str) -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model="m", messages=user("a harbour"))  # type: ignore[arg-type]
            stream = client.completions.create(model="m", prompt="a harbour", stream=True)
            return whole.choices[0].message.content, "".join(chunk.choices[0].text for chunk in stream)

    async with clients(tmp_path) as (api, _):
        assert await asyncio.to_thread(ask, api.url) == ("Cape Town.", "Cape Town.")
