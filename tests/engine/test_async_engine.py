"""The engine thread and its streams, on the scripted model whose replies depend on what its pages hold."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxserve.config import EngineConfig
from mlxserve.engine.async_engine import AsyncEngine, TokenStream
from mlxserve.engine.scheduler import ScheduledBatch
from mlxserve.engine.scripted_target import ScriptedTarget
from mlxserve.engine.target import StepInputs
from mlxserve.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    QueueFullError,
    RequestFailedError,
)
from mlxserve.text.scripted import load_scripted
from mlxserve.types import GenerationRequest, SamplingParams, TokenOutput

SCRIPT = {
    "replies": [
        {"match": "late", "pieces": ["x"], "end": "run", "prefill_delay_ms": 20},
        {"match": "burst", "pieces": list("abcdefgh"), "burst": 3},
        {"match": "", "pieces": "hash", "end": "run"},
    ]
}


class GatedTarget(ScriptedTarget):
    """Each forward takes one permit; ``on_forward`` runs before it and may raise."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.permits: threading.Semaphore | None = None
        self.on_forward: Callable[[ScheduledBatch], None] = lambda batch: None

    def forward(self, batch: ScheduledBatch, inputs: StepInputs) -> mx.array:
        if self.permits is not None:
            self.permits.acquire()
        self.on_forward(batch)
        return super().forward(batch, inputs)

    def close_gate(self) -> threading.Semaphore:
        self.permits = threading.Semaphore(0)
        return self.permits

    def open_gate(self) -> None:
        permits, self.permits = self.permits, None
        assert permits is not None
        permits.release(1000)


@asynccontextmanager
async def engine_on(tmp_path: Path, **limits: Any) -> AsyncIterator[tuple[AsyncEngine, GatedTarget]]:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(SCRIPT))
    config = EngineConfig(**({"kv_pages": 24, "page_size": 4, "max_running": 6} | limits))
    targets: list[GatedTarget] = []

    def load() -> GatedTarget:
        targets.append(GatedTarget(load_scripted(path), config.page_size))
        return targets[0]

    engine = AsyncEngine(load, config, name="test")
    try:
        yield engine, targets[0]
    finally:
        if targets[0].permits is not None:
            targets[0].open_gate()
        await engine.close()
        assert not engine._thread.is_alive()


def request(name: str, prompt: str = "hash", max_tokens: int = 8, **extra: Any) -> GenerationRequest:
    greedy = SamplingParams(temperature=0)
    return GenerationRequest(name, tuple(prompt.encode()), max_tokens, greedy, script_key=prompt, **extra)


async def read(stream: TokenStream) -> list[TokenOutput]:
    outputs = [output async for output in stream]
    assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    return outputs


