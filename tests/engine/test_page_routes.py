"""Pages by every route, through the real engine: the answers of an engine that runs one step at a time on
mlx's own ops, pools that stay where they are, and no copy of them."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.config import EngineConfig
from mlxserve.engine.copied_context import COMPUTED_TOKENS, CopiedContext
from mlxserve.engine.core import EngineCore
from mlxserve.engine.model_target import ModelTarget
from mlxserve.engine.scheduler import ScheduledBatch
from mlxserve.engine.scripted_target import ScriptedTarget
from mlxserve.engine.target import StepInputs
from mlxserve.models.loader import load_model
from mlxserve.models.page_routes import TailedModelPages, ThroughModelPages, make_pages
from mlxserve.models.paged import LayerSpec, ModelPages, PagedMetadata
from mlxserve.models.tail_table import TailTable
from mlxserve.text.scripted import load_scripted
from mlxserve_kernels import ops
from mlxserve_kernels.dispatch import REFERENCE, Selection, metal_selection, page_route, using
from mlxserve_kernels.metal_kernels.maker import HOST_PERMISSIONS
from mlxserve_kernels.page_rows import NO_SOURCE
from tests.engine.driving import generate, greedy, run
from tests.tiny_models import TinyModel, write_tiny_model

Rounds = list[list[tuple[str, list[int], int]]]
"""Name, prompt and number of tokens of the requests of each round."""

PAGE = 8
ROUTES = ["tail-reference", "tail", "through", "drained"]
"""Those without a kernel of ours, and Metal's on the host."""


def metal_on_this_machine(cache_dir: Path) -> Selection:
    metal_on_host = pytest.importorskip("metal_on_host")
    if sys.platform != "linux":
        pytest.skip("metal_on_host runs on Linux")
    settings = metal_on_host.Settings(cache_dir=cache_dir, seeds=(0,), **HOST_PERMISSIONS)
    return metal_selection(metal_on_host.Host(settings).metal_kernel)


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, metal: Selection) -> Iterator[str]:
    """A route and kernels that have it, chosen as a user would."""
    name, _, kernels = request.param.partition("-")
    monkeypatch.setenv("MLXSERVE_PAGE_ROUTE", name)
    with using(REFERENCE if kernels or name == "drained" else metal):
        assert page_route() == name
        yield name


@pytest.fixture(scope="module")
def metal(request: pytest.FixtureRequest) -> Selection:
    return metal_on_this_machine(Path(request.config.cache.mkdir("metal_on_host")))  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Heads of 32, which quantized pages need.
    model = TinyModel(has_eos=False, head_dim=32)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", model)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripts") / "hash.json"
    replies = [
        {"match": "burst", "pieces": list("abcdefghijklmnop"), "end": "eos", "burst": 3},
        {"match": "late", "pieces": "hash", "end": "run", "delay_ms": 2, "prefill_delay_ms": 4},
        {"match": "", "pieces": "hash", "end": "run"},
    ]
    path.write_text(json.dumps({"template": "chatml", "context_length": 512, "replies": replies}))
    return path


def core_of(target: Any, **limits: int | bool) -> EngineCore:
    config = EngineConfig(page_size=PAGE, **limits)  # type: ignore[arg-type]
    return EngineCore(target, config, is_pipelined=ops.supports_steps_in_flight())


def served(make: Callable[[], EngineCore], rounds: Rounds) -> list[list[int]]:
    """The tokens of all requests, those of a round together."""
    core = make()
    return [
        given
        for turn, rows in enumerate(rounds)
        for given in generate(core, *(greedy(f"{turn}-{name}", ids, count) for name, ids, count in rows))
    ]


def expected(make: Callable[[], EngineCore], rounds: Rounds) -> list[list[int]]:
    """Each request on an engine of its own, one step at a time."""
    with using(REFERENCE), pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLXSERVE_PAGE_ROUTE")
        return [tokens for rows in rounds for row in rows for tokens in served(make, [[row]])]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(90) for _ in range(length)]


SHARED = prompt(19)
ROUNDS = [
    [("a", prompt(21, 1), 14), ("b", SHARED, 20), ("c", prompt(3, 2), 30)],
    # Continues cached prefixes: whole pages, a part of one, and one that is still open.
    [("b", [*SHARED, 7, 8], 9), ("b2", SHARED[:13], 12), ("b3", [*SHARED, 7], 9)],
    [("a", prompt(21, 1), 14), ("d", prompt(40, 4), 4)],
]


