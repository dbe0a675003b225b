"""A real server on a free port, and a client that checks the form of every stream it reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from mlxserve.config import EngineConfig
from mlxserve.engine.served_model import ServedModel, open_folder, open_scripted
from mlxserve.server.app import create_app, make_runner
from tests.tiny_models import write_tiny_model

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DEADLINE_S = 30.0


def reply(match: str, pieces: Any, end: str = "eos", **options: Any) -> dict[str, Any]:
    return {"match": match, "pieces": pieces, "end": end, **options}


def scripted(
    folder: Path,
    replies: Sequence[dict[str, Any]],
    *,
    model_id: str = "m",
    config: EngineConfig | None = None,
    **top_level: Any,
) -> ServedModel:
    """A served scripted model; ``top_level`` overrides template, context_length and so on."""
    script = {"template": "chatml", "context_length": 4096, "replies": list(replies), **top_level}
    path = folder / f"{model_id}.json"
    path.write_text(json.dumps(script), encoding="utf-8")
    return open_scripted(path, config or EngineConfig())


def tiny(folder: Path, *, config: EngineConfig | None = None, **shape: Any) -> ServedModel:
    """A served tiny random model."""
    return open_folder(write_tiny_model(folder / "tiny", **shape), "tiny", config or EngineConfig())


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Any
    body: Any

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.body) == {"error"}, self.body
        assert set(self.body["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = self.body["error"]
        assert "\n" not in error["message"] and error["message"]
        return error

    @property
    def choice(self) -> dict[str, Any]:
        assert self.status == 200, self.body
        assert len(self.body["choices"]) == 1
        choice: dict[str, Any] = self.body["choices"][0]
        return choice

    @property
    def text(self) -> str:
        choice = self.choice
        text: str = choice["text"] if "text" in choice else choice["message"]["content"]
        return text


@dataclass(frozen=True, slots=True)
class Stream:
    """The JSON events of a stream, in order, and the number of comments between them."""

    events: list[dict[str, Any]]
    is_done: bool
    num_comments: int

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The chunks with choices, after checks that hold for every whole stream."""
        assert self.is_done
        assert len({(event["id"], event["created"], event["model"]) for event in self.events}) == 1
        chunks = [event for event in self.events if event["choices"]]
        for index in {choice["index"] for chunk in chunks for choice in chunk["choices"]}:
            self._check_choice([c for chunk in chunks for c in chunk["choices"] if c["index"] == index])
        return chunks

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(self.pieces(index))

    def pieces(self, index: int = 0) -> list[str]:
        choices = self.choices(index)
        texts = [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]
        return [text for text in texts if text]

    def reason(self, index: int = 0) -> str:
        reason: str = self.choices(index)[-1]["finish_reason"]
        return reason

    @property
    def usages(self) -> list[dict[str, Any]]:
        return [event["usage"] for event in self.events if event.get("usage") is not None]

    @staticmethod
    def _check_choice(choices: list[dict[str, Any]]) -> None:
        """One finish reason, in the last chunk, which has no text; the role in the first delta alone."""
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert reasons[-1] in ("stop", "length", "tool_calls")
        if "delta" in choices[0]:
            roles = [choice["delta"].get("role") for choice in choices]
            assert roles == ["assistant"] + [None] * (len(roles) - 1)
            assert choices[-1]["delta"] == {}
        else:
            assert choices[-1]["text"] == ""


class Client:
    """Requests to one server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def request(self, method: str, path: str, **options: Any) -> Reply:
        async with self.session.request(method, self.url + path, **options) as response:
            assert response.content_type == "application/json"
            return Reply(response.status, response.headers, await response.json())

    async def post(self, path: str, body: dict[str, Any], **options: Any) -> Reply:
        return await self.request("POST", path, json=body, **options)

    async def get(self, path: str) -> Reply:
        return await self.request("GET", path)

    async def chat(self, text: str, **fields: Any) -> Reply:
        return await self.post(CHAT, {"model": "m", "messages": user(text), **fields})

    async def complete(self, prompt: Any, **fields: Any) -> Reply:
        return await self.post(COMPLETIONS, {"model": "m", "prompt": prompt, **fields})

    async def stream(self, path: str, body: dict[str, Any]) -> Stream:
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return parse_stream(await response.read())

    async def stream_chat(self, text: str, **fields: Any) -> Stream:
        return await self.stream(CHAT, {"model": "m", "messages": user(text), **fields})

    async def stream_complete(self, prompt: Any, **fields: Any) -> Stream:
        return await self.stream(COMPLETIONS, {"model": "m", "prompt": prompt, **fields})

    async def running(self) -> tuple[int, int]:
        health = (await self.get("/health")).body
        return health["running"], health["waiting"]

    async def wait_running(self, running: int, waiting: int = 0) -> None:
        """Until /health shows these numbers; fails after DEADLINE_S."""
        async with asyncio.timeout(DEADLINE_S):
            while await self.running() != (running, waiting):
                await asyncio.sleep(0)


def parse_stream(raw: bytes) -> Stream:
    """Strict: each event is one ``data:`` line or one comment, and nothing follows ``[DONE]``."""
    assert raw.endswith(b"\n\n")
    blocks = raw.decode("utf-8").removesuffix("\n\n").split("\n\n")
    comments = [block for block in blocks if block.startswith(":")]
    data = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in data)
    payloads = [block.removeprefix("data: ") for block in data]
    is_done = payloads[-1] == "[DONE]"
    assert "[DONE]" not in payloads[:-1]
    if is_done:
        assert blocks[-1] == "data: [DONE]"
        payloads.pop()
    return Stream([json.loads(payload) for payload in payloads], is_done, len(comments))


@asynccontextmanager
async def serving(*models: ServedModel, **options: Any) -> AsyncIterator[Client]:
    """Serve the models until the block ends; they are closed then."""
    runner = make_runner(create_app(models, **options))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Client(f"http://{host}:{port}", session)
    finally:
        await runner.cleanup()
