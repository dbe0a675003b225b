"""The scheduler on a simulated model: whatever comes, each request gets what it would get alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlxserve.config import EngineConfig
from mlxserve.engine.sequence import SequenceStatus
from mlxserve.types import GenerationRequest

from .simulated_model import VOCAB, Simulation, solo

PAGE = 4


def request(
    name: str, prompt: list[int], max_tokens: int = 6, stop: frozenset[int] = frozenset()
) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), max_tokens, stop_token_ids=stop)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(6, 14),
        max_running=st.integers(1, 4),
        max_step_tokens=st.sampled_from([3, 7, 64]),
        is_pipelined=st.booleans(),
        has_drafts=st.booleans(),
        prefix_cache=st.sampled_from([True, True, False]),
    )
    def create(
        self,
        num_pages: int,
        max_running: int,
        max_step_tokens: int,
        is_pipelined: bool,
        has_drafts: bool,
        prefix_cache: bool,
    ) -> None:
        config = EngineConfig(
            max_running=max_running,
            page_size=PAGE,
            max_step_tokens=max_step_tokens,
            prefix_cache=prefix_cache,
        )
        self.room = num_pages * PAGE
        self.simulation = Simulation(config, num_pages, is_pipelined=is_pipelined, has_drafts=has_drafts)
        self.requests: dict[str, GenerationRequest] = {}
        self.aborted: set[str] = set()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=15),
        max_tokens=st.integers(1, 9),
        has_stop=st.booleans(),
        delays=st.sampled_from([(0.0, 0.0), (0.0, 0.0), (2.0, 0.0), (0.0, 2.0)]),
    )
    def submit(self, prompt: list[int], max_tokens: int, has_stop: bool, delays: tuple[float, float]) -> None:
        assert len(prompt) + max_tokens <= self.room
        stop = frozenset({VOCAB - 1}) if has_stop else frozenset()
        new = request(str(len(self.requests)), prompt, max_tokens, stop)
        self.requests[new.request_id] = new
        self.simulation.submit(new, prefill_delay_s=delays[0], decode_delay_s=delays[1])

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [
            name
            for name, sequence in self.simulation.sequences.items()
            if sequence.status is not SequenceStatus.FINISHED
        ]
        if live:
            name = data.draw(st.sampled_from(live))
            self.simulation.abort(name)
            self.aborted.add(name)

    @rule(count=st.integers(1, 4), prefill_budget=st.sampled_from([None, 2, 5]))
    def steps(self, count: int, prefill_budget: int | None) -> None:
        for _ in range(count):
            self.simulation.step(prefill_budget)

    @invariant()
    def nothing_wrong_was_given(self) -> None:
        for name, given in self.requests.items() if hasattr(self, "requests") else ():
            result = self.simulation.results[name]
            expected, reason = solo(given)
            assert result.token_ids == expected[: len(result.token_ids)]
            if name in self.aborted:
                assert result.reason == "abort"
            elif result.reason is not None:
                assert (result.token_ids, result.reason) == (expected, reason)
                assert result.outputs[-1].num_cached_tokens < len(given.prompt_ids)

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        size = sum(len(given.prompt_ids) + 4 * given.max_tokens for given in self.requests.values())
        self.simulation.run(limit=20 + 4 * size)
        self.nothing_wrong_was_given()
        assert all(result.reason is not None for result in self.simulation.results.values())
        self.simulation.check_all_pages_are_accounted_for()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, derandomize=True
)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_in_a_tiny_pool(is_pipelined: bool, has_drafts: bool, seed: int) -> None:
    rng = random.Random(seed)
    config = EngineConfig(max_running=5, page_size=PAGE, max_step_tokens=16)
    simulation = Simulation(config, 12, is_pipelined=is_pipelined, has_drafts=has_drafts)
    requests = {}
    for index in range(60):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        new = request(str(index), prompt, rng.randrange(1, 18), frozenset({rng.randrange(9)}))
        requests[new.request_id] = new
        simulation.submit(new, decode_delay_s=rng.choice([0, 0, 0, 1.5]))
        for _ in range(rng.randrange(6)):
            simulation.step(rng.choice([None, 4]))
        if rng.random() < 0.2:
            simulation.abort(str(rng.randrange(index + 1)))
    simulation.run(limit=10_000)
    for name, given in requests.items():
        result = simulation.results[name]
        expected, reason = solo(given)
        if result.reason == "abort":
            assert result.token_ids == expected[: len(result.token_ids)]
        else:
            assert (result.token_ids, result.reason) == (expected, reason)
    simulation.check_all_pages_are_accounted_for()


def test_the_oldest_gets_through_first_when_pages_run_out() -> None:
    config = EngineConfig(max_running=3, page_size=PAGE, max_step_tokens=64, prefix_cache=False)
    simulation = Simulation(config, 8, is_pipelined=True)
    for index in range(3):
        simulation.submit(request(str(index), [index] * 8, 16))
    ended: list[str] = []
    for _ in range(200):
        simulation.step()
        ended += [n for n, r in simulation.results.items() if r.reason is not None and n not in ended]
    assert ended == ["0", "1", "2"]


def test_a_copy_is_made_even_when_the_row_starts_later() -> None:
    """A delayed prefill takes its prefix, with a part of a page, in a step that has no rows."""
    config = EngineConfig(max_running=2, page_size=PAGE)
    simulation = Simulation(config, 8, is_pipelined=True)
    first, second = request("0", [0, 1, 0, 1, 0, 1], 1), request("1", [0, 1, 0, 1, 0, 1, 1, 1], 4)
    simulation.submit(first)
    simulation.run(limit=10)
    simulation.submit(second, prefill_delay_s=3.0)
    simulation.run(limit=20)
    assert simulation.results["1"].token_ids == solo(second)[0]
    assert simulation.results["1"].outputs[-1].num_cached_tokens == 6


def test_a_repeat_computes_one_token_of_the_prompt() -> None:
    config = EngineConfig(max_running=2, page_size=PAGE)
    simulation = Simulation(config, 16, is_pipelined=False)
    prompt = [0, 1, 1, 0] * 5
    simulation.submit(request("0", prompt, 1))
    simulation.run(limit=10)
    simulation.num_prefilled = 0
    simulation.submit(request("1", prompt, 1))
    simulation.run(limit=10)
    assert simulation.num_prefilled == 0
    assert simulation.results["1"].outputs[-1].num_cached_tokens == len(prompt) - 1
    assert simulation.results["1"].token_ids == simulation.results["0"].token_ids


def test_generated_tokens_are_a_prefix_for_the_next_turn() -> None:
    config = EngineConfig(max_running=2, page_size=PAGE)
    simulation = Simulation(config, 16, is_pipelined=True)
    first = request("0", [0, 1, 1], 8)
    simulation.submit(first)
    simulation.run(limit=20)
    history = [*first.prompt_ids, *solo(first)[0]]
    simulation.submit(request("1", [*history, 2, 2], 3))
    simulation.run(limit=20)
    # The last token's key is known only if it was fed, which no more token asked for.
    assert simulation.results["1"].outputs[-1].num_cached_tokens >= len(history) - 1


def test_live_streams_go_on_during_a_long_prefill() -> None:
    config = EngineConfig(max_running=4, page_size=PAGE, max_step_tokens=64)
    simulation = Simulation(config, 128, is_pipelined=True)
    simulation.submit(request("short", [1], 40))
    for _ in range(3):
        simulation.step()
    simulation.submit(request("long", [0, 1] * 100, 2))
    before = len(simulation.results["short"].token_ids)
    for _ in range(10):
        batch = simulation.step(prefill_budget=8)
        assert batch is not None
        assert batch.num_prefill_tokens <= 8
    assert len(simulation.results["short"].token_ids) == before + 10


def test_a_preempted_sequence_is_aborted_cleanly() -> None:
    config = EngineConfig(max_running=2, page_size=PAGE, prefix_cache=False)
    simulation = Simulation(config, 7, is_pipelined=True)
    simulation.submit(request("0", [0] * 9, 12))
    simulation.submit(request("1", [1] * 9, 12))
    younger = simulation.sequences["1"]
    for _ in range(20):
        simulation.step()
        if younger.status is SequenceStatus.WAITING and younger.num_generated:
            break
    else:
        pytest.fail("the younger sequence was never preempted")
    simulation.abort("1")
    simulation.run(limit=50)
    assert simulation.results["1"].reason == "abort"
    assert simulation.results["0"].reason == "length"
    simulation.check_all_pages_are_accounted_for()