@pytest.mark.parametrize(
    ("kv_bits", "limits"), [(None, {"kv_pages": 60, "max_step_tokens": 16}), (8, {"kv_pages": 7})]
)
def test_a_llama_answers_alike(route: str, llama: Path, limits: dict[str, int], kv_bits: int | None) -> None:
    """Also where pages run out, so that rows are preempted and cached pages are taken away."""

    def make() -> EngineCore:
        return EngineCore(
            ModelTarget(load_model(llama), 16 if kv_bits else PAGE, kv_bits),
            EngineConfig(page_size=16 if kv_bits else PAGE, kv_bits=kv_bits, max_running=3, **limits),  # type: ignore[arg-type]
            is_pipelined=ops.supports_steps_in_flight(),
        )

    assert served(make, ROUNDS) == expected(make, ROUNDS)


@pytest.mark.parametrize("num_pages", [16, 80])
def test_a_script_reads_back_what_it_wrote(route: str, script: Path, num_pages: int) -> None:
    spec = load_scripted(script)

    def make() -> EngineCore:
        return core_of(ScriptedTarget(spec, PAGE), kv_pages=num_pages, max_running=4, max_step_tokens=24)

    texts = [
        "hash one",
        "hash one and more of it, over some pages",
        "late",
        "hash one and more",
        "burst of it",
    ]
    rounds = [
        [(str(index), list(text.encode()), 12 + index) for index, text in enumerate(texts[turn:])]
        for turn in range(2)
    ]
    # The key that picks a reply comes with the request; what driving.greedy makes has none: all are hashed.
    assert served(make, rounds) == expected(make, rounds)


# A long context at once


def test_a_copied_context_is_the_same_by_every_route(route: str, llama: Path) -> None:
    """Whole pages are copied by steps that write nothing and are followed by ones that read them."""
    length = COMPUTED_TOKENS + 3 * PAGE + 5

    def make() -> EngineCore:
        target = CopiedContext(ModelTarget(load_model(llama), PAGE), PAGE)
        return core_of(target, kv_pages=200, max_step_tokens=COMPUTED_TOKENS)

    # One at a time: which parts are copied depends on the chunks.
    rounds = [[("a", prompt(length), 10)], [("b", prompt(length, 1), 3)], [("c", prompt(length, 2), 10)]]
    assert served(make, rounds) == expected(make, rounds)


# A step that fails


class FailingTarget(ModelTarget):
    """One step's result cannot be evaluated, after its keys and values were written."""

    num_steps = 0

    def forward(self, batch: ScheduledBatch, inputs: StepInputs) -> mx.array:
        self.num_steps += 1
        if self.num_steps == 5:
            super().forward(batch, inputs)
            raise RuntimeError("this step fails")
        return super().forward(batch, inputs)


def test_a_failed_step_leaves_nothing_behind(route: str, llama: Path) -> None:
    core = core_of(FailingTarget(load_model(llama), PAGE), kv_pages=40)
    request = greedy("a", prompt(20), 9)
    outputs = run(core, request)["a"]
    assert outputs[-1].finish_reason == "error"
    again = greedy("b", prompt(20), 9)

    def make() -> EngineCore:
        return core_of(ModelTarget(load_model(llama), PAGE), kv_pages=40)

    assert generate(core, again) == expected(make, [[("b", prompt(20), 9)]])


# 200 steps with a slow reader


HEADS, DIM, NUM_PAGES, STREAMS, STEPS = 1, 32, 1024, 2, 200


