"""Tool calls: incremental deltas, finish reasons, cut calls, choices of tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxserve.engine.served_model import ServedModel
from tests.server.serving import Client, Stream, reply, scripted, serving

TOOLS = [
    {"type": "function", "function": {"name": "moon", "parameters": {"type": "object", "properties": {}}}},
    {
        "type": "function",
        "function": {
            "name": "tide",
            "description": "Height of the tide.",
            "parameters": {
                "type": "object",
                "properties": {"harbor": {"type": "string"}},
                "required": ["harbor"],
            },
        },
    },
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("tide", {"harbor": "Vila Real"}),
    ("tide", {"harbor": 'Póvoa </tool_call> "north"'}),
    ("moon", {}),
    ("tide", {"harbor": "Faro"}),
]


def block(name: str, arguments: dict[str, Any]) -> str:
    return (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
    )


TEXT = "\n".join(["Just a moment.", *(block(*call) for call in CALLS)])
FEEDS = {
    "character by character": {"pieces": list(TEXT)},
    "all at once": {"pieces": [TEXT]},
    "two tokens a step": {"pieces": [TEXT[i : i + 7] for i in range(0, len(TEXT), 7)], "burst": 2},
}
CUT = [
    "<tool_call>",
    '\n{"name"',
    ': "tide"',
    ', "arguments"',
    ': {"harbor"',
    ': "Fa',
    'ro"}}',
    "\n</tool_call>",
]


def model(tmp_path: Path, *replies: dict[str, Any], **top_level: Any) -> ServedModel:
    return scripted(tmp_path, replies, tool_format="hermes", **top_level)


def streamed_calls(stream: Stream) -> list[tuple[str, dict[str, Any]]]:
    """The calls, put together by index as clients do, after checks of each delta's form."""
    calls: dict[int, dict[str, Any]] = {}
    for choice in stream.choices():
        for delta in choice["delta"].get("tool_calls", ()):
            index = delta["index"]
            if index not in calls:
                assert index == len(calls)
                assert delta["type"] == "function" and delta["id"] and delta["function"]["name"]
                calls[index] = {"id": delta["id"], "name": delta["function"]["name"], "arguments": ""}
            else:
                assert not delta.keys() & {"id", "type"} and "name" not in delta["function"]
            calls[index]["arguments"] += delta["function"]["arguments"]
    assert len({call["id"] for call in calls.values()}) == len(calls)
    return [(call["name"], json.loads(call["arguments"])) for call in calls.values()]


@pytest.mark.parametrize("feed", FEEDS)
async def test_parallel_calls_of_one_function(tmp_path: Path, feed: str) -> None:
    async with serving(model(tmp_path, reply("", **FEEDS[feed]))) as api:
        stream = await api.stream_chat("tides", tools=TOOLS)
        whole = await api.chat("tides", tools=TOOLS)
    assert streamed_calls(stream) == CALLS
    assert (stream.text().strip(), stream.reason()) == ("Just a moment.", "tool_calls")
    message = whole.choice["message"]
    assert whole.choice["finish_reason"] == "tool_calls"
    assert message["content"].strip() == "Just a moment."
    assert [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ] == CALLS
    assert len({call["id"] for call in message["tool_calls"]}) == len(CALLS)
    assert all("index" not in call for call in message["tool_calls"])


@pytest.mark.parametrize("feed", FEEDS)
async def test_without_parallel_calls_the_first_ends_the_turn(tmp_path: Path, feed: str) -> None:
    fields = {"tools": TOOLS, "parallel_tool_calls": False}
    async with serving(model(tmp_path, reply("", end="run", **FEEDS[feed]))) as api:
        stream = await api.stream_chat("tides", **fields)
        whole = await api.chat("tides", **fields)
        await api.wait_running(0)
    assert streamed_calls(stream) == CALLS[:1]
    assert stream.reason() == whole.choice["finish_reason"] == "tool_calls"
    assert len(whole.choice["message"]["tool_calls"]) == 1


