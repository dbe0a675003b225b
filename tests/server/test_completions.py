"""/v1/completions: prompts of every shape, echo, defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxserve.config import EngineConfig
from tests.server.serving import COMPLETIONS, Client, Reply, reply, scripted, serving, tiny

REPLIES = [
    reply("One", ["1", "!"]),
    reply("Two", ["2", "?"]),
    reply("", ["w", "o", "r", "d"], "run"),
]


def ids(text: str) -> list[int]:
    """Ids of text in a scripted model."""
    return list(text.encode())


async def complete(tmp_path: Path, prompt: Any, **fields: Any) -> Reply:
    async with serving(scripted(tmp_path, REPLIES)) as api:
        return await api.complete(prompt, **fields)


async def test_ids_are_used_as_they_are(tmp_path: Path) -> None:
    whole = await complete(tmp_path, ids("One"), max_tokens=2, temperature=0)
    assert whole.text == "1!"
    assert whole.body["usage"]["prompt_tokens"] == 3


async def test_lists_of_ids(tmp_path: Path) -> None:
    whole = await complete(tmp_path, [ids("One"), ids("Two x")], max_tokens=1)
    assert [choice["text"] for choice in whole.body["choices"]] == ["1", "2"]
    assert whole.body["usage"]["prompt_tokens"] == 3 + 5


async def test_texts_times_n(tmp_path: Path) -> None:
    whole = await complete(tmp_path, ["One", "Two fish"], n=2, max_tokens=2, temperature=0)
    alone = await complete(tmp_path, "Two fish", max_tokens=2, temperature=0)
    assert [(choice["index"], choice["text"]) for choice in whole.body["choices"]] == [
        (0, "1!"),
        (1, "1!"),
        (2, "2?"),
        (3, "2?"),
    ]
    assert whole.body["choices"][3]["text"] == alone.text
    assert whole.body["usage"]["prompt_tokens"] == len("One") + len("Two fish")
    assert whole.body["usage"]["completion_tokens"] == 8


async def test_an_end_token_can_be_ignored(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, REPLIES)) as api:
        for ignore_eos in (None, False):
            ended = await api.complete("One", max_tokens=9, temperature=0, ignore_eos=ignore_eos)
            assert (ended.text, ended.choice["finish_reason"]) == ("1!", "stop")
            assert ended.body["usage"]["completion_tokens"] == 3
        whole = await api.complete("One", max_tokens=9, temperature=0, ignore_eos=True)
        assert (whole.text, whole.choice["finish_reason"]) == ("1!", "length")
        assert whole.body["usage"]["completion_tokens"] == 9
        chat = await api.chat("Two", max_tokens=7, temperature=0, ignore_eos=True, stop="?")
        assert (chat.text, chat.choice["finish_reason"]) == ("2", "stop")
        chat = await api.chat("Two", max_tokens=7, temperature=0, ignore_eos=True)
        assert chat.body["usage"]["completion_tokens"] == 7


async def test_seeded_choices_differ_and_repeat(tmp_path: Path) -> None:
    replies = [reply("", [{"any": [chr(97 + i) for i in range(26)]}] * 20)]
    async with serving(scripted(tmp_path, replies)) as api:
        first = await api.complete("x", n=3, seed=7, max_tokens=20)
        again = await api.complete("x", n=3, seed=7, max_tokens=20)
        second_alone = await api.complete("x", seed=8, max_tokens=20)
    texts = [choice["text"] for choice in first.body["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in again.body["choices"]]
    assert second_alone.text == texts[1]


async def test_streams_of_two_prompts(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, REPLIES)) as api:
        stream = await api.stream_complete(["One", "Two fish"], max_tokens=2, temperature=0)
    assert [stream.text(index) for index in (0, 1)] == ["1!", "2?"]
    assert [stream.reason(index) for index in (0, 1)] == ["length", "length"]


@pytest.mark.parametrize("prompt", ["Hi there", ids("Hi there")])
async def test_echo(tmp_path: Path, prompt: Any) -> None:
    async with serving(scripted(tmp_path, REPLIES)) as api:
        whole = await api.complete(prompt, echo=True, max_tokens=2)
        stream = await api.stream_complete(prompt, echo=True, max_tokens=2)
    assert whole.text == "Hi therewo"
    assert stream.pieces() == ["Hi there", "w", "o"]
    assert whole.body["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("echo", [False, True])
async def test_no_tokens_asked_none_generated(tmp_path: Path, echo: bool) -> None:
    async with serving(scripted(tmp_path, REPLIES)) as api:
        whole = await api.complete(["Hi", "Ho"], max_tokens=0, echo=echo)
        stream = await api.stream_complete(
            ["Hi", "Ho"], max_tokens=0, echo=echo, stream_options={"include_usage": True}
        )
    assert [choice["text"] for choice in whole.body["choices"]] == (["Hi", "Ho"] if echo else ["", ""])
    assert {choice["finish_reason"] for choice in whole.body["choices"]} == {"length"}
    assert whole.body["usage"]["completion_tokens"] == 0
    assert whole.body["usage"]["prompt_tokens"] == 4
    assert [stream.text(index) for index in (0, 1)] == (["Hi", "Ho"] if echo else ["", ""])
    assert stream.usages == [whole.body["usage"]]


async def test_empty_text_starts_from_the_begin_token(tmp_path: Path) -> None:
    whole = await complete(tmp_path, "", max_tokens=1)
    assert whole.text == "w"
    assert whole.body["usage"]["prompt_tokens"] == 1


async def test_empty_text_without_a_begin_token_is_refused(tmp_path: Path) -> None:
    async with serving(tiny(tmp_path)) as api:
        refused = await api.post(COMPLETIONS, {"prompt": "", "max_tokens": 1})
    assert refused.status == 400
    assert refused.error["param"] == "prompt"


async def test_the_default_is_sixteen_tokens(tmp_path: Path) -> None:
    whole = await complete(tmp_path, "Hi")
    assert whole.body["usage"]["completion_tokens"] == 16
    assert whole.choice["finish_reason"] == "length"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "Hi", "logprobs": 6}, "logprobs"),
        ({"prompt": "Hi", "logprobs": True}, "logprobs"),
        ({"prompt": "Hi", "logprobs": 0}, "logprobs"),
        ({"prompt": "Hi", "logprobs": 1}, "logprobs"),
        ({"prompt": "Hi", "n": 0}, "n"),
        ({"prompt": "Hi", "n": 17}, "n"),
        ({"prompt": "Hi", "n": 1.5}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [5, "x"]}, "prompt"),
        ({"prompt": [5, [5]]}, "prompt"),
        ({"prompt": [[5], []]}, "prompt"),
        ({"prompt": [[5], ["x"]]}, "prompt"),
        ({"prompt": [999999999]}, "prompt"),
        ({"prompt": [[1], [10**30]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"text": "Hi"}}, "prompt"),
        ({"prompt": [True, False]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": "Hi", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "Hi", "best_of": 3}, "best_of"),
        ({"prompt": "Hi", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "Hi", "max_tokens": True}, "max_tokens"),
        ({"prompt": "Hi", "echo": "yes"}, "echo"),
        ({"prompt": "Hi", "suffix": "bye"}, "suffix"),
        ({"prompt": "Hi", "max_completion_tokens": 3}, "max_completion_tokens"),
    ],
)
async def test_bad_requests_name_their_field(shared_api: Client, fields: dict[str, Any], param: str) -> None:
    refused = await shared_api.post(COMPLETIONS, {"model": "m", "max_tokens": 1, **fields})
    assert refused.status == 400
    assert refused.error["type"] == "invalid_request_error"
    assert refused.error["param"] == param
    assert param in refused.error["message"]
    assert (await shared_api.complete("One", max_tokens=1)).text == "fine"


@pytest.mark.parametrize(
    "fields",
    [{"best_of": 2, "n": 2}, {"suffix": ""}, {"logprobs": None}, {"presence_penalty": 0, "user": "u"}],
)
async def test_fields_that_ask_for_nothing_are_taken(tmp_path: Path, fields: dict[str, Any]) -> None:
    whole = await complete(tmp_path, "One", max_tokens=1, **fields)
    assert whole.body["choices"][0]["text"] == "1"


async def test_more_rows_than_run_at_once_wait_and_come(tmp_path: Path) -> None:
    config = EngineConfig(max_running=2, max_waiting=30)
    async with serving(scripted(tmp_path, REPLIES, config=config)) as api:
        whole = await api.complete(["One", "Two"] * 8, n=2, max_tokens=2)
        assert [choice["text"] for choice in whole.body["choices"]] == (["1!"] * 2 + ["2?"] * 2) * 8
        await api.wait_running(0)


async def test_more_choices_than_the_server_ever_holds_are_no_429(tmp_path: Path) -> None:
    """Trying again, as a 429 asks for, could never help."""
    config = EngineConfig(max_running=1, max_waiting=2)
    async with serving(scripted(tmp_path, REPLIES, config=config)) as api:
        many_prompts = await api.complete(["One"] * 4, max_tokens=2)
        assert (many_prompts.status, many_prompts.error["param"]) == (400, "prompt")
        for many in (await api.complete("One", n=4), await api.chat("One", n=4)):
            assert (many.status, many.error["param"]) == (400, "n")
            assert "at most 3" in many.error["message"]
        assert len((await api.complete("One", n=3)).body["choices"]) == 3
