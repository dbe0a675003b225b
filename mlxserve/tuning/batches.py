"""Batches of examples, in an order that (seed, epoch, index) decides alone.

An example of n tokens takes n - 1 positions: token i is the input, token i + 1 the target. ``batch_size``
counts examples. Packing lays those of one batch end to end in as few rows as fit, so it saves padding and
changes nothing of what a step trains; without it each example has a row of its own, and examples of like
length meet in a batch.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxserve.errors import UsageError
from mlxserve.tuning.examples import Example

WIDTH_MULTIPLE = 8
"""Rows are as wide as the next multiple of this, so that widths repeat."""

_WASTE = 1.05
"""The narrowest layout of up to this many times the fewest positions is taken: attention pays for width."""
_BUCKET_BATCHES = 32
"""So many batches of shuffled examples are sorted by length together."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Arrays [B, L]: B rows of L positions.

    token_ids, targets  int32; the target is the token after the input in the same example
    segment_ids         int32; examples of a row are 1, 2, …, and 0 is padding. A position attends to its own
                        segment alone (padding to padding, so no row of attention is empty)
    positions           int32; from 0 in each segment
    weights             float32; 1 where the target's prediction counts in the loss, else 0
    example_ids         which examples these are, by index
    """

    token_ids: NDArray[np.int32]
    segment_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    targets: NDArray[np.int32]
    weights: NDArray[np.float32]
    example_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Positions that are not padding."""
        return int(np.count_nonzero(self.segment_ids))

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.weights))


class Batches:
    """An endless source of batches, epoch after epoch; each epoch has every example once.

    The last batch of an epoch may be smaller. ``examples`` must not change. ``max_length`` is the widest row,
    at least as wide as the longest example.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        batch_size: int,
        max_length: int,
        pack: bool = True,
        seed: int = 0,
    ) -> None:
        if not examples:
            raise UsageError("there are no examples to train on")
        self._examples = examples
        self._batch_size = batch_size
        self._max_length = max_length
        self._pack = pack
        self._seed = seed
        self._digest = digest(examples)
        self._epoch = 0
        self._index = 0
        self._order: tuple[int, list[list[int]]] | None = None

    @property
    def max_positions(self) -> int:
        """Positions of the largest batch, padding not counted."""
        longest = sorted((example.num_inputs for example in self._examples), reverse=True)
        return sum(longest[: self._batch_size])

    @property
    def batches_per_epoch(self) -> int:
        return ceil(len(self._examples) / self._batch_size)

    def num_steps(self, epochs: float, accumulate: int) -> int:
        """Optimizer steps in which at least ``epochs`` epochs pass. Batches that one step accumulates may
        belong to two epochs."""
        return max(ceil(round(epochs * self.batches_per_epoch, 6) / accumulate), 1)

    def next(self) -> Batch:
        batch = self.at(self._epoch, self._index)
        self._index += 1
        if self._index == self.batches_per_epoch:
            self._epoch, self._index = self._epoch + 1, 0
        return batch

    def at(self, epoch: int, index: int) -> Batch:
        """Batch ``index`` of an epoch, wherever this source stands."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._batches_of(epoch))
        ids = self._order[1][index]
        return make_batch(
            [self._examples[i] for i in ids], max_length=self._max_length, pack=self._pack, example_ids=ids
        )

    def _batches_of(self, epoch: int) -> list[list[int]]:
        # MT19937 under RandomState is frozen: a resumed run has its order on any version of numpy.
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self._seed, epoch])))
        shuffled: list[int] = random.permutation(len(self._examples)).tolist()
        size = self._batch_size
        if self._pack:
            return [shuffled[i : i + size] for i in range(0, len(shuffled), size)]
        ordered: list[int] = []
        for i in range(0, len(shuffled), size * _BUCKET_BATCHES):
            window = shuffled[i : i + size * _BUCKET_BATCHES]
            ordered += sorted(window, key=lambda j: len(self._examples[j].token_ids))
        batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        return [batches[i] for i in random.permutation(len(batches)).tolist()]

    def position(self) -> dict[str, Any]:
        """Plain JSON from which ``seek`` goes on: ``index`` is the next batch of ``epoch``. The rest is what
        the order hangs on."""
        return {"epoch": self._epoch, "index": self._index, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "batch_size": self._batch_size,
            "pack": self._pack,
            "num_examples": len(self._examples),
            "digest": self._digest,
        }

    def seek(self, position: Mapping[str, Any]) -> None:
        """Raises UsageError when the position is that of another order: other data or settings."""
        for name, value in self._identity().items():
            saved = position.get(name)
            if saved == value:
                continue
            if name == "digest":
                raise UsageError("this is not the data that the saved run was trained on, it cannot go on")
            raise UsageError(f"the saved run has {name} {saved}, it cannot go on with {value}")
        epoch, index = position.get("epoch"), position.get("index")
        if not isinstance(epoch, int) or not isinstance(index, int):
            raise UsageError("the saved position in the data is damaged: epoch and index must be integers")
        if epoch < 0 or not 0 <= index < self.batches_per_epoch:
            raise UsageError(f"the saved position in the data is damaged: epoch {epoch}, index {index}")
        self._epoch, self._index = epoch, index