def ids(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def test_200_random_submits_and_aborts(tmp_path: Path) -> None:
    rng = random.Random(4)
    prompts = [f"hash {index} " * rng.randrange(1, 5) for index in range(8)] + ["burst", "late"]
    async with engine_on(tmp_path) as (engine, _):
        alone = {}
        for index, prompt in enumerate(prompts):
            alone[prompt] = ids(await read(engine.submit(request(f"solo{index}", prompt, 20))))

        async def job(index: int) -> str:
            prompt, abort_after = rng.choice(prompts), rng.choice([None, None, None, 0, 1, 3, 5])
            for _ in range(rng.randrange(200)):
                await asyncio.sleep(0)
            stream = engine.submit(request(str(index), prompt, 20))
            given: list[int] = []
            if abort_after == 0:
                stream.abort()
            count = 0
            async for output in stream:
                count += 1
                given += output.token_ids
                if count == abort_after:
                    stream.abort()
                    stream.abort()
                reason = output.finish_reason
            assert alone[prompt][: len(given)] == given
            assert reason == "abort" or given == alone[prompt]
            assert reason != "abort" or abort_after is not None
            return str(reason)

        reasons: Counter[str] = Counter()
        for start in range(0, 200, 50):
            reasons.update(await asyncio.gather(*(job(start + index) for index in range(50))))
        assert reasons["abort"] > 10
        assert reasons["abort"] + reasons["length"] + reasons["stop"] == 200
        await engine.close()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.pool_free_pages + stats.cached_pages == stats.pool_pages


def test_what_loading_raises_the_constructor_raises() -> None:
    def load() -> ScriptedTarget:
        raise ModelLoadError("no such weights")

    with pytest.raises(ModelLoadError, match="no such weights"):
        AsyncEngine(load, EngineConfig(), name="broken")
    for thread in threading.enumerate():
        if thread.name == "engine:broken":
            thread.join(5)
    assert "engine:broken" not in {thread.name for thread in threading.enumerate()}


async def test_an_abort_before_the_request_is_taken(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as (engine, target):
        target.close_gate()
        first = engine.submit(request("first"))
        second = engine.submit(request("second"))
        second.abort()
        target.open_gate()
        assert [output.finish_reason for output in await read(second)] == ["abort"]
        assert len(ids(await read(first))) == 8


async def test_an_abort_during_prefill(tmp_path: Path) -> None:
    async with engine_on(tmp_path, max_step_tokens=4, max_running=2) as (engine, target):
        permits = target.close_gate()
        stream = engine.submit(request("0", "hash" * 12))
        permits.release(2)
        stream.abort()
        target.open_gate()
        outputs = await read(stream)
        assert (ids(outputs), outputs[-1].finish_reason) == ([], "abort")
        assert len(ids(await read(engine.submit(request("1", "hash" * 12))))) == 8


async def test_an_abort_during_decode_and_after_the_end(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as (engine, target):
        expected = ids(await read(engine.submit(request("0"))))
        permits = target.close_gate()
        stream = engine.submit(request("1"))
        permits.release(3)
        first = await anext(stream)
        stream.abort()
        target.open_gate()
        rest = [output async for output in stream]
        assert rest[-1].finish_reason == "abort"
        given = ids([first, *rest])
        assert 0 < len(given) < 8
        assert given == expected[: len(given)]
        stream.abort()
        assert ids(await read(engine.submit(request("2")))) == expected


async def test_a_full_queue_is_refused_with_its_limit(tmp_path: Path) -> None:
    async with engine_on(tmp_path, max_running=1, max_waiting=2) as (engine, target):
        target.close_gate()
        streams = [engine.submit(request(str(index))) for index in range(3)]
        with pytest.raises(
            QueueFullError, match="3 requests are running or waiting, the limit is 3"
        ) as caught:
            engine.submit(request("3"))
        assert caught.value.retry_after_s > 0
        target.open_gate()
        for stream in streams:
            assert len(ids(await read(stream))) == 8
        assert len(ids(await read(engine.submit(request("3"))))) == 8


async def test_what_never_fits_is_refused_with_both_numbers(tmp_path: Path) -> None:
    async with engine_on(tmp_path, kv_pages=5) as (engine, _):
        assert len(ids(await read(engine.submit(request("fits", "hash" * 3, 8))))) == 8
        with pytest.raises(ContextLengthError, match="need 21 tokens, the KV memory holds 20") as caught:
            engine.submit(request("big", "hash" * 3, 9))
        assert (caught.value.num_prompt_tokens, caught.value.context_length) == (12, 20)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (GenerationRequest("0", (), 4), "the prompt has no tokens"),
        (GenerationRequest("0", (1,), 0), "max_tokens must be at least 1, got 0"),
        (GenerationRequest("0", (1, 999_999), 4), "prompt takes token ids from 0 to .*, not 999999"),
        (GenerationRequest("0", (1, -1), 4), "prompt takes token ids from 0 to .*, not -1"),
        (
            GenerationRequest("0", (1,), 4, SamplingParams(logit_bias=((999_999, 1.0),))),
            "logit_bias takes token ids from 0 to .*, not 999999",
        ),
    ],
    ids=["empty", "no_tokens", "beyond", "negative", "bias"],
)
async def test_impossible_requests_are_refused(
    tmp_path: Path, wrong: GenerationRequest, message: str
) -> None:
    async with engine_on(tmp_path) as (engine, _):
        with pytest.raises(InvalidRequestError, match=message):
            engine.submit(wrong)
        assert len(ids(await read(engine.submit(request("0"))))) == 8


async def test_a_request_id_is_used_once_at_a_time(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as (engine, target):
        target.close_gate()
        stream = engine.submit(request("0"))
        with pytest.raises(InvalidRequestError, match="'0' is in use"):
            engine.submit(request("0"))
        target.open_gate()
        assert len(ids(await read(stream))) == 8
        assert len(ids(await read(engine.submit(request("0"))))) == 8


async def test_a_failing_step_ends_what_runs_and_nothing_else(tmp_path: Path) -> None:
    async with engine_on(tmp_path, max_running=2) as (engine, target):
        expected = ids(await read(engine.submit(request("0"))))

        def fail(batch: ScheduledBatch) -> None:
            if all(row.start > 0 for row in batch.rows):
                target.on_forward = lambda batch: None
                raise RuntimeError("planted\nsecond line")

        target.close_gate()
        target.on_forward = fail
        running = [engine.submit(request(f"run{index}", "other" * 2)) for index in range(2)]
        waiting = engine.submit(request("wait"))
        target.open_gate()
        for stream in running:
            last = (await read(stream))[-1]
            assert last.finish_reason == "error"
            assert isinstance(last.error, RequestFailedError)
            assert str(last.error) == "the engine failed on this step: planted"
        assert ids(await read(waiting)) == expected
        assert ids(await read(engine.submit(request("1")))) == expected
        assert engine.stats().is_alive


async def test_when_the_thread_dies_streams_end_and_submit_says_so(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as (engine, target):

        def die(batch: ScheduledBatch) -> None:
            raise KeyboardInterrupt("planted death")

        target.on_forward = die
        streams = [engine.submit(request(str(index))) for index in range(3)]
        for stream in streams:
            last = (await read(stream))[-1]
            assert last.finish_reason == "error"
            assert isinstance(last.error, EngineDeadError)
        with pytest.raises(EngineDeadError, match="planted death"):
            engine.submit(request("late"))
        assert not engine.stats().is_alive


async def test_close_ends_live_streams_and_the_thread(tmp_path: Path) -> None:
    async with engine_on(tmp_path, max_running=2) as (engine, target):
        target.close_gate()
        streams = [engine.submit(request(str(index))) for index in range(4)]
        closing = asyncio.create_task(engine.close())
        target.open_gate()
        await closing
        for stream in streams:
            assert (await read(stream))[-1].finish_reason in ("abort", "length")
        await engine.close()
        with pytest.raises(EngineDeadError, match="it was closed"):
            engine.submit(request("late"))


async def test_a_reader_that_never_reads_blocks_nobody(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as (engine, _):
        silent = [engine.submit(request(f"silent{index}", f"hash {index}", 20)) for index in range(3)]
        for index in range(10):
            assert len(ids(await read(engine.submit(request(str(index)))))) == 8
        for stream in silent:
            assert len(ids(await read(stream))) == 20


async def test_a_stop_token_ends_the_sequence_and_is_reported(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as (engine, _):
        given = ids(await read(engine.submit(request("0"))))
        stop = given[3]
        outputs = await read(engine.submit(request("1", stop_token_ids=frozenset({stop}))))
        assert ids(outputs) == given[: given.index(stop) + 1]
        assert outputs[-1].finish_reason == "stop"


async def test_several_tokens_a_step_stop_at_the_limit(tmp_path: Path) -> None:
    async with engine_on(tmp_path) as (engine, _):
        whole = await read(engine.submit(request("0", "burst", 30)))
        assert max(len(output.token_ids) for output in whole) == 3
        cut = await read(engine.submit(request("1", "burst", 5)))
        assert (ids(cut), cut[-1].finish_reason) == (ids(whole)[:5], "length")
