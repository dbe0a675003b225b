"""Requests of all kinds on one server: none changes another's text. A real (tiny, random) model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from mlxserve.engine.served_model import ServedModel
from tests.server.serving import COMPLETIONS, Client, serving, tiny

STOP = "l"
COMMA_ID = ord(",") - ord(" ")
ROWS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 12, "temperature": 0},
    "short": {"max_tokens": 1, "temperature": 0},
    "hot": {"max_tokens": 12, "temperature": 1.5, "seed": 3},
    "bias": {"max_tokens": 6, "temperature": 0, "logit_bias": {str(COMMA_ID): 100}},
    "stopper": {"max_tokens": 30, "temperature": 0, "stop": [STOP]},
}
PROMPTS = ["a", "bb bb", "quite a bit longer, so that a batch with the others is uneven", "x" * 300]


def model(tmp_path: Path) -> ServedModel:
    return tiny(tmp_path, context=512, has_eos=False, vocab=128)


def body(row: str, prompt: str = PROMPTS[2]) -> dict[str, Any]:
    return {"prompt": prompt, **ROWS[row]}


async def text(api: Client, row: str, prompt: str = PROMPTS[2]) -> str:
    return (await api.post(COMPLETIONS, body(row, prompt))).text


async def alone(tmp_path: Path) -> dict[str, str]:
    async with serving(model(tmp_path)) as api:
        texts = {row: await text(api, row) for row in ROWS}
        unstopped = await api.post(COMPLETIONS, {**body("stopper"), "stop": None})
    assert STOP in unstopped.text, "the stop string of these tests never comes"
    return texts


async def pieces(api: Client, row: str) -> AsyncIterator[str]:
    """The text of a streamed row, piece by piece."""
    async with api.session.post(api.url + COMPLETIONS, json={**body(row), "stream": True}) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


async def test_rows_are_what_they_should_be_alone(tmp_path: Path) -> None:
    texts = await alone(tmp_path)
    assert len(texts["plain"]) == 12
    assert texts["short"] == texts["plain"][0]
    assert texts["bias"] == ",,,,,,"
    assert texts["stopper"] and STOP not in texts["stopper"]
    assert texts["hot"] != texts["plain"]


@pytest.mark.parametrize("first", ["plain", "hot", "stopper", "bias"])
async def test_rows_that_join_a_running_one_change_nothing(tmp_path: Path, first: str) -> None:
    expected = await alone(tmp_path)
    async with serving(model(tmp_path)) as api, aclosing(pieces(api, first)) as running:
        parts = [await anext(running)]
        others = ["short", "hot", "bias", "plain", "stopper"]
        tasks = [asyncio.create_task(text(api, row)) for row in others]
        parts += [part async for part in running]
        assert "".join(parts) == expected[first]
        assert await asyncio.gather(*tasks) == [expected[row] for row in others]
        await api.wait_running(0)


async def test_a_cancelled_row_leaves_nothing_behind(tmp_path: Path) -> None:
    expected = await alone(tmp_path)
    async with serving(model(tmp_path)) as api:
        for _ in range(3):
            async with aclosing(pieces(api, "bias")) as running:
                await anext(running)
                tasks = [asyncio.create_task(text(api, row)) for row in ROWS]
            assert await asyncio.gather(*tasks) == list(expected.values())
        await api.wait_running(0)


async def test_a_refused_row_is_refused_alone(tmp_path: Path) -> None:
    expected = await alone(tmp_path)
    schema = {"type": "json_schema", "json_schema": {"name": "d", "schema": {"type": "integer"}}}
    async with serving(model(tmp_path)) as api:
        plain = asyncio.create_task(text(api, "plain"))
        refused = await api.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "response_format": schema},
        )
        assert (refused.status, refused.error["param"]) == (400, "response_format")
        assert await plain == expected["plain"]
        assert await text(api, "hot") == expected["hot"]


async def test_prompts_of_unequal_length_together_equal_each_alone(tmp_path: Path) -> None:
    async with serving(model(tmp_path)) as api:
        one_by_one = [await text(api, "plain", prompt) for prompt in PROMPTS]
    async with serving(model(tmp_path)) as api:
        together = await asyncio.gather(*(text(api, "plain", prompt) for prompt in PROMPTS))
        listed = await api.post(COMPLETIONS, {"prompt": PROMPTS, **ROWS["plain"]})
    assert together == one_by_one
    assert [choice["text"] for choice in listed.body["choices"]] == one_by_one


async def test_a_seed_gives_the_same_text_again_and_another_seed_another(tmp_path: Path) -> None:
    async with serving(model(tmp_path)) as api:
        first, second = await text(api, "hot"), await text(api, "hot")
        other = await api.post(COMPLETIONS, {**body("hot"), "seed": 4})
        free = {(await api.post(COMPLETIONS, {**body("hot"), "seed": None})).text for _ in range(3)}
    assert first == second != other.text
    assert len(free) == 3
