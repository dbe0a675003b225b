"""Adapters beside their base: chosen by the request's model, mixed in one batch, loaded while serving."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import openai
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model as load_stock
from safetensors.numpy import load_file, save_file

from mlxserve.config import EngineConfig
from mlxserve.engine.served_adapters import load_adapter
from mlxserve.engine.served_model import ServedModel, open_folder
from mlxserve.server import adapters as adapters_module
from mlxserve.server.adapters import _is_local
from tests.server.serving import COMPLETIONS, Client, reply, scripted, serving
from tests.tiny_adapters import write_adapter
from tests.tiny_models import TinyModel, write_tiny_model

MODEL = TinyModel(context=512, has_eos=False)
PROMPT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
ADAPTERS = "/v1/adapters"


def request(model: str, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, **fields}


def served(folder: Path, model: TinyModel = MODEL) -> ServedModel:
    return open_folder(write_tiny_model(folder / "tiny", model), "tiny", EngineConfig(max_running=8))


async def text(api: Client, model: str, prompt: str = PROMPT) -> str:
    return (await api.post(COMPLETIONS, request(model, prompt))).text


def stock_ids(folder: Path, adapter: Path | None, prompt: str) -> list[int]:
    """Greedy tokens of mlx-lm's own model with mlx-lm's own adapter layers."""
    model, _ = load_stock(folder)
    if adapter is not None:
        load_adapters(model, str(adapter))
    cache = make_prompt_cache(model)
    tokens = [ord(character) - 32 for character in prompt]
    ids: list[int] = []
    for _ in range(24):
        logits = model(mx.array([tokens]), cache)[0, -1]
        tokens = [int(mx.argmax(logits).item())]
        ids += tokens
    return ids


async def test_an_adapter_is_a_model_of_its_own_and_answers_as_mlx_lm_does(tmp_path: Path) -> None:
    model = served(tmp_path)
    first = load_adapter(model, "first", write_adapter(tmp_path / "a", MODEL, seed=1))
    second = load_adapter(model, "second", write_adapter(tmp_path / "b", MODEL, seed=2, rank=3))
    async with serving(model, first, second) as api:
        names = {card["id"]: card.get("parent") for card in (await api.get("/v1/models")).body["data"]}
        assert names == {"tiny": None, "tiny:first": "tiny", "tiny:second": "tiny"}
        answers = {name: await text(api, name) for name in names}
        assert len(set(answers.values())) == 3
        for name, adapter in (
            ("tiny", None),
            ("tiny:first", tmp_path / "a"),
            ("tiny:second", tmp_path / "b"),
        ):
            expected = model.tokenizer.decode(stock_ids(tmp_path / "tiny", adapter, PROMPT))
            assert answers[name] == expected, name


async def test_rows_of_different_adapters_and_of_none_run_in_one_batch(tmp_path: Path) -> None:
    model = served(tmp_path)
    adapters = [
        load_adapter(model, name, write_adapter(tmp_path / name, MODEL, seed=seed))
        for seed, name in enumerate(("a", "b", "c"))
    ]
    names = ["tiny", *(adapter.id for adapter in adapters)]
    prompts = [PROMPT[index:] for index in range(6)]
    async with serving(model, *adapters) as api:
        pairs = [(name, prompt) for prompt in prompts for name in names]
        together = await asyncio.gather(*(text(api, name, prompt) for name, prompt in pairs))
        alone = [await text(api, name, prompt) for name, prompt in pairs]
        assert together == alone
    async with serving(served(tmp_path / "without")) as api:
        base = [await text(api, "tiny", prompt) for prompt in prompts]
    assert [answer for (name, _), answer in zip(pairs, together, strict=True) if name == "tiny"] == base


async def test_what_one_adapter_cached_is_of_no_use_to_another(tmp_path: Path) -> None:
    long_prompt = PROMPT * 4
    write_adapter(tmp_path / "a", MODEL)
    model = served(tmp_path)
    async with serving(model, load_adapter(model, "a", tmp_path / "a")) as api:
        fresh = await text(api, "tiny:a", long_prompt)
    model = served(tmp_path / "again")
    async with serving(model, load_adapter(model, "a", tmp_path / "a")) as api:
        await text(api, "tiny", long_prompt)
        first = await api.post(COMPLETIONS, request("tiny:a", long_prompt))
        assert first.text == fresh
        assert first.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = await api.post(COMPLETIONS, request("tiny:a", long_prompt))
        assert again.text == fresh
        assert again.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_adapters_come_and_go_while_the_base_streams(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", MODEL)
    model = served(tmp_path)
    async with serving(model) as api:
        base = await text(api, "tiny")
        stream = asyncio.create_task(api.stream(COMPLETIONS, request("tiny", max_tokens=200)))
        added = await api.post(ADAPTERS, {"name": "a", "path": str(folder)})
        assert (added.status, added.body["id"], added.body["parent"]) == (201, "tiny:a", "tiny")
        assert [card["id"] for card in (await api.get(ADAPTERS)).body["data"]] == ["tiny:a"]
        changed = await text(api, "tiny:a")
        assert changed != base
        assert (await stream).reason() == "length"
        ending = asyncio.create_task(api.stream(COMPLETIONS, request("tiny:a", max_tokens=400)))
        await api.wait_running(1)
        deleted = await api.request("DELETE", f"{ADAPTERS}/tiny:a")
        assert (deleted.status, deleted.body) == (200, {"id": "tiny:a", "deleted": True, "object": "model"})
        gone = await api.post(COMPLETIONS, request("tiny:a"))
        assert (gone.status, gone.error["code"]) == (404, "model_not_found")
        assert (await ending).text()[: len(changed)] == changed
        # The name is free for other weights, and the old ones' cache is not theirs.
        other = write_adapter(tmp_path / "b", MODEL, seed=9)
        await api.post(ADAPTERS, {"name": "a", "path": str(other)})
        assert await text(api, "tiny:a") != changed
        assert await text(api, "tiny") == base


async def test_the_official_client_names_an_adapter_as_its_model(tmp_path: Path) -> None:
    model = served(tmp_path)
    adapter = load_adapter(model, "a", write_adapter(tmp_path / "a", MODEL))
    async with (
        serving(model, adapter) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.chat.completions.create(
            model="tiny:a", messages=[{"role": "user", "content": "hello"}], max_tokens=4, temperature=0
        )
        assert answer.model == "tiny:a"
        assert (await client.models.retrieve("tiny:a")).id == "tiny:a"


def damaged(folder: Path, kind: str) -> Path:
    path = write_adapter(folder / kind, MODEL, fine_tune_type="dora" if kind == "dora" else "lora")
    weights = load_file(path / "adapters.safetensors")
    name = "model.layers.0.self_attn.q_proj.lora_b"
    if kind == "half":
        del weights[name]
    elif kind == "shape":
        weights[name] = weights[name][:, :-1].copy()
    elif kind == "nan":
        weights[name][0, 0] = float("nan")
    elif kind == "elsewhere":
        weights["lm_head.lora_a"] = weights["model.layers.0.self_attn.q_proj.lora_a"]
        weights["lm_head.lora_b"] = weights[name]
    save_file(weights, path / "adapters.safetensors")
    config = path / "adapter_config.json"
    if kind == "scale":
        config.write_text(json.dumps({"lora_parameters": {"rank": 4}}), encoding="utf-8")
    elif kind == "config":
        config.unlink()
    elif kind == "peft":
        config.write_text(json.dumps({"peft_type": "LORA"}), encoding="utf-8")
    elif kind == "cut":
        data = (path / "adapters.safetensors").read_bytes()
        (path / "adapters.safetensors").write_bytes(data[:-8])
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("half", "self_attn.q_proj has only one of lora_a and lora_b"),
        ("shape", "the adapter does not fit the model"),
        ("nan", "self_attn.q_proj holds NaN or infinite values"),
        ("elsewhere", "adapter 0 changes 'lm_head', which is in no fused block"),
        ("scale", "lora_parameters.scale must be a number, found None"),
        ("config", "adapter_config.json is missing"),
        ("peft", "is a PEFT adapter; import it first: mlxserve lora import"),
        ("cut", "truncated"),
        ("dora", "fine_tune_type 'dora' is not served beside its base"),
    ],
)
async def test_a_wrong_adapter_is_refused_and_nothing_changes(
    tmp_path: Path, kind: str, message: str
) -> None:
    model = served(tmp_path)
    async with serving(model) as api:
        before = await text(api, "tiny")
        refused = await api.post(ADAPTERS, {"name": "a", "path": str(damaged(tmp_path, kind))})
        assert refused.status == 400
        assert message in refused.error["message"]
        assert refused.error["param"] == "path"
        assert await text(api, "tiny") == before
        right = await api.post(ADAPTERS, {"name": "a", "path": str(write_adapter(tmp_path / "ok", MODEL))})
        assert right.status == 201


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"name": "a"}, "path is required"),
        ({"name": "a/b", "path": "x"}, "an adapter's name has 1 to 64 letters"),
        ({"name": "", "path": "x"}, "an adapter's name has 1 to 64 letters"),
        ({"name": "a", "path": "x", "rank": 1}, "unknown field: rank"),
        ({"name": 1, "path": "x"}, "name must be of type string, not 1"),
        ({"name": "a", "path": "/no/such/place"}, "/no/such/place: no such adapter folder"),
    ],
)
async def test_wrong_requests_are_refused(tmp_path: Path, body: dict[str, Any], message: str) -> None:
    async with serving(served(tmp_path)) as api:
        refused = await api.post(ADAPTERS, body)
        assert refused.status == 400
        assert message in refused.error["message"]


async def test_names_are_unique_and_models_are_no_adapters(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", MODEL)
    async with serving(served(tmp_path)) as api:
        assert (await api.post(ADAPTERS, {"name": "a", "path": str(folder)})).status == 201
        twice = await api.post(ADAPTERS, {"name": "a", "path": str(folder)})
        assert "tiny:a is served already" in twice.error["message"]
        nested = await api.post(ADAPTERS, {"name": "b", "path": str(folder), "model": "tiny:a"})
        assert "is an adapter of tiny" in nested.error["message"]
        assert "is no adapter and stays" in (await api.request("DELETE", f"{ADAPTERS}/tiny")).error["message"]
        assert (await api.request("DELETE", f"{ADAPTERS}/tiny:none")).status == 404


async def test_a_scripted_model_takes_no_adapters(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", MODEL)
    async with serving(scripted(tmp_path, [reply("", ["x"])])) as api:
        refused = await api.post(ADAPTERS, {"name": "a", "path": str(folder)})
        assert refused.error["message"] == "a scripted model takes no adapters"


async def test_folders_are_read_for_this_machine_or_with_the_key(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", MODEL)
    async with serving(served(tmp_path), api_key="secret") as api:
        refused = await api.post(ADAPTERS, {"name": "a", "path": str(folder)})
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    addresses = {"127.0.0.1": True, "::1": True, "127.9.9.9": True, None: True, "": True}
    addresses |= {"192.168.1.4": False, "::ffff:10.0.0.1": False, "fe80::1%en0": False, "8.8.8.8": False}
    assert {address: _is_local(address) for address in addresses} == addresses


async def test_others_are_told_why_they_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters_module, "_is_local", lambda remote: False)
    folder = write_adapter(tmp_path / "a", MODEL)
    async with serving(served(tmp_path)) as api:
        for refused in (
            await api.post(ADAPTERS, {"name": "a", "path": str(folder)}),
            await api.request("DELETE", f"{ADAPTERS}/tiny"),
        ):
            assert (refused.status, refused.error["code"]) == (403, "forbidden")
            assert "from this machine or with the API key" in refused.error["message"]
        assert (await api.get(ADAPTERS)).body["data"] == []


async def test_no_page_in_a_browser_can_load_one(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", MODEL)
    async with serving(served(tmp_path)) as api:
        body = json.dumps({"name": "a", "path": str(folder)})
        headers = {"Content-Type": "text/plain"}
        refused = await api.request("POST", ADAPTERS, data=body, headers=headers)
        assert refused.status == 400
        assert "must be sent as application/json" in refused.error["message"]


def test_other_sizes_do_not_fit(tmp_path: Path) -> None:
    model = served(tmp_path)
    wide = replace(MODEL, hidden=32)
    with pytest.raises(Exception, match="the adapter does not fit the model"):
        load_adapter(model, "wide", write_adapter(tmp_path / "wide", wide))
    asyncio.run(model.close())
