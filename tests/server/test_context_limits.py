"""The context window: what does not fit is refused before anything runs, what fits is cut to the room.

The model's window is 128 tokens, one a character, and it never ends by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxserve.engine.served_model import ServedModel
from tests.server.serving import CHAT, COMPLETIONS, Client, serving, tiny, user

WINDOW = 128


def model(tmp_path: Path) -> ServedModel:
    return tiny(tmp_path, context=WINDOW, has_eos=False)


async def check_alive(api: Client) -> None:
    after = await api.post(CHAT, {"messages": user("ok?"), "max_tokens": 2})
    assert after.body["usage"]["completion_tokens"] == 2
    await api.wait_running(0)


@pytest.mark.parametrize(
    ("prompt", "num_tokens"),
    [("x" * 200, 200), ("x" * 128, 128), (["x" * 20, "x" * 200], 200), ([[1] * 20, [1] * 128], 128)],
    ids=["over", "exactly full", "one of a list", "one of id lists"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_is_refused_with_both_numbers_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: Any, num_tokens: int, stream: bool
) -> None:
    served = model(tmp_path)
    async with serving(served) as api:
        with monkeypatch.context() as patch:
            patch.setattr(served.engine, "submit", None)
            refused = await api.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 4, "stream": stream})
        assert refused.status == 400
        assert refused.error["type"] == "invalid_request_error"
        assert refused.error["code"] == "context_length_exceeded"
        assert refused.error["param"] == "prompt"
        assert str(num_tokens) in refused.error["message"] and str(WINDOW) in refused.error["message"]
        await check_alive(api)


async def test_chat_is_refused_alike(tmp_path: Path) -> None:
    async with serving(model(tmp_path)) as api:
        refused = await api.post(CHAT, {"messages": user("x" * 200), "max_tokens": 4})
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        assert refused.error["param"] == "messages"
        await check_alive(api)


@pytest.mark.parametrize(
    ("length", "asked", "given"), [(120, 50, 8), (127, 1, 1), (127, 50, 1), (100, 28, 28), (100, None, 16)]
)
async def test_output_is_cut_to_the_room_left(
    tmp_path: Path, length: int, asked: int | None, given: int
) -> None:
    body = {"prompt": "x" * length, "max_tokens": asked, "temperature": 0}
    async with serving(model(tmp_path)) as api:
        whole = await api.post(COMPLETIONS, body)
        stream = await api.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        await check_alive(api)
    assert whole.body["usage"]["completion_tokens"] == given
    assert whole.choice["finish_reason"] == "length"
    assert stream.usages[0]["completion_tokens"] == given
    assert stream.reason() == "length"


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({"max_tokens": 500}, None),
        ({}, None),
    ],
)
async def test_chat_limits_old_and_new(tmp_path: Path, fields: dict[str, Any], given: int | None) -> None:
    async with serving(model(tmp_path)) as api:
        whole = await api.post(CHAT, {"messages": user("Count up."), "temperature": 0, **fields})
        await check_alive(api)
    usage = whole.body["usage"]
    assert whole.choice["finish_reason"] == "length"
    if given is None:
        assert usage["total_tokens"] == WINDOW
    else:
        assert usage["completion_tokens"] == given


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("limit", [0, -1, "5", 5.5, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_limits_that_are_no_limits(shared_api: Client, name: str, limit: Any) -> None:
    refused = await shared_api.chat("x", **{name: limit})
    assert (refused.status, refused.error["param"]) == (400, name)


async def test_the_window_is_what_models_tell(tmp_path: Path) -> None:
    async with serving(model(tmp_path)) as api:
        card = (await api.get("/v1/models/tiny")).body
    assert card["context_length"] == WINDOW
