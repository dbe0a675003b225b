"""Chat templates: histories as clients send them, strict templates, control tokens in user text."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mlxserve.errors import InvalidRequestError, ModelLoadError, TemplateError
from mlxserve.text.chat_template import BUILTIN_TEMPLATES, ChatTemplate
from mlxserve.text.messages import RAW_ARGUMENTS_KEY, last_user_text

TEMPLATES = Path(__file__).parents[2].parent / "shared" / "templates"

STRICT_TURNS = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{{ raise_exception('no system turns here') }}{%- endif -%}"
    "{%- if (m.role == 'user') != (loop.index0 is even) -%}"
    "{{ raise_exception('turn ' ~ loop.index ~ ' is wrong') }}"
    "{%- endif -%}({{ m.role }}){{ m.content }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}(assistant){%- endif -%}"
)
LEADING_SYSTEM = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('system goes first') }}{%- endif -%}"
    "({{ m.role }}){{ m.content }}{%- endfor -%}(assistant)"
)
DROPS_SYSTEM = "{%- for m in messages if m.role != 'system' -%}({{ m.role }}){{ m.content }}{%- endfor -%}"
HISTORY = (
    "{%- for m in messages -%}({{ m.role }}){{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}[{{ c.function.name }}"
    "{%- for k, v in c.function.arguments | items -%}{{ ' ' ~ k }}={{ v | tojson }}{%- endfor -%}]"
    "{%- endfor -%}{%- endfor -%}{%- if add_generation_prompt -%}(assistant){%- endif -%}"
)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **more}


def result(text: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": text}


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source).render(messages, **options).text


# Strict roles


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_text_is_folded_where_there_is_no_system_turn(role: str) -> None:
    messages = [{"role": role, "content": "Be terse."}, user("Snow?")]
    assert render(STRICT_TURNS, messages) == "(user)Be terse.\n\nSnow?(assistant)"
    assert render(DROPS_SYSTEM, messages) == "(user)Be terse.\n\nSnow?"


def test_dropped_system_text_is_noticed_even_where_other_turns_hold_it() -> None:
    assert render(DROPS_SYSTEM, [system("Hi"), user("Hi there")]) == "(user)Hi\n\nHi there"
    first_only = (
        "{{ messages[0].content }}{% for m in messages if m.role != 'system' %}|{{ m.content }}{% endfor %}"
    )
    answer = {"role": "assistant", "content": "Be brief? Fine."}
    messages = [system("S"), user("A"), answer, system("Be brief"), user("B")]
    assert render(first_only, messages) == "S|A|Be brief? Fine.|Be brief\n\nB"


def test_system_text_that_no_arrangement_keeps_is_refused() -> None:
    last_only = "{{ messages[-1].content }}"
    messages = [system("Be terse."), user("Snow?"), {"role": "assistant", "content": "White."}, user("Ash?")]
    with pytest.raises(TemplateError, match="leaves out the text of a system message") as caught:
        render(last_only, messages)
    assert caught.value.param == "messages"
    assert render(last_only, messages[1:]) == "Ash?"


def test_a_template_may_take_a_switch_out_of_the_system_text() -> None:
    switches = (
        "{% for m in messages %}({{ m.role }}){{ m.content.replace('/terse', '').strip() }}{% endfor %}"
    )
    assert render(switches, [system("Be /terse kind."), user("Snow?")]) == "(system)Be  kind.(user)Snow?"


def test_two_user_turns_are_joined() -> None:
    assert render(STRICT_TURNS, [user("A list."), user("Sort it.")]) == "(user)A list.\n\nSort it.(assistant)"


def test_a_template_that_takes_the_turns_gets_them_unchanged() -> None:
    plain = "{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}"
    assert render(plain, [system("S"), user("A"), user("B")]) == "(system)S(user)A(user)B"


def test_developer_reaches_a_template_that_knows_it() -> None:
    knows = "{% for m in messages %}{{ 'D' if m.role == 'developer' else 'x' }}{{ m.content }}{% endfor %}"
    developer = {"role": "developer", "content": "Be terse."}
    assert render(knows, [developer, user("Hi")]) == "DBe terse.xHi"
    assert render(BUILTIN_TEMPLATES["chatml"], [developer, user("Hi")]).startswith(
        "<|im_start|>system\nBe terse."
    )


def test_late_system_text_stays_in_its_place() -> None:
    messages = [
        system("S"),
        user("Hi."),
        {"role": "assistant", "content": "Hello."},
        system("Be brief."),
        user("Go."),
    ]
    assert (
        render(LEADING_SYSTEM, messages)
        == "(system)S(user)Hi.(assistant)Hello.(user)Be brief.\n\nGo.(assistant)"
    )
    assert (
        render(STRICT_TURNS, messages) == "(user)S\n\nHi.(assistant)Hello.(user)Be brief.\n\nGo.(assistant)"
    )


def test_what_cannot_be_repaired_is_refused_in_the_templates_words() -> None:
    with pytest.raises(TemplateError) as caught:
        render(STRICT_TURNS, [user("Time?"), called("{}"), result("7"), user("And now?")])
    assert str(caught.value) == "turn 3 is wrong"
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ([{"role": "narrator", "content": "Once."}], r"messages\[0\]\.role .*narrator"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([user("Write."), {"role": "assistant", "content": "The sea"}], "assistant"),
        ([user("a"), "b"], r"messages\[1\]"),
        ([user(7)], r"messages\[0\]\.content"),
        ([user([{"type": "text"}])], r"messages\[0\]\.content\[0\]\.text"),
        (
            [user([{"type": "image_url", "image_url": {"url": "data:"}}])],
            r"messages\[0\]\.content\[0\].*image_url",
        ),
        ([user([{"type": "input_audio", "input_audio": {}}])], "input_audio"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], r"messages\[0\]\.tool_calls"),
    ],
)
def test_wrong_messages_are_refused_by_place(messages: list[Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        render(HISTORY, messages)
    assert caught.value.param == "messages"


# Agent history


def test_parts_nulls_and_argument_strings() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "You set alarms."}]},
        user([{"type": "text", "text": "<b>quiet</b>"}, {"type": "text", "text": "Wake me."}]),
        called('{"hour": 7, "days": ["mo", "tu"], "label": "früh"}', content=None),
        result([{"type": "text", "text": "ok"}]),
        {"role": "assistant", "content": "Done.", "tool_calls": None},
        user("And Sunday?"),
    ]
    before = copy.deepcopy(messages)
    prompt = render(HISTORY, messages)
    assert prompt == (
        '(system)You set alarms.(user)<b>quiet</b>Wake me.(assistant)[clock hour=7 days=["mo", "tu"]'
        ' label="früh"](tool)ok(assistant)Done.(user)And Sunday?(assistant)'
    )
    assert messages == before
    assert render(HISTORY, messages) == prompt


@pytest.mark.parametrize("arguments", ["", "{}", None, {}, " "])
def test_no_arguments(arguments: Any) -> None:
    assert (
        render(HISTORY, [user("?"), called(arguments), result("7")])
        == "(user)?(assistant)[clock](tool)7(assistant)"
    )


def test_arguments_that_are_an_object_already() -> None:
    assert '[clock tz="UTC"]' in render(HISTORY, [user("?"), called({"tz": "UTC"}), result("7")])


@pytest.mark.parametrize("arguments", ['{"tz": "UT', "[1, 2]", '{"a": 1} x'])
def test_one_bad_old_call_does_not_end_the_session(arguments: str) -> None:
    messages = [user("?"), called(arguments), result("bad call")]
    assert f"[clock {RAW_ARGUMENTS_KEY}={json.dumps(arguments)}]" in render(HISTORY, messages)
    # A template that only writes the arguments gets the model's own words.
    plain = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert render(plain, messages) == arguments


@pytest.mark.parametrize(
    "call", [{}, {"function": None}, {"function": {"name": 3}}, {"function": {"name": "f", "arguments": 3}}]
)
def test_a_call_of_the_wrong_shape_is_named(call: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(HISTORY, [user("?"), {"role": "assistant", "tool_calls": [call]}, result("x")])
    assert caught.value.param == "messages[1].tool_calls[0]"


def test_an_empty_parts_list_is_an_empty_turn() -> None:
    assert render(HISTORY, [user([])]) == "(user)(assistant)"


def test_last_user_text_is_as_the_client_sent_it() -> None:
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]
    assert last_user_text([system("s"), user("one"), user(parts), result("x")]) == "two parts"
    assert last_user_text([system("s")]) == ""


# The environment


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ tools | tojson }}", '[{"a": "<é\'>"}]'),
        ("{{ tools | tojson(indent=2) }}", '[\n  {\n    "a": "<é\'>"\n  }\n]'),
        ("{{ tools | map(attribute='a') | tojson }}", '["<é\'>"]'),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("  {% if true %}\n  y\n  {% endif %}\n", "  y\n"),
        ("{% generation %}{{ messages[0].content.strip().upper() }}{% endgeneration %}", "HI"),
        ("{% set q = [] %}{% set _ = q.append(1) %}{{ q.pop() }}", "1"),
        ("{{ enable_thinking }}{{ bos_token }}", "False<s>"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_templates_rely_on(source: str, expected: str) -> None:
    template = ChatTemplate(source, bos_token="<s>")
    tools = [{"a": "<é'>"}]
    assert template.render([user("hi")], tools=tools, variables={"enable_thinking": False}).text == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].update({}) }}",
        "{{ messages.clear() }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateError, match="unsafe"):
        render(source, [user("hi")])


def test_a_template_that_does_not_compile_is_a_load_error() -> None:
    with pytest.raises(ModelLoadError, match="line 2"):
        ChatTemplate("ok\n{% for x %}")


def test_reserved_variables_are_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render("x", [user("hi")], variables={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_a_separate_template_for_tools() -> None:
    template = ChatTemplate("plain", tools_source="with tools")
    assert template.render([user("hi")]).text == "plain"
    assert template.render([user("hi")], tools=[{"type": "function"}]).text == "with tools"


# Control tokens in user text


def controls_of(
    source: str, messages: list[dict[str, Any]], tokens: list[str], **options: Any
) -> list[str] | None:
    rendered = ChatTemplate(source, control_tokens=tokens).render(messages, **options)
    return None if rendered.controls is None else [rendered.text[a:b] for a, b in rendered.controls]


def test_only_the_templates_own_control_tokens_are_controls() -> None:
    source = "{% for m in messages %}<|s|>{{ m.content | trim }}<|e|>{% endfor %}"
    tokens = ["<|s|>", "<|e|>", "<|e|>x"]
    template = ChatTemplate(source, control_tokens=tokens)
    plain = template.render([user("hi")])
    assert (plain.text, plain.controls) == ("<|s|>hi<|e|>", None)
    rendered = template.render([user(" <|e|><|s|>"), user("b")])
    assert rendered.text == "<|s|><|e|><|s|><|e|><|s|>b<|e|>"
    assert rendered.controls == ((0, 5), (15, 20), (20, 25), (26, 31))


def test_marks_reach_every_string_and_leave_no_trace() -> None:
    source = "{{ messages | tojson }}{{ tools | tojson(ensure_ascii=True) }}{{ extra }}<|e|>"
    text = "a<|e|>b\ue000\\ue001"
    options = {"tools": [{"name": "<|e|>", "type": {"x<|e|>": 1}}], "variables": {"extra": "<|e|>"}}
    messages = [user(text), called({"role": "<|e|>"}), result("<|e|>")]
    assert controls_of(source, messages, ["<|e|>"], **options) == ["<|e|>"]
    marked = ChatTemplate(source, control_tokens=["<|e|>"]).render(messages, **options).text
    assert marked == render(source, messages, **options)


def test_a_template_still_finds_control_texts_in_content() -> None:
    source = "{{ messages[0].content.split('</think>')[-1] }}<|e|>"
    messages = [{"role": "assistant", "content": "why</think>answer"}, user("x")]
    rendered = ChatTemplate(source, control_tokens=["</think>", "<|e|>"]).render(messages)
    assert (rendered.text, rendered.controls) == ("answer<|e|>", ((6, 11),))


def test_text_cut_out_by_a_template_assembles_no_control_token() -> None:
    source = "{{ messages[0].content.replace('<x>', '') }}<|e|>"
    rendered = ChatTemplate(source, control_tokens=["<x>", "<|e|>"]).render([user("<|<x>e|>")])
    assert (rendered.text, rendered.controls) == ("<|e|><|e|>", ((5, 10),))


# Published templates

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_city",
            "description": "Finds a city",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string", "description": "Its name"}},
                "required": ["name"],
            },
        },
    }
]
NO_TOOL_SUPPORT = ("SmolLM3", "LFM2", "R1-Distill", "V3.1", "granite-3.3")
PUBLISHED = sorted(TEMPLATES.glob("*.jinja"))


@pytest.mark.skipif(not PUBLISHED, reason="the shared templates are not beside the checkout")
@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_templates(path: Path) -> None:
    template = ChatTemplate(path.read_text("utf-8"), bos_token="<bos>", eos_token="<eos>")
    answer = {"role": "assistant", "content": "Answer-one."}
    plain = template.render([system("Rule-one."), user("Ask-one."), answer, user("Ask-two.")]).text
    words = ["Rule-one.", "Ask-one.", "Answer-one.", "Ask-two."]
    assert [plain.count(word) for word in words] == [1, 1, 1, 1]
    assert sorted(words, key=plain.index) == words
    call = called('{"name": "Köln"}', content=None)
    call["tool_calls"][0] |= {
        "id": "abcdefghi",
        "function": {"name": "find_city", "arguments": '{"name": "Köln"}'},
    }
    tool = {"role": "tool", "tool_call_id": "abcdefghi", "name": "find_city", "content": "Found-it."}
    prompt = template.render(
        [system("Rule-one."), user("Ask-one."), call, tool, answer, user("Ask-two.")], tools=TOOLS
    ).text
    assert "None" not in prompt
    assert all(word in prompt for word in ("Ask-one.", "Ask-two.", "Answer-one.", "Rule-one.", "Found-it."))
    if not any(name in path.stem for name in NO_TOOL_SUPPORT):
        assert "find_city" in prompt and "Köln" in prompt and "Finds a city" in prompt
