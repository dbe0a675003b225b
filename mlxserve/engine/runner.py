"""Turns a scheduled batch into one lazy forward and its samples, and starts it."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxserve.engine.sampler import SamplingRow, sample
from mlxserve.engine.scheduler import ScheduledBatch
from mlxserve.engine.target import StepInputs, Target


class Runner:
    """Launches steps on a target. One step may be in flight: its samples (a lazy array) are inputs
    of the next. Lives on the engine thread."""

    def __init__(self, target: Target, page_size: int, num_pages: int) -> None:
        self._target = target
        self._page_size = page_size
        self._num_pages = num_pages
        target.resize(num_pages)

    def launch(self, batch: ScheduledBatch, previous: mx.array | None) -> mx.array:
        """Start a step; returns its samples [R] int32 (when R is 0, any array that tells its end)."""
        if batch.num_pool_pages > self._num_pages:
            if previous is not None:
                mx.eval(previous)
            self._target.resize(batch.num_pool_pages)
            self._num_pages = batch.num_pool_pages
        for copies in independent_groups(batch.page_copies):
            self._target.copy_pages(copies)
        result = self._target.forward(batch, step_inputs(batch, self._page_size, previous))
        if batch.num_sampled:
            result = sample(result, sampling_rows(batch))
        mx.async_eval(result)
        return result

    def reset(self, num_pages: int) -> None:
        """Forget what a failed step may have left: fresh page tensors."""
        self._target.resize(0)
        self._target.resize(num_pages)
        self._num_pages = num_pages


def independent_groups(copies: Iterable[tuple[int, int]]) -> list[tuple[tuple[int, int], ...]]:
    """Copies in order, split so that within a group no target is a source or another target: a page
    may be copied, evicted and used as a target within one step."""
    groups: list[list[tuple[int, int]]] = []
    touched: set[int] = set()
    for source, target in copies:
        if not groups or source in touched or target in touched:
            groups.append([])
            touched = set()
        groups[-1].append((source, target))
        touched |= {source, target}
    return [tuple(group) for group in groups]


def step_inputs(batch: ScheduledBatch, page_size: int, previous: mx.array | None) -> StepInputs:
    """The arrays of a batch; ``previous`` holds the samples that pending inputs refer to."""
    # Plain ints: a step has few rows as a rule, and each numpy call costs as much as dozens of them.
    q_starts, kv_lens = [0], []
    positions: list[int] = []
    slots: list[int] = []
    sampled: list[int] = []
    for row in batch.rows:
        end, pages = row.start + row.num_tokens, row.pages
        positions.extend(range(row.start, end))
        slots.extend(pages[at // page_size] * page_size + at % page_size for at in range(row.start, end))
        q_starts.append(len(positions))
        kv_lens.append(end)
        sampled.extend(range(len(positions) - row.num_sampled, len(positions)))
    return StepInputs(
        token_ids=_token_ids(batch, q_starts, previous),
        positions=mx.array(positions, dtype=mx.int32),
        slot_mapping=mx.array(slots, dtype=mx.int32),
        block_tables=mx.array(_block_tables(batch)),
        q_starts=mx.array(q_starts, dtype=mx.int32),
        kv_lens=mx.array(kv_lens, dtype=mx.int32),
        sampled_rows=mx.array(sampled, dtype=mx.int32),
    )


def _block_tables(batch: ScheduledBatch) -> npt.NDArray[np.int32]:
    width = max(len(row.pages) for row in batch.rows)
    tables = np.zeros((len(batch.rows), width), dtype=np.int32)
    for index, row in enumerate(batch.rows):
        tables[index, : len(row.pages)] = row.pages
    return tables


def _token_ids(batch: ScheduledBatch, q_starts: list[int], previous: mx.array | None) -> mx.array:
    known = mx.array([token for row in batch.rows for token in row.token_ids], dtype=mx.int32)
    pending = [
        (start, row.pending_slot)
        for row, start in zip(batch.rows, q_starts, strict=False)
        if row.pending_slot is not None
    ]
    if not pending:
        return known
    assert previous is not None, "a pending input without a step in flight"
    places, slots = zip(*pending, strict=True)
    if len(pending) == known.size:
        return previous if slots == tuple(range(previous.size)) else previous[mx.array(slots)]
    known[mx.array(places)] = previous[mx.array(slots)]
    return known


def sampling_rows(batch: ScheduledBatch) -> list[SamplingRow]:
    """How each sampled row of a batch picks its token, in order."""
    return [
        SamplingRow(row.sequence.request.sampling, row.sequence.seed, row.sample_index + offset)
        for row in batch.rows
        for offset in range(row.num_sampled)
    ]
