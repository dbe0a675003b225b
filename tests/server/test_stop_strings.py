"""Stop strings over HTTP, on both routes, streamed and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import CHAT, COMPLETIONS, Client, reply, scripted, serving, user

# stop, pieces, max_tokens, text, finish reason, completion tokens
CASES: dict[str, tuple[list[str], list[str], int | None, str, str, int]] = {
    "over four tokens": (
        ["six, seven"],
        ["sum: fi", "ve, s", "ix, s", "ev", "en", " x"],
        None,
        "sum: five, ",
        "stop",
        5,
    ),
    "tail at the end token": (["FIN of it"], ["at FI", "N o"], None, "at FIN o", "stop", 3),
    "tail at the limit": (["FIN of it"], ["at FI", "N o"], 2, "at FIN o", "length", 2),
    "inside one token": (["%%"], ["p", "q%%rest"], None, "pq", "stop", 2),
    "at the start": (["%%"], ["%", "%rest"], None, "", "stop", 2),
    "overlapping near miss": (["xxy"], ["xx", "xx", "xy", "w"], None, "xxx", "stop", 3),
    "two stops, the short one": (
        ["gamma and so on", "pi rho"],
        ["iota p", "i r", "ho gam", "ma"],
        None,
        "iota ",
        "stop",
        3,
    ),
    "text like a control token": (
        ["<|end|>"],
        ["good ", "<|", "en", "d", "|>", " more"],
        None,
        "good ",
        "stop",
        5,
    ),
    "newline inside a token": (["\n"], ["one", "\n\ntwo"], None, "one", "stop", 2),
    "long stop never completed": (["friend: wait please"], ["fri", "end"], None, "friend", "stop", 3),
}


def _fields(path: str, text: str) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": user(text)} if path == CHAT else {"prompt": text}
    return {"model": "m", "temperature": 0, **prompt}


@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_text_ends_before_the_stop(tmp_path: Path, path: str, name: str, burst: int) -> None:
    stop, pieces, max_tokens, expected, reason, num_tokens = CASES[name]
    body = {**_fields(path, "go"), "stop": stop, "max_tokens": max_tokens}
    async with serving(scripted(tmp_path, [reply("go", pieces, burst=burst)])) as api:
        whole = await api.post(path, body)
        stream = await api.stream(path, {**body, "stream_options": {"include_usage": True}})
        await api.wait_running(0)

    assert (whole.text, whole.choice["finish_reason"]) == (expected, reason)
    assert (stream.text(), stream.reason()) == (expected, reason)
    assert whole.body["usage"]["completion_tokens"] == num_tokens
    assert stream.usages[0]["completion_tokens"] == num_tokens


async def test_text_waits_only_while_it_may_grow_into_a_stop(tmp_path: Path) -> None:
    pieces = ["the EN", "D o", "ther", " side"]
    async with serving(scripted(tmp_path, [reply("", pieces)])) as api:
        stream = await api.stream_chat("go", stop="END of line")
    assert stream.pieces() == ["the ", "END other", " side"]


async def test_the_row_really_ends_at_the_match_and_others_go_on(tmp_path: Path) -> None:
    replies = [reply("ender", ["a", "b", "STOP", "c"], "run"), reply("", ["x"] * 40)]

    async def other(api: Client) -> str:
        return (await api.chat("other", stop=["STOP"])).text

    async with serving(scripted(tmp_path, replies)) as api:
        ended = await api.chat("ender", stop=["STOP"])
        assert ended.text == "ab"
        assert await other(api) == "x" * 40
        await api.wait_running(0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stop", ["%%", ["%%"], [], None, ["1", "2", "3", "%%"]])
async def test_accepted_shapes(tmp_path: Path, path: str, stop: Any) -> None:
    async with serving(scripted(tmp_path, [reply("", ["a%%b"])])) as api:
        served = await api.post(path, {**_fields(path, "go"), "stop": stop})
    assert served.text == ("a" if stop else "a%%b")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stop", [["1", "2", "3", "4", "5"], [""], "", 7, ["a", 7], {"a": 1}, True])
async def test_refused_shapes(shared_api: Client, path: str, stop: Any) -> None:
    refused = await shared_api.post(path, {**_fields(path, "go"), "stop": stop})
    assert refused.status == 400
    assert refused.error["param"] == "stop"
