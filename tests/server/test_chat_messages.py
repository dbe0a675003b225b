"""Messages of all the shapes that clients send, as the model sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import CHAT, Client, Reply, reply, scripted, serving, user

# Only user and assistant, in turn.
STRICT = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{{ raise_exception('no system turns here') }}{%- endif -%}"
    "{%- if m.role != ['user', 'assistant'][loop.index0 % 2] -%}"
    "{{ raise_exception('turn ' ~ loop.index0 ~ ' is out of order') }}{%- endif -%}"
    "({{ m.role[0] }}:{{ m.content }})"
    "{%- endfor -%}{%- if add_generation_prompt -%}(a:{%- endif -%}"
)
# Knows system first, tools, and plain turns that alternate.
WITH_TOOLS = (
    "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}"
    "{%- if m.role in ('user', 'assistant') and not m.tool_calls -%}"
    "{%- if m.role != ['user', 'assistant'][ns.n % 2] -%}"
    "{{ raise_exception('plain turns alternate') }}{%- endif -%}"
    "{%- set ns.n = ns.n + 1 -%}"
    "{%- elif m.role not in ('tool', 'assistant') and not (m.role == 'system' and loop.first) -%}"
    "{{ raise_exception('what is ' ~ m.role) }}{%- endif -%}"
    "({{ m.role }}:{{ m.content or '' }})"
    "{%- endfor -%}{%- if add_generation_prompt -%}(assistant:{%- endif -%}"
)
# Iterates the arguments of past calls as a mapping, as many tool templates do.
MAPPED_ARGUMENTS = (
    "{%- for m in messages -%}({{ m.role }}:{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}[{{ c.function.name }}"
    "{%- for k, v in c.function.arguments | items %} {{ k }}={{ v | tojson }}{%- endfor -%}]{%- endfor -%})"
    "{%- endfor -%}{%- if add_generation_prompt -%}(assistant:{%- endif -%}"
)

ECHO = [reply("", "prompt")]

SYSTEM = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Sky?"}]
DEVELOPER = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Sky?"}]
TWO_USERS = [{"role": "user", "content": "A list."}, {"role": "user", "content": "Sort it."}]
LATE_SYSTEM = [
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Hello."},
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Words?"},
]


def call(arguments: Any, **message: Any) -> dict[str, Any]:
    function = {"name": "clock", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        **message,
    }


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": content}


STOPPED_LOOP = [*user("Find it."), call('{"glob":"*.log"}', content=None), result("app.log"), *user("Stop.")]


async def ask(api: Client, messages: list[Any], **fields: Any) -> Reply:
    return await api.post(CHAT, {"model": "m", "temperature": 0, "messages": messages, **fields})


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (STRICT, SYSTEM, "(u:Be short.\n\nSky?)(a:"),
        (STRICT, DEVELOPER, "(u:Be short.\n\nSky?)(a:"),
        (STRICT, TWO_USERS, "(u:A list.\n\nSort it.)(a:"),
        (STRICT, LATE_SYSTEM, "(u:Hi.)(a:Hello.)(u:Be short.\n\nWords?)(a:"),
        (WITH_TOOLS, SYSTEM, "(system:Be short.)(user:Sky?)(assistant:"),
        (WITH_TOOLS, DEVELOPER, "(system:Be short.)(user:Sky?)(assistant:"),
    ],
)
async def test_strict_templates_get_every_text_once_in_order(
    tmp_path: Path, template: str, messages: list[Any], prompt: str
) -> None:
    async with serving(scripted(tmp_path, ECHO, template=template)) as api:
        assert (await ask(api, messages)).text == prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [STRICT, WITH_TOOLS])
@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "narrator", "content": "Once."}, *user("Go on.")],
        [*user("Write."), {"role": "assistant", "content": "The sea"}],
    ],
    ids=["empty", "unknown role", "ends with the assistant"],
)
async def test_hopeless_messages_are_a_plain_400(
    tmp_path: Path, template: str, messages: list[Any], stream: bool
) -> None:
    async with serving(scripted(tmp_path, ECHO, template=template)) as api:
        refused = await ask(api, messages, stream=stream)
        assert refused.status == 400
        assert refused.error["type"] == "invalid_request_error"
        assert refused.error["param"] == "messages"
        assert (await ask(api, user("Still there?"))).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_in_the_templates_own_words(tmp_path: Path, stream: bool) -> None:
    template = "{{ raise_exception('only on Sundays') }}"
    async with serving(scripted(tmp_path, ECHO, template=template)) as api:
        refused = await ask(api, user("Hi"), stream=stream)
    assert refused.status == 400
    assert (refused.error["param"], refused.error["message"]) == ("messages", "only on Sundays")


async def test_a_stopped_tool_loop_is_served_or_refused_and_the_server_lives(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, ECHO, template=WITH_TOOLS)) as api:
        answer = await ask(api, STOPPED_LOOP)
        assert answer.status in (200, 400)
        if answer.status == 400:
            assert answer.error["param"] == "messages"
        assert (await ask(api, user("Still there?"))).status == 200


HISTORY = [
    {"role": "system", "content": [{"type": "text", "text": "You keep time."}]},
    {"role": "user", "content": [{"type": "text", "text": "<note>"}, {"type": "text", "text": "Wake me."}]},
    call('{"hour": 7, "days": ["mo", "tu"], "label": "früh"}', content=None),
    result([{"type": "text", "text": "ok"}]),
    {"role": "assistant", "content": "Done."},
    *user("And Sunday?"),
]


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        (
            HISTORY,
            '(system:You keep time.)(user:<note>Wake me.)(assistant:[clock hour=7 days=["mo", "tu"]'
            ' label="früh"])(tool:ok)(assistant:Done.)(user:And Sunday?)(assistant:',
        ),
        (
            [*user("T?"), call("", content=None), result("7")],
            "(user:T?)(assistant:[clock])(tool:7)(assistant:",
        ),
        ([*user("T?"), call("{}"), result("7")], "(user:T?)(assistant:[clock])(tool:7)(assistant:"),
        (
            [*user("T?"), call({"tz": "UTC"}, content=""), result("7")],
            '(user:T?)(assistant:[clock tz="UTC"])(tool:7)(assistant:',
        ),
        (
            [*user("Hi"), {"role": "assistant", "content": "Ho", "tool_calls": None}, *user("Bye")],
            "(user:Hi)(assistant:Ho)(user:Bye)(assistant:",
        ),
        ([{"role": "user", "content": []}], "(user:)(assistant:"),
        (
            [*user("Hi"), {"role": "assistant", "content": None, "refusal": "I will not."}, *user("Bye")],
            "(user:Hi)(assistant:I will not.)(user:Bye)(assistant:",
        ),
    ],
)
async def test_replayed_history(tmp_path: Path, messages: list[Any], prompt: str) -> None:
    async with serving(scripted(tmp_path, ECHO, template=MAPPED_ARGUMENTS)) as api:
        assert (await ask(api, messages)).text == prompt
        assert (await ask(api, messages)).text == prompt


@pytest.mark.parametrize("arguments", ['{"tz": "UT', "[1, 2]"])
async def test_one_bad_old_call_does_not_end_the_session(tmp_path: Path, arguments: str) -> None:
    messages = [*user("T?"), call(arguments, content=None), result("bad call")]
    async with serving(scripted(tmp_path, ECHO, template=MAPPED_ARGUMENTS)) as api:
        answer = await ask(api, messages)
    assert "None" not in answer.text
    assert arguments.replace('"', '\\"') in answer.text


async def test_what_a_client_got_back_it_can_send_back(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, [reply("first", ["one"]), reply("second", "prompt")])) as api:
        first = await ask(api, user("first"))
        second = await ask(api, [*user("first"), first.choice["message"], *user("second")])
    assert "<|im_start|>assistant\none<|im_end|>" in second.text


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}, "image"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio"),
        ({"type": "file", "file": {"file_id": "f"}}, "file"),
        ({"type": "hologram"}, "hologram"),
        ({"type": "text", "text": 5}, "5"),
        ({"type": "text", "text": "a", "bold": True}, "bold"),
    ],
)
async def test_parts_that_are_no_text_are_refused_by_name(
    tmp_path: Path, part: dict[str, Any], kind: str
) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    async with serving(scripted(tmp_path, ECHO)) as api:
        refused = await ask(api, messages)
    assert refused.status == 400
    assert refused.error["param"].startswith("messages")
    assert kind in refused.error["message"]


async def test_control_text_of_a_user_stays_text(tmp_path: Path) -> None:
    replies = [reply("", "prompt")]
    special = [reply("never", [{"special": "<|stop|>"}])]
    template = "<|stop|>{{ messages[0].content }}"
    async with serving(scripted(tmp_path, special + replies, template=template)) as api:
        # The template's own control token gives no text; the user's nine characters do.
        assert (await ask(api, user("say <|stop|>"))).text == "say <|stop|>"


async def test_template_variables_reach_the_template(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{{ '!' * (volume or 0) }}"
    async with serving(scripted(tmp_path, ECHO, template=template)) as api:
        assert (await ask(api, user("Hi"), chat_template_kwargs={"volume": 3})).text == "Hi!!!"
        refused = await ask(api, user("Hi"), chat_template_kwargs={"messages": []})
        assert refused.error["param"] == "chat_template_kwargs"
        refused = await ask(api, user("Hi"), chat_template_kwargs=[1])
        assert refused.error["param"] == "chat_template_kwargs"