class Stream:
    """A row that decodes, one token a step."""

    def __init__(self, first_page: int) -> None:
        self.pages = tuple(range(first_page, first_page + STEPS // PAGE + 1))
        self.start = 0
        self.num_tokens = 1


def step(pages: ModelPages, streams: list[Stream], previous: mx.array | None, salt: mx.array) -> mx.array:
    """One step in which each stream writes a row that depends on the step before, and reads all its rows."""

    def ints(values: Any) -> mx.array:
        return mx.array(values, dtype=mx.int32)

    pages.begin_step(streams, previous)
    slots = [s.pages[s.start // PAGE] * PAGE + s.start % PAGE for s in streams]
    metadata = pages.placed(
        streams,
        PagedMetadata(
            ints([s.start for s in streams]),
            ints(slots),
            ints([s.pages for s in streams]),
            ints(list(range(STREAMS + 1))),
            ints([s.start + 1 for s in streams]),
        ),
    )
    carried = 0.0 if previous is None else 0.5 * previous
    row = mx.cos(salt * (1 + streams[0].start) + carried)
    pages[0].write(row, row * 2, metadata)
    read = pages[0].attend(row, metadata, scale=0.1)
    # A slow reader: the next step is built before these products are done.
    slow = ones = mx.ones((64, 64))
    slow = slow * read[0, 0, 0]
    for _ in range(2):
        slow = slow @ ones / 64
    return read + 0 * slow[0, 0]


def all_steps(pages: ModelPages, *, is_pipelined: bool) -> tuple[list[np.ndarray], int]:
    """What each step read, and the memory that they took at the most beside what was there."""
    mx.random.seed(3)
    salt = mx.random.normal((STREAMS, HEADS, DIM))
    streams = [Stream(index * 300) for index in range(STREAMS)]
    mx.eval(salt)
    mx.reset_peak_memory()
    before, results = mx.get_active_memory(), []
    previous: mx.array | None = None
    for _ in range(STEPS):
        result = step(pages, streams, previous, salt)
        mx.async_eval(result)
        if previous is not None:
            results.append(np.array(previous))
        if not is_pipelined:
            mx.eval(result)
        previous = result
        for stream in streams:
            stream.start += 1
    assert previous is not None
    results.append(np.array(previous))
    return results, mx.get_peak_memory() - before


def address(array: mx.array) -> int:
    view: Any = np.asarray(memoryview(array))  # type: ignore[arg-type]
    return int(view.__array_interface__["data"][0])


def test_200_steps_in_flight_leave_the_pool_in_its_place(route: str) -> None:
    pages = make_pages([LayerSpec(HEADS, DIM, DIM, mx.float32, None)], PAGE)
    pages.resize(NUM_PAGES)
    place = address(pages[0].keys), address(pages[0].values)
    results, peak = all_steps(pages, is_pipelined=route != "drained")
    assert (address(pages[0].keys), address(pages[0].values)) == place
    plain = ModelPages([LayerSpec(HEADS, DIM, DIM, mx.float32, None)], PAGE)
    plain.resize(NUM_PAGES)
    with using(REFERENCE):
        sound, _ = all_steps(plain, is_pipelined=False)
    for index, (a, b) in enumerate(zip(results, sound, strict=True)):
        # Metal's attention adds in another order; a page that is not there yet would differ by far more.
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5), f"step {index}"
    # A step's own arrays are small; a pool of keys has 1 MB.
    assert peak < pages[0].keys.nbytes


def test_without_a_route_a_step_in_flight_costs_a_copy_of_the_pool() -> None:
    """What the routes are for; and the measure above sees it."""
    pages = ModelPages([LayerSpec(HEADS, DIM, DIM, mx.float32, None)], PAGE)
    pages.resize(NUM_PAGES)
    with using(REFERENCE):
        _, peak = all_steps(pages, is_pipelined=True)
    assert peak > pages[0].keys.nbytes


# The table of tails


class Write:
    def __init__(self, pages: tuple[int, ...], start: int, num_tokens: int) -> None:
        self.pages, self.start, self.num_tokens = pages, start, num_tokens


def test_a_page_stays_in_its_tail_while_it_is_written() -> None:
    table = TailTable(4)
    assert table.take_closed([Write((5, 9), 2, 5)]) == []
    assert table.place([Write((5, 9), 2, 5)]) == [(5, 2, 2, 0), (NO_SOURCE, 0, 3, 2)]
    assert table.entries((7, 5, 9)) == (7, -1, -2)
    # Page 5 is full, and as many pages are written: it is stored.
    assert table.take_closed([Write((5, 9), 7, 1)]) == [(0, 5)]
    assert table.place([Write((5, 9), 7, 1)]) == [(-2, 3, 1, 0)]
    assert table.entries((5, 9)) == (5, -1)


def test_few_closed_pages_wait() -> None:
    table = TailTable(2)
    runs = [Write((page, page + 1), 1, 1) for page in (0, 10, 20, 30)]
    table.place(runs)
    runs = [Write((0, 1), 2, 1), *runs[1:]]
    assert table.take_closed(runs) == []
    assert table.place(runs)[-1] == (-1, 0, 0, 0)
    assert table.entries((0, 1)) == (-5, -1)
    runs = [Write((0, 1), 3, 1), Write((10, 11), 2, 1), *runs[2:]]
    assert table.take_closed(runs) == [(1, 10), (4, 0)]


def test_copies_are_of_what_was_there_before_the_step() -> None:
    table = TailTable(4)
    table.place([Write((3,), 0, 2)])
    table.copy(3, 4)
    table.copy(8, 5)
    table.copy(5, 6)
    # Page 3 begins anew within the step.
    runs = [Write((3,), 0, 1), Write((4,), 2, 1)]
    assert table.place(runs) == [(NO_SOURCE, 0, 1, 0), (-1, 2, 1, 1), (8, 0, 0, 0), (8, 0, 0, 0)]
    assert table.entries((3, 4, 5, 6, 8)) == (-1, -2, -3, -4, 8)


def test_a_copy_outlives_its_stored_source() -> None:
    table = TailTable(4)
    table.place([Write((3,), 0, 2)])
    table.copy(3, 4)
    assert table.take_closed([Write((9,), 0, 1)]) == [(0, 3)]
    assert table.place([Write((9,), 0, 1)]) == [(NO_SOURCE, 0, 1, 0), (3, 0, 0, 0)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=60))
def test_the_table_keeps_what_pages_hold(actions: list[tuple[int, int, bool]]) -> None:
    """Against pages that are written in place: an action copies a page or writes its next token."""
    size = 3
    truth: dict[int, list[int]] = {page: [] for page in range(6)}
    pool: dict[int, list[int]] = {page: [] for page in range(6)}
    tails: list[list[int]] = []
    table = TailTable(size)
    for number, (page, other, is_copy) in enumerate(actions):
        if is_copy and page == other:
            continue
        if len(truth[page]) == size:
            truth[page] = []
        runs = [Write((page,), 0 if is_copy else len(truth[page]), 1)]
        for row, stored in table.take_closed(runs):
            pool[stored] = tails[row]
        if is_copy:
            table.copy(other, page)
            truth[page] = list(truth[other])
            if len(truth[page]) == size:
                continue
            runs = [Write((page,), len(truth[page]), 1)]
        truth[page] = [*truth[page], number]
        new = []
        for source, slot, count, _ in table.place(runs):
            old = [] if source == NO_SOURCE else pool[source] if source >= 0 else tails[-1 - source]
            new.append([*old[:slot], number] if count else old)
        tails = new
        (entry,) = table.entries((page,))
        assert (pool[entry] if entry >= 0 else tails[-1 - entry]) == truth[page]


# The choice


def test_a_wrong_route_is_named(monkeypatch: pytest.MonkeyPatch, metal: Selection) -> None:
    monkeypatch.setenv("MLXSERVE_PAGE_ROUTE", "middle")
    with using(metal), pytest.raises(ValueError, match="one of tail, through, drained, got 'middle'"):
        page_route()
    monkeypatch.setenv("MLXSERVE_PAGE_ROUTE", "through")
    with using(REFERENCE), pytest.raises(ValueError, match="through, which the reference kernels have not"):
        page_route()


def test_default_routes(monkeypatch: pytest.MonkeyPatch, metal: Selection) -> None:
    monkeypatch.delenv("MLXSERVE_PAGE_ROUTE", raising=False)
    specs = [LayerSpec(1, 8, 8, mx.float32, None)]
    with using(metal):
        assert isinstance(make_pages(specs, PAGE), TailedModelPages)
        assert ops.supports_steps_in_flight()
        monkeypatch.setenv("MLXSERVE_PAGE_ROUTE", "through")
        assert isinstance(make_pages(specs, PAGE), ThroughModelPages)
        monkeypatch.delenv("MLXSERVE_PAGE_ROUTE")
    with using(REFERENCE):
        assert type(make_pages(specs, PAGE)) is ModelPages
        assert not ops.supports_steps_in_flight()