async def test_a_call_alone_has_null_content(tmp_path: Path) -> None:
    async with serving(model(tmp_path, reply("", [block("moon", {})]))) as api:
        whole = await api.chat("moon", tools=TOOLS)
        stream = await api.stream_chat("moon", tools=TOOLS)
    assert whole.choice["message"]["content"] is None
    assert whole.choice["message"]["tool_calls"][0]["function"] == {"name": "moon", "arguments": "{}"}
    assert stream.text() == ""


@pytest.mark.parametrize("max_tokens", [1, 3, 6, 7])
async def test_a_call_cut_by_the_limit_is_no_call_and_no_text(tmp_path: Path, max_tokens: int) -> None:
    fields = {"tools": TOOLS, "max_tokens": max_tokens}
    async with serving(model(tmp_path, reply("", CUT))) as api:
        stream = await api.stream_chat("tide", **fields)
        whole = await api.chat("tide", **fields)
    assert (streamed_calls(stream), stream.text(), stream.reason()) == ([], "", "length")
    assert whole.choice["finish_reason"] == "length"
    assert not whole.choice["message"]["content"]
    assert "tool_calls" not in whole.choice["message"]


async def test_a_whole_call_before_a_cut_one_stays(tmp_path: Path) -> None:
    pieces = [block("moon", {}), *CUT]
    async with serving(model(tmp_path, reply("", pieces))) as api:
        stream = await api.stream_chat("both", tools=TOOLS, max_tokens=4)
    assert (streamed_calls(stream), stream.text(), stream.reason()) == ([("moon", {})], "", "length")


async def test_text_that_only_looks_like_a_call_is_text(tmp_path: Path) -> None:
    text = "a <tool_cal and:<tool_call>no json</tool_call> b"
    async with serving(model(tmp_path, reply("", list(text)))) as api:
        stream = await api.stream_chat("x", tools=TOOLS)
    assert (stream.text(), stream.reason()) == (text, "stop")


async def test_tools_are_in_the_prompt_unless_the_choice_is_none(tmp_path: Path) -> None:
    async with serving(model(tmp_path, reply("show", "prompt"), reply("", [block("moon", {})]))) as api:
        shown = await api.chat("show", tools=TOOLS, tool_choice="auto")
        hidden = await api.chat("show", tools=TOOLS, tool_choice="none")
        no_parsing = await api.chat("call", tools=TOOLS, tool_choice="none")
        empty = await api.chat("show", tools=[])
        bare = await api.chat("show")
    assert "Height of the tide." in shown.text
    assert hidden.text == empty.text == bare.text
    assert "Height of the tide." not in hidden.text
    assert no_parsing.text == block("moon", {})
    assert no_parsing.choice["finish_reason"] == "stop"


async def test_stop_strings_come_before_calls(tmp_path: Path) -> None:
    async with serving(
        model(tmp_path, reply("", ["So: ", block("moon", {}), " END", block("moon", {})]))
    ) as api:
        stream = await api.stream_chat("x", tools=TOOLS, stop="END")
    assert streamed_calls(stream) == [("moon", {})]
    assert stream.reason() == "tool_calls"


FUNCTION = {"name": "f", "parameters": {}}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "moon"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"tools": ["moon"]}, "tools"),
        ({"tools": [{"type": "retrieval", "function": FUNCTION}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {**FUNCTION, "x": 1}}]}, "tools[0].function.x"),
        (
            {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]},
            "tools[0].function.strict",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [FUNCTION]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    shared_api: Client, fields: dict[str, Any], param: str
) -> None:
    refused = await shared_api.chat("x", **fields)
    assert refused.status == 400
    assert refused.error["param"] == param


async def test_tools_need_a_template_whose_calls_can_be_read(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}"
    async with serving(scripted(tmp_path, [reply("", ["x"])], template=template)) as api:
        refused = await api.chat("x", tools=TOOLS)
        served = await api.chat("x", tools=TOOLS, tool_choice="none")
    assert refused.status == 400
    assert (refused.error["param"], refused.error["code"]) == ("tools", "unsupported_parameter")
    assert served.text == "x"