def evaluation_batches(
    examples: Sequence[Example],
    *,
    batch_size: int,
    max_length: int,
    pack: bool = True,
    limit: int | None = None,
    seed: int = 0,
) -> list[Batch]:
    """All examples once, or the first ``limit`` batches of their shuffled order; none for no examples."""
    if not examples:
        return []
    source = Batches(examples, batch_size=batch_size, max_length=max_length, pack=pack, seed=seed)
    count = source.batches_per_epoch if limit is None else min(limit, source.batches_per_epoch)
    return [source.at(0, index) for index in range(count)]


def make_batch(
    examples: Sequence[Example], *, max_length: int, pack: bool, example_ids: Sequence[int] = ()
) -> Batch:
    """One batch of some examples, each of 2 to ``max_length`` tokens."""
    lengths = [example.num_inputs for example in examples]
    assert 0 < min(lengths) <= max(lengths) < max_length, (lengths, max_length)
    rows = _packed(lengths, max_length) if pack else [[i] for i in range(len(lengths))]
    width = _rounded(max(sum(lengths[i] for i in row) for row in rows))
    token_ids, segment_ids, positions, targets = (np.zeros((len(rows), width), np.int32) for _ in range(4))
    weights = np.zeros((len(rows), width), np.float32)
    for r, row in enumerate(rows):
        start = 0
        for segment, i in enumerate(row, start=1):
            example, end = examples[i], start + lengths[i]
            token_ids[r, start:end] = example.token_ids[:-1]
            targets[r, start:end] = example.token_ids[1:]
            weights[r, start:end] = example.is_trained[1:]
            segment_ids[r, start:end] = segment
            positions[r, start:end] = np.arange(lengths[i])
            start = end
        positions[r, start:] = np.arange(width - start)
    return Batch(token_ids, segment_ids, positions, targets, weights, tuple(example_ids))


def _rounded(width: int) -> int:
    return ceil(width / WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _packed(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """The narrowest rows among the layouts with little padding, each row by index into ``lengths``."""
    narrowest = _rounded(max(lengths))
    widest = max(narrowest, min(_rounded(max_length), _rounded(sum(lengths))))
    step = max(_rounded((widest - narrowest) // 64), WIDTH_MULTIPLE)
    layouts = [_first_fit(lengths, width) for width in {*range(narrowest, widest, step), widest}]
    sizes = [(_rounded(max(sum(lengths[i] for i in row) for row in rows)), rows) for rows in layouts]
    best = min(len(rows) * width for width, rows in sizes)
    return min((width, rows) for width, rows in sizes if len(rows) * width <= best * _WASTE)[1]


def _first_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Longest first, each into the fullest row that holds it."""
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (free positions, row), sorted
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fit = next((k for k, (free, _) in enumerate(space) if free >= lengths[i]), None)
        free, row = (width, len(rows)) if fit is None else space.pop(fit)
        if fit is None:
            rows.append([])
        rows[row].append(i)
        insort(space, (free - lengths[i], row))
    return rows


def digest(examples: Sequence[Example]) -> str:
    """Changes with any token or mask of the examples, or their order."""
    hashed = hashlib.sha256()
    for example in examples:
        hashed.update(np.asarray(example.token_ids, np.int32).tobytes())
        hashed.update(np.asarray(example.is_trained, np.bool_).tobytes())
        hashed.update(b"|")
    return hashed.hexdigest()[:16]
