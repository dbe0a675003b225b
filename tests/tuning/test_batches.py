"""Batches: nothing lost, nothing crossed, the same order again."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.errors import UsageError
from mlxserve.tuning.batches import WIDTH_MULTIPLE, Batch, Batches, evaluation_batches, make_batch
from mlxserve.tuning.examples import Example

MAX_LENGTH = 40


@st.composite
def example_lists(draw: st.DrawFn, max_size: int = 30) -> list[Example]:
    """Tokens tell example and place: no two are alike."""
    lengths = draw(st.lists(st.integers(2, MAX_LENGTH), min_size=1, max_size=max_size))
    return [
        Example(
            tuple(range(100 * i, 100 * i + length)),
            (False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))),
            f"x:{i + 1}",
        )
        for i, length in enumerate(lengths)
    ]


def segments(batch: Batch) -> list[Example]:
    """The examples that a batch holds, read back from its arrays."""
    found = []
    for row in range(len(batch.token_ids)):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            here = batch.segment_ids[row] == segment
            columns = np.flatnonzero(here)
            assert columns.tolist() == list(range(columns[0], columns[-1] + 1)), "a segment is one stretch"
            inputs, targets = batch.token_ids[row][here], batch.targets[row][here]
            assert inputs[1:].tolist() == targets[:-1].tolist(), "a target is the next token of its example"
            assert batch.positions[row][here].tolist() == list(range(len(columns)))
            flags = (False, *(weight == 1 for weight in batch.weights[row][here].tolist()))
            found.append(Example((*inputs.tolist(), int(targets[-1])), flags, f"x:{inputs[0] // 100 + 1}"))
    return found


def is_padding_clean(batch: Batch) -> bool:
    padding = batch.segment_ids == 0
    return not batch.weights[padding].any() and not batch.token_ids[padding].any()


@settings(deadline=None)
@given(example_lists(), st.integers(1, 8), st.booleans(), st.integers(0, 2**40))
def test_an_epoch_has_every_example_once(
    examples: list[Example], batch_size: int, pack: bool, seed: int
) -> None:
    source = Batches(examples, batch_size=batch_size, max_length=MAX_LENGTH, pack=pack, seed=seed)
    for _ in range(2):
        seen: list[Example] = []
        for _ in range(source.batches_per_epoch):
            batch = source.next()
            assert is_padding_clean(batch)
            assert batch.num_tokens == sum(examples[i].num_inputs for i in batch.example_ids)
            held = segments(batch)
            assert Counter(held) == Counter(examples[i] for i in batch.example_ids)
            assert 1 <= len(held) <= batch_size
            seen += held
        assert Counter(seen) == Counter(examples)


@settings(deadline=None)
@given(example_lists(), st.integers(1, 8), st.booleans(), st.data())
def test_a_resumed_source_gives_what_an_uninterrupted_one_would(
    examples: list[Example], batch_size: int, pack: bool, data: st.DataObject
) -> None:
    def source() -> Batches:
        return Batches(examples, batch_size=batch_size, max_length=MAX_LENGTH, pack=pack, seed=3)

    whole = source()
    done = data.draw(st.integers(0, 2 * whole.batches_per_epoch + 1))
    for _ in range(done):
        whole.next()
    saved = json.loads(json.dumps(whole.position()))
    resumed = source()
    resumed.seek(saved)
    for _ in range(whole.batches_per_epoch + 1):
        expected, found = whole.next(), resumed.next()
        assert expected.example_ids == found.example_ids
        np.testing.assert_array_equal(expected.token_ids, found.token_ids)
        np.testing.assert_array_equal(expected.weights, found.weights)


@settings(deadline=None)
@given(example_lists(), st.integers(8, 12))
def test_packing_never_takes_more_positions_than_padding(examples: list[Example], batch_size: int) -> None:
    chosen = examples[:batch_size]
    packed = make_batch(chosen, max_length=MAX_LENGTH, pack=True)
    padded = make_batch(chosen, max_length=MAX_LENGTH, pack=False)
    assert len(padded.token_ids) == len(chosen)
    assert packed.token_ids.size <= padded.token_ids.size * 1.05
    assert packed.num_trained == padded.num_trained
    for batch in (packed, padded):
        assert batch.token_ids.shape[1] % WIDTH_MULTIPLE == 0
        assert batch.token_ids.shape[1] < MAX_LENGTH + WIDTH_MULTIPLE


def uniform(count: int, length: int = 9) -> list[Example]:
    return [
        Example(tuple(range(100 * i, 100 * i + length)), (False, *[True] * (length - 1)), f"x:{i + 1}")
        for i in range(count)
    ]


def test_short_examples_share_a_row() -> None:
    batch = make_batch([*uniform(3), *uniform(1, 25)], max_length=64, pack=True)
    assert batch.num_tokens == batch.num_trained == batch.token_ids.size == 48
    assert batch.segment_ids.tolist() == [[1] * 24, [1] * 8 + [2] * 8 + [3] * 8]


def test_arrays_have_the_stated_types() -> None:
    batch = make_batch(uniform(2), max_length=16, pack=True)
    for array in (batch.token_ids, batch.segment_ids, batch.positions, batch.targets):
        assert array.dtype == np.int32 and array.shape == batch.weights.shape
    assert batch.weights.dtype == np.float32


def test_epochs_differ_and_seeds_differ() -> None:
    def order(seed: int, epoch: int) -> list[tuple[int, ...]]:
        source = Batches(uniform(50), batch_size=5, max_length=16, seed=seed)
        return [source.at(epoch, i).example_ids for i in range(source.batches_per_epoch)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


def test_the_order_is_the_same_on_every_machine() -> None:
    source = Batches(uniform(8), batch_size=4, max_length=16, seed=7)
    assert [source.next().example_ids for _ in range(4)] == [
        (7, 4, 6, 1),
        (5, 0, 2, 3),
        (7, 4, 3, 0),
        (1, 5, 2, 6),
    ]


def test_without_packing_like_lengths_meet() -> None:
    examples = [e for length in (3, 9, 30) for e in uniform(8, length)]
    source = Batches(examples, batch_size=8, max_length=MAX_LENGTH, pack=False)
    batches = [source.next() for _ in range(3)]
    assert sorted(batch.token_ids.shape[1] for batch in batches) == [8, 8, 32]
    assert sum(batch.token_ids.size for batch in batches) == 8 * (8 + 8 + 32)


@pytest.mark.parametrize(
    ("epochs", "accumulate", "steps"), [(1, 1, 4), (1, 3, 2), (2.5, 1, 10), (0.1, 1, 1), (3, 4, 3)]
)
def test_steps_of_some_epochs(epochs: float, accumulate: int, steps: int) -> None:
    source = Batches(uniform(13), batch_size=4, max_length=16)
    assert source.num_steps(epochs, accumulate) == steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "the saved run has seed 1, it cannot go on with 0"),
        ({"batch_size": 2}, "the saved run has batch_size 2, it cannot go on with 4"),
        ({"pack": False}, "the saved run has pack False, it cannot go on with True"),
        ({"num_examples": 3}, "the saved run has num_examples 3, it cannot go on with 10"),
        ({"digest": "0"}, "this is not the data that the saved run was trained on"),
        ({"index": 3}, "the saved position in the data is damaged: epoch 0, index 3"),
        ({"epoch": None}, "the saved position in the data is damaged: epoch and index must be integers"),
    ],
)
def test_a_position_of_another_order_is_refused(change: dict[str, object], message: str) -> None:
    source = Batches(uniform(10), batch_size=4, max_length=16)
    with pytest.raises(UsageError, match=message):
        source.seek(source.position() | change)


def test_changed_data_is_noticed() -> None:
    examples = uniform(10)
    position = Batches(examples, batch_size=4, max_length=16).position()
    flags = (*examples[3].is_trained[:-1], False)
    changed = [*examples[:3], Example(examples[3].token_ids, flags, "x:4"), *examples[4:]]
    with pytest.raises(UsageError, match="not the data"):
        Batches(changed, batch_size=4, max_length=16).seek(position)


def test_evaluation_sees_the_same_examples_each_time() -> None:
    examples = uniform(30)
    limited = [evaluation_batches(examples, batch_size=4, max_length=16, limit=3) for _ in range(2)]
    assert [b.example_ids for b in limited[0]] == [b.example_ids for b in limited[1]]
    assert len(limited[0]) == 3
    whole = evaluation_batches(examples, batch_size=4, max_length=16)
    assert sorted(i for batch in whole for i in batch.example_ids) == list(range(30))
    assert evaluation_batches([], batch_size=4, max_length=16) == []


def test_no_examples_are_refused() -> None:
    with pytest.raises(UsageError, match="no examples"):
        Batches([], batch_size=4, max_length=16)


def test_every_example_fits_the_widest_row() -> None:
    examples = uniform(3, MAX_LENGTH)
    batch = make_batch(examples, max_length=MAX_LENGTH, pack=True)
    assert batch.token_ids.shape == (3, 40)
    for one, two in pairwise(segments(batch)):
        assert one.token_ids != two.token_ids
