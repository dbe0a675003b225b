"""Repeats, edits and regenerations answer as a fresh engine does; rows of one batch keep apart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlxserve.config import EngineConfig
from mlxserve.engine.async_engine import AsyncEngine, TokenStream
from mlxserve.engine.core import EngineCore
from mlxserve.engine.model_target import ModelTarget
from mlxserve.models.loader import load_model
from mlxserve.types import GenerationRequest, SamplingParams, TokenOutput
from mlxserve_kernels import ops
from tests.tiny_models import TinyModel, write_tiny_model

from .driving import greedy, run, tokens

WINDOWED = TinyModel(
    model_type="olmo3",
    layers=4,
    sliding_window=8,
    extra_config={
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    },
)
MODELS = {
    "full": TinyModel(),
    "window": WINDOWED,
    "gemma": TinyModel("gemma3_text", sliding_window=8, layers=4),
}

A = list(range(10, 30))
PROMPTS = {
    "A": A,
    "B": list(A),
    "C": [*A[:12], 50, 51],
    "D": [*A[:19], 60],
    "E": [*A[:18], 61, 62],
    "G": A[:5],
    "H": A[:1],
}
ORDERS = ["ABB", "ACA", "ADEA", "AFAF", "AGHA", "GAB", "HGFEDCBA", "EDCABFFA"]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / request.param, MODELS[request.param])


def core_of(folder: Path, page_size: int) -> EngineCore:
    config = EngineConfig(page_size=page_size, kv_pages=128 // page_size)
    is_pipelined = ops.supports_steps_in_flight()
    return EngineCore(ModelTarget(load_model(folder), page_size), config, is_pipelined=is_pipelined)


def prompts_for(folder: Path) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """The prompts, F included, and what each gives on an engine of its own."""
    given = {name: fresh(folder, prompt) for name, prompt in PROMPTS.items()}
    prompts = PROMPTS | {"F": [*A, *given["A"], 70, 71]}
    given["F"] = fresh(folder, prompts["F"])
    return prompts, given


def fresh(folder: Path, prompt: list[int]) -> list[int]:
    return tokens(run(core_of(folder, 32), greedy("cold", prompt, 6))["cold"])


@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_every_order_answers_as_a_cold_engine(folder: Path, page_size: int) -> None:
    prompts, expected = prompts_for(folder)
    assert len({tuple(ids) for ids in expected.values()}) > 4, "the model ignores its context"
    for order in ORDERS:
        core = core_of(folder, page_size)
        for turn, name in enumerate(order):
            outputs = run(core, greedy(f"{turn}", prompts[name], 6))[f"{turn}"]
            assert tokens(outputs) == expected[name], f"{name} at {turn} of {order}"
            assert outputs[-1].num_cached_tokens <= len(prompts[name]) - 1
            if name in order[:turn]:
                assert outputs[-1].num_cached_tokens == len(prompts[name]) - 1


LENGTHS = [1, 5, 57, 200]
ROWS: dict[str, tuple[int, SamplingParams]] = {
    "plain": (12, SamplingParams(temperature=0)),
    "short": (1, SamplingParams(temperature=0)),
    "hot": (12, SamplingParams(temperature=1.5, seed=3)),
    "bias": (6, SamplingParams(temperature=0, logit_bias=((12, 100.0),))),
    "stopper": (30, SamplingParams(temperature=0)),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=512)


@pytest.fixture
def engine(tiny: Path) -> Iterator[AsyncEngine]:
    config = EngineConfig(page_size=8, kv_pages=200)
    engine = AsyncEngine(lambda: ModelTarget(load_model(tiny), 8), config, name="tiny")
    yield engine
    asyncio.run(engine.close())


def row(kind: str, length: int, name: str, stop: frozenset[int] = frozenset()) -> GenerationRequest:
    prompt = np.random.default_rng(length).integers(0, 96, length).tolist()
    max_tokens, sampling = ROWS[kind]
    return GenerationRequest(name, tuple(prompt), max_tokens, sampling, stop)


async def read(stream: TokenStream) -> list[TokenOutput]:
    return [output async for output in stream]


async def take(stream: TokenStream, count: int) -> list[TokenOutput]:
    """The next ``count`` outputs: the row has gone on by as many steps."""
    return [await anext(stream) for _ in range(count)]


async def expected_rows(engine: AsyncEngine) -> tuple[dict[str, list[int]], frozenset[int]]:
    plain = tokens(await read(engine.submit(row("plain", 57, "p"))))
    stop = frozenset({plain[5]})
    alone = {"plain": plain}
    for kind in ("short", "hot", "bias", "stopper"):
        given = row(kind, 57, f"solo-{kind}", stop if kind == "stopper" else frozenset())
        alone[kind] = tokens(await read(engine.submit(given)))
    assert alone["bias"] == [12] * 6
    assert alone["short"] == plain[:1]
    assert alone["stopper"] == plain[: plain.index(plain[5]) + 1]
    assert alone["hot"] != plain
    return alone, stop


@pytest.mark.parametrize(
    "schedule",
    [
        ["plain", "wait", "bias", "wait"],
        ["plain", "short", 2, "bias", 1, "hot", "wait"],
        ["bias", 1, "plain", "cancel bias", "bias", "wait"],
        ["stopper", "hot", "bias", 3, "short", "plain", "wait"],
        ["hot", "wait", "plain", "hot", "wait"],
    ],
    ids=str,
)
async def test_rows_keep_apart_in_every_schedule(engine: AsyncEngine, schedule: list[str | int]) -> None:
    alone, stop = await expected_rows(engine)
    live: list[tuple[str, TokenStream, list[TokenOutput]]] = []
    cancelled: list[TokenStream] = []
    for number, event in enumerate([*schedule, "wait"]):
        if isinstance(event, int):
            _, stream, outputs = live[0]
            outputs += await take(stream, event)
        elif event == "wait":
            for kind, stream, outputs in live:
                outputs += await read(stream)
                assert tokens(outputs) == alone[kind], kind
            live.clear()
        elif event.startswith("cancel "):
            index = next(i for i, entry in enumerate(live) if entry[0] == event.removeprefix("cancel "))
            cancelled.append(live.pop(index)[1])
            cancelled[-1].abort()
        else:
            given = row(event, 57, f"{event}-{number}", stop if event == "stopper" else frozenset())
            live.append((event, engine.submit(given), []))
    for stream in cancelled:
        assert (await read(stream))[-1].finish_reason in ("abort", "length")


async def test_prompts_of_unequal_length_together_and_one_by_one(engine: AsyncEngine) -> None:
    alone = [tokens(await read(engine.submit(row("plain", n, f"solo{n}")))) for n in LENGTHS]
    streams = [engine.submit(row("plain", n, f"all{n}")) for n in LENGTHS]
    assert [tokens(outputs) for outputs in await asyncio.gather(*map(read, streams))] == alone
