"""The index arrays of a step, beside their definition; and which of them are made anew."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.engine.scheduler import ScheduledBatch, ScheduledSequence
from mlxserve.engine.sequence import Sequence
from mlxserve.engine.step_arrays import StepArrays
from mlxserve.engine.target import StepInputs

from .driving import greedy

PAGE = 4


def row(
    start: int,
    tokens: tuple[int, ...],
    pages: tuple[int, ...],
    *,
    num_sampled: int = 1,
    pending_slot: int | None = None,
) -> ScheduledSequence:
    sequence = Sequence(greedy("x", (1,)), arrival=0, seed=0)
    return ScheduledSequence(sequence, start, tokens, pending_slot, num_sampled, 0, 0, pages)


def decode(at: int, slot: int, pages: tuple[int, ...]) -> ScheduledSequence:
    return row(at, (0,), pages, pending_slot=slot)


def batch(*rows: ScheduledSequence) -> ScheduledBatch:
    return ScheduledBatch(rows, (), 32)


def as_lists(inputs: StepInputs) -> dict[str, object]:
    names = {*StepInputs.__dataclass_fields__} - {"adapters", "pieces"}
    arrays = {name: getattr(inputs, name) for name in names}
    assert all(array is None or array.dtype == mx.int32 for array in arrays.values())
    return {name: None if array is None else array.tolist() for name, array in arrays.items()}


def test_chunks_decodes_and_drafts_in_one_step() -> None:
    previous = mx.array([70, 71, 72], dtype=mx.int32)
    inputs = StepArrays(PAGE).build(
        batch(
            decode(5, 2, (9, 8)),
            row(3, (11, 12, 13), (6, 5), num_sampled=0),
            row(7, (21, 22, 23), (1, 2, 3), num_sampled=3),
            decode(0, 0, (4,)),
        ),
        previous,
    )
    assert as_lists(inputs) == {
        "token_ids": [72, 11, 12, 13, 21, 22, 23, 70],
        "positions": [5, 3, 4, 5, 7, 8, 9, 0],
        "slot_mapping": [33, 27, 20, 21, 11, 12, 13, 16],
        "block_tables": [[9, 8, 0], [6, 5, 0], [1, 2, 3], [4, 0, 0]],
        "q_starts": [0, 1, 4, 7, 8],
        "kv_lens": [6, 6, 10, 1],
        "sampled_rows": [0, 4, 5, 6, 7],
    }


def test_rows_that_sample_nothing() -> None:
    inputs = StepArrays(PAGE).build(batch(row(0, (5, 6), (1,), num_sampled=0)), None)
    assert inputs.sampled_rows is not None
    assert inputs.sampled_rows.tolist() == []


def test_samples_of_the_step_in_flight_go_on_as_they_are() -> None:
    previous = mx.array([70, 71], dtype=mx.int32)
    arrays = StepArrays(PAGE)
    same = arrays.build(batch(decode(3, 0, (1,)), decode(6, 1, (2, 3))), previous)
    assert same.token_ids is previous
    assert same.sampled_rows is None
    swapped = arrays.build(batch(decode(4, 1, (1, 5)), decode(7, 0, (2, 3))), previous)
    assert swapped.token_ids.tolist() == [71, 70]
    fewer = arrays.build(batch(decode(4, 1, (1, 5))), previous)
    assert fewer.token_ids.tolist() == [71]


def test_what_stays_is_kept_and_what_changes_is_not() -> None:
    previous = mx.array([70, 71], dtype=mx.int32)
    arrays = StepArrays(PAGE)
    first = arrays.build(batch(decode(2, 0, (1,)), decode(4, 1, (2, 3))), previous)
    second = arrays.build(batch(decode(3, 0, (1,)), decode(5, 1, (2, 3))), previous)
    assert second.block_tables is first.block_tables
    assert second.q_starts is first.q_starts
    assert (first.positions.tolist(), second.positions.tolist()) == ([2, 4], [3, 5])
    assert (first.kv_lens.tolist(), second.kv_lens.tolist()) == ([3, 5], [4, 6])
    third = arrays.build(batch(decode(4, 0, (1, 9)), decode(6, 1, (2, 3))), previous)
    assert third.q_starts is first.q_starts
    assert third.block_tables.tolist() == [[1, 9], [2, 3]]
    other_page = arrays.build(batch(decode(4, 0, (1, 8)), decode(6, 1, (2, 3))), previous)
    assert other_page.block_tables.tolist() == [[1, 8], [2, 3]]
    alone = arrays.build(batch(decode(5, 0, (1, 8))), previous)
    assert (alone.q_starts.tolist(), alone.block_tables.tolist()) == ([0, 1], [[1, 8]])


@pytest.mark.parametrize("seed", range(5))
def test_random_steps(seed: int) -> None:
    """Against numpy, step after step on one object."""
    rng = np.random.default_rng(seed)
    arrays = StepArrays(PAGE)
    for _ in range(20):
        rows = []
        for _ in range(rng.integers(1, 5)):
            start, count = int(rng.integers(0, 9)), int(rng.integers(1, 6))
            pages = tuple(rng.permutation(30)[: -(-(start + count) // PAGE)].tolist())
            rows.append(row(start, tuple(rng.integers(0, 99, count).tolist()), pages))
        inputs = arrays.build(batch(*rows), None)
        ends = np.cumsum([each.num_tokens for each in rows])
        at = np.concatenate([np.arange(each.start, each.start + each.num_tokens) for each in rows])
        tables = np.concatenate(
            [
                np.array(each.pages)[[p // PAGE for p in range(each.start, each.start + each.num_tokens)]]
                for each in rows
            ]
        )
        assert inputs.token_ids.tolist() == [token for each in rows for token in each.token_ids]
        assert inputs.positions.tolist() == at.tolist()
        assert inputs.slot_mapping.tolist() == (tables * PAGE + at % PAGE).tolist()
        assert inputs.q_starts.tolist() == [0, *ends.tolist()]
        assert inputs.kv_lens.tolist() == [each.start + each.num_tokens for each in rows]
        expected = None if ends[-1] == len(rows) else (ends - 1).tolist()
        assert (inputs.sampled_rows if expected is None else inputs.sampled_rows.tolist()) == expected
        for each, table in zip(rows, inputs.block_tables.tolist(), strict=True):
            assert table == [*each.pages, *[0] * (len(table) - len(each.pages))]
