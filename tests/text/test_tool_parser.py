"""Hermes calls: the same events for every split, calls never as text, text never as calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.errors import UsageError
from mlxserve.text.chat_template import BUILTIN_TEMPLATES
from mlxserve.text.tool_parser import ContentDelta, ToolCall, ToolEvent, detect_tool_format, tool_parser_for

TEMPLATES = Path(__file__).parents[2].parent / "shared" / "templates"


def parse(pieces: list[str], *, cut: bool = False) -> tuple[str, list[ToolCall]]:
    parser = tool_parser_for("hermes")
    events: list[ToolEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    events += parser.finish(cut)
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    return content, [event for event in events if isinstance(event, ToolCall)]


def block(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_with_text_before_and_between() -> None:
    text = (
        f"Let me look.\n{block('find', glob='*.log')}\n{block('find', glob='*.txt')}\nthen {block('clock')}"
    )
    content, calls = parse([text])
    assert content == "Let me look.then"
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("find", {"glob": "*.log"}),
        ("find", {"glob": "*.txt"}),
        ("clock", {}),
    ]


@pytest.mark.parametrize(
    "text", ["", " \n", "plain\n", "a < b", "x <tool_", "  two  spaces  ", "</tool_call>"]
)
def test_text_without_a_call_is_unchanged(text: str) -> None:
    assert parse(list(text)) == (text, [])


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        '{"name": "f", "arguments": {',
        "[1, 2]",
        '{"arguments": {}}',
        '{"name": "f", "arguments": 3}',
    ],
)
def test_a_whole_block_that_is_no_call_is_content(body: str) -> None:
    text = f"a \n <tool_call>{body}</tool_call> b"
    assert parse(list(text)) == (text, [])


def test_a_closing_tag_inside_a_string_is_part_of_it() -> None:
    text = block("write", text='say "</tool_call>" \\ now')
    _, [call] = parse(list(text))
    assert json.loads(call.arguments) == {"text": 'say "</tool_call>" \\ now'}


def test_a_stray_quote_does_not_swallow_the_next_call() -> None:
    broken = '<tool_call>{"name": "f}</tool_call>'
    content, calls = parse([broken, block("g")])
    assert (content, [call.name for call in calls]) == (broken, ["g"])


def test_a_call_without_its_closing_tag_counts_only_when_the_model_ended_its_turn() -> None:
    text = block("clock").removesuffix("\n</tool_call>")
    assert parse([text])[1] == [ToolCall("clock", "{}")]
    assert parse([text], cut=True) == ("", [])


def test_arguments_as_a_json_string_and_non_ascii() -> None:
    _, [call] = parse(['<tool_call>{"name": "f", "arguments": "{\\"label\\": \\"früh\\"}"}</tool_call>'])
    assert call.arguments == '{"label": "früh"}'


FRAGMENTS = st.sampled_from(
    [
        block("f", a=1),
        block("g", text="</tool_call>\n<tool_call>"),
        "<tool_call>broken</tool_call>",
        "<tool_call>",
        "</tool_call>",
        "<tool",
        '{"name": "x"}',
        "text",
        " ",
        "\n",
        '"',
        "\\",
        "<",
        "é🚀",
    ]
)


@given(st.lists(FRAGMENTS, max_size=8), st.booleans(), st.data())
def test_the_split_makes_no_difference(fragments: list[str], cut: bool, data: st.DataObject) -> None:
    text = "".join(fragments)
    whole = parse([text], cut=cut)
    assert parse(list(text), cut=cut) == whole
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert parse(pieces, cut=cut) == whole


def test_no_cut_of_an_answer_leaks_a_tag() -> None:
    text = f"Sure.\n{block('f', a='x < y')}\n{block('g')}"
    for end in range(len(text)):
        content, calls = parse([text[:end]], cut=True)
        assert content.rstrip() == "Sure."[:end]
        assert calls == parse([text])[1][: text[:end].count("</tool_call>")]


def test_a_long_answer_takes_linear_time() -> None:
    text = block("write", text="x <tool_call> " * 20_000)
    _, [call] = parse(list(text))
    assert len(call.arguments) > 280_000
    hiding = '<tool_call>\\"</tool_call>' * 20_000
    assert parse([hiding]) == (hiding, [])


def test_formats() -> None:
    assert detect_tool_format(BUILTIN_TEMPLATES["chatml"]) == "hermes"
    assert detect_tool_format("{{ '<tool_call>\\n<function=' + name }}") is None
    assert detect_tool_format("{{ messages }}") is None
    with pytest.raises(UsageError, match=r"'nope'.*hermes"):
        tool_parser_for("nope")


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="the shared templates are not beside the checkout")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", "hermes"),
        ("Qwen-Qwen3-0.6B", "hermes"),
        ("Qwen-QwQ-32B", "hermes"),
        ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "hermes"),
        ("ibm-granite-granite-4.1", "hermes"),
        ("Qwen3.5-4B", None),
        ("GLM-4.6", None),
        ("unsloth-Apriel-1.5", None),
        ("poolside-Laguna-XS.2", None),
        ("meta-llama-Llama-3.1-8B-Instruct", None),
    ],
)
def test_formats_of_published_templates(name: str, expected: str | None) -> None:
    assert detect_tool_format((TEMPLATES / f"{name}.jinja").read_text("utf-8")) == expected
