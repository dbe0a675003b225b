"""Every refusal in OpenAI's form, with the right status and the field's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxserve.errors import UsageError
from mlxserve.server.app import create_app
from mlxserve.text.stop import StopMatcher
from tests.server.serving import CHAT, COMPLETIONS, Client, reply, scripted, serving, user

OK = [reply("", ["fine"])]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": "7"}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"stream": 1}, "stream"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"speed": 1}}, "stream_options.speed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": "bad"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "d",
                        "strict": True,
                        "schema": {"type": "integer", "minimum": 10},
                    },
                }
            },
            "response_format",
        ),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "v", "format": "wav"}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"best_of": 2}, "best_of"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"top_a": 1}, "top_a"),
    ],
)
async def test_a_wrong_field_is_named(shared_api: Client, fields: dict[str, Any], param: str) -> None:
    refused = await shared_api.post(CHAT, {"model": "m", "messages": user("x"), **fields})
    assert refused.status == 400
    assert refused.error["type"] == "invalid_request_error"
    assert refused.error["param"] == param
    assert param.rpartition(".")[2] in refused.error["message"]


async def test_the_message_states_limit_and_given_value(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, OK)) as api:
        over = await api.chat("x", temperature=2.5)
        wrong = await api.chat("x", max_tokens="many")
        unsupported = await api.chat("x", response_format={"type": "json_object"})
    assert over.error["message"] == "temperature must be <= 2.0, not 2.5"
    assert wrong.error["message"] == 'max_tokens must be of type integer or null, not "many"'
    assert unsupported.error["code"] == "unsupported_parameter"
    assert '{"type":"text"}' in unsupported.error["message"]


@pytest.mark.parametrize("value", [{"type": "text"}, None])
async def test_fields_that_ask_for_nothing_are_taken(tmp_path: Path, value: Any) -> None:
    neutral = {
        "response_format": value,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "top_logprobs": None,
        "store": False,
        "modalities": ["text"],
        "functions": None,
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": None,
        "n": 1,
        "top_k": 0,
        "user": "u",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "logit_bias": {},
        "stream_options": None,
        "seed": -5,
    }
    async with serving(scripted(tmp_path, OK)) as api:
        assert (await api.chat("x", **neutral)).text == "fine"


async def test_bias_acts_on_the_token_it_names(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, [reply("", ["a", "b"])])) as api:
        forced = await api.complete("x", max_tokens=3, temperature=0, logit_bias={str(ord("z")): 100})
    assert forced.text == "zzz"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "m",}', b"{" * 100_000, b"[" * 100_000],
)
async def test_bodies_that_are_no_request(shared_api: Client, path: str, body: bytes) -> None:
    refused = await shared_api.request("POST", path, data=body)
    assert refused.status == 400
    assert refused.error["type"] == "invalid_request_error"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_is_not_in_its_encoding(shared_api: Client) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    refused = await shared_api.request("POST", CHAT, data=b"no gzip", headers=headers)
    assert refused.status == 400
    assert "Content-Encoding" in refused.error["message"]


async def test_nesting_without_end_is_a_400(tmp_path: Path) -> None:
    deep = (
        '{"model": "m", "messages": [], "chat_template_kwargs": {"a": ' + "[" * 50_000 + "]" * 50_000 + "}}"
    )
    async with serving(scripted(tmp_path, OK)) as api:
        refused = await api.request("POST", CHAT, data=deep)
    assert (refused.status, refused.error["code"]) == (400, "invalid_json")


async def test_too_large_a_body(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, OK), max_body_bytes=1000) as api:
        refused = await api.chat("x" * 2000)
        assert refused.status == 413
        assert refused.error["code"] == "request_too_large"
        assert (await api.chat("x")).status == 200


async def test_unknown_paths_and_methods(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, OK)) as api:
        missing = await api.get("/v1/nothing")
        wrong = await api.get(CHAT)
        wrong_too = await api.request("DELETE", "/v1/models/m")
    assert (missing.status, missing.error["code"]) == (404, "not_found")
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")
    assert wrong.headers["Allow"] == "POST"
    assert wrong_too.status == 405


async def test_models_by_name(tmp_path: Path) -> None:
    models = [scripted(tmp_path, [reply("", [name])], model_id=name) for name in ("one", "two")]
    async with serving(*models) as api:
        listed = await api.get("/v1/models")
        shown = await api.get("/v1/models/two")
        unknown_card = await api.get("/v1/models/three/and/more")
        by_name = await api.post(CHAT, {"model": "two", "messages": user("x")})
        unknown = await api.post(CHAT, {"model": "three", "messages": user("x"), "stream": True})
        unnamed = await api.post(CHAT, {"messages": user("x")})
    assert [card["id"] for card in listed.body["data"]] == ["one", "two"]
    assert listed.body["object"] == "list"
    assert shown.body == listed.body["data"][1]
    assert shown.body["context_length"] == shown.body["max_model_len"] == 4096
    assert by_name.text == "two"
    for refused in (unknown_card, unknown):
        assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert "one, two" in unknown.error["message"]
    assert (unnamed.status, unnamed.error["param"]) == (400, "model")


async def test_the_only_model_needs_no_name(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, OK)) as api:
        served = await api.post(CHAT, {"messages": user("x")})
    assert (served.text, served.body["model"]) == ("fine", "m")


async def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    model = scripted(tmp_path, OK)
    with pytest.raises(UsageError, match="m"):
        create_app([model, model])
    await model.close()


async def test_the_key_guards_all_but_health(tmp_path: Path) -> None:
    async with serving(scripted(tmp_path, OK), api_key="geheim") as api:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "geheim"},
            {"Authorization": "Basic geheim"},
            {"Authorization": "Bearer schlüssel"},
        ):
            refused = await api.request("GET", "/v1/models", headers=headers)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
            assert refused.headers["WWW-Authenticate"] == "Bearer"
            assert (await api.post(CHAT, {"messages": user("x")}, headers=headers)).status == 401
        allowed = await api.request("GET", "/v1/models", headers={"Authorization": "Bearer geheim"})
        assert allowed.status == 200
        assert (await api.get("/health")).body == {"status": "ok", "running": 0, "waiting": 0}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_script_without_a_matching_reply_fails_that_request_alone(
    tmp_path: Path, stream: bool
) -> None:
    async with serving(scripted(tmp_path, [reply("hello", ["hi"])])) as api:
        refused = await api.chat("something else", stream=stream)
        assert refused.status == 400
        assert (await api.chat("hello")).text == "hi"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_a_500_that_tells_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    model = scripted(tmp_path, OK)

    def broken(_: object) -> None:
        raise RuntimeError("/home/me/secret")

    async with serving(model) as api:
        with monkeypatch.context() as patch:
            patch.setattr(model.engine, "submit", broken)
            failed = await api.chat("x", stream=stream)
        assert (failed.status, failed.error["code"]) == (500, "internal_error")
        assert "secret" not in failed.error["message"]
        assert "secret" in caplog.text
        assert (await api.chat("x")).text == "fine"


async def test_a_bug_inside_a_stream_is_its_last_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: StopMatcher) -> str:
        raise RuntimeError("/home/me/secret")

    async with serving(scripted(tmp_path, [reply("", ["fi", "ne"], delay_ms=1)])) as api:
        with monkeypatch.context() as patch:
            patch.setattr(StopMatcher, "finish", broken)
            body = {"messages": user("x"), "n": 2}
            stream = await api.stream(CHAT, body)
        assert not stream.is_done
        assert stream.events[-1]["error"]["code"] == "internal_error"
        await api.wait_running(0)
        assert (await api.chat("x")).text == "fine"
