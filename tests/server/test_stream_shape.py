"""The form of streams: finish reasons, roles, usage, ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import CHAT, COMPLETIONS, reply, scripted, serving, user

TOWN = reply("harbour", ["Cape", " Town", "."])
EMPTY = reply("silence", [])

SHAPES = {
    "natural end": ("a harbour", {}, "Cape Town.", "stop", 4),
    "usage asked": ("a harbour", {"stream_options": {"include_usage": True}}, "Cape Town.", "stop", 4),
    "usage refused": ("a harbour", {"stream_options": {"include_usage": False}}, "Cape Town.", "stop", 4),
    "cut": ("a harbour", {"max_tokens": 2}, "Cape Town", "length", 2),
    "end token at once": ("silence", {}, "", "stop", 1),
    "end token at the limit": ("a harbour", {"max_tokens": 4}, "Cape Town.", "stop", 4),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_text_reason_and_usage_agree_streamed_and_whole(tmp_path: Path, path: str, name: str) -> None:
    text, fields, expected, reason, num_tokens = SHAPES[name]
    prompt: dict[str, Any] = {"messages": user(text)} if path == CHAT else {"prompt": text}
    body = {"model": "m", "temperature": 0, **prompt, **fields}
    async with serving(scripted(tmp_path, [TOWN, EMPTY])) as api:
        stream = await api.stream(path, body)
        body.pop("stream_options", None)
        whole = await api.post(path, body)

    assert (stream.text(), stream.reason()) == (expected, reason)
    assert (whole.text, whole.choice["finish_reason"]) == (expected, reason)
    assert whole.body["usage"]["completion_tokens"] == num_tokens
    kind = "chat.completion" if path == CHAT else "text_completion"
    assert whole.body["object"] == kind
    assert {chunk["object"] for chunk in stream.chunks} == {kind + ".chunk" if path == CHAT else kind}
    if name == "usage asked":
        *chunks, last = stream.events
        assert last["choices"] == []
        assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
        totals = dict(last["usage"])
        del totals["prompt_tokens_details"]
        assert totals == {key: value for key, value in whole.body["usage"].items() if key in totals}
    else:
        assert stream.usages == []


async def test_a_stream_without_text_still_has_its_role(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, [EMPTY])) as api:
        stream = await api.stream_chat("silence")
    assert [choice["delta"] for choice in stream.choices()] == [{"role": "assistant", "content": ""}, {}]


@pytest.mark.parametrize("stream", [None, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stream_options_go_with_streams_alone(tmp_path: Path, path: str, stream: bool | None) -> None:
    body = {"messages": user("a harbour")} if path == CHAT else {"prompt": "a harbour"}
    async with serving(scripted(tmp_path, [TOWN])) as api:
        refused = await api.post(path, {**body, "stream": stream, "stream_options": {"include_usage": True}})
    assert refused.status == 400
    assert refused.error["param"] == "stream_options"


async def test_choices_of_one_stream_are_told_apart_by_index(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, [TOWN])) as api:
        stream = await api.stream_chat("a harbour", n=3, stream_options={"include_usage": True})
        whole = await api.chat("a harbour", n=3)
    assert [stream.text(index) for index in range(3)] == ["Cape Town."] * 3
    assert [stream.reason(index) for index in range(3)] == ["stop"] * 3
    assert [choice["index"] for choice in whole.body["choices"]] == [0, 1, 2]
    one = whole.body["usage"]
    assert one["completion_tokens"] == 12
    assert stream.usages[0]["prompt_tokens"] == one["prompt_tokens"] < 60


async def test_characters_are_never_split(tmp_path: Path) -> None:
    pieces = ["a", {"hex": "f09f"}, {"hex": "9a80"}, "b", {"hex": "e2"}, {"hex": "82"}]
    async with serving(scripted(tmp_path, [reply("", pieces)])) as api:
        stream = await api.stream_chat("fly")
        whole = await api.chat("fly")
    assert stream.pieces() == ["a", "🚀", "b", "\N{REPLACEMENT CHARACTER}"]
    assert whole.text == stream.text()


async def test_a_repeated_prompt_reports_its_cached_tokens_in_both_modes(tmp_path: Path) -> None:
    text = "a harbour " + "x" * 200
    async with serving(scripted(tmp_path, [TOWN])) as api:
        cold = await api.chat(text)
        warm = await api.chat(text)
        stream = await api.stream_chat(text, stream_options={"include_usage": True})
    assert cold.body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert warm.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 128
    assert stream.usages == [warm.body["usage"]]
