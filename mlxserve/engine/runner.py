"""Turns a scheduled batch into one lazy forward and its samples, and starts it."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from mlxserve.engine.sampler import SamplingRow, sample
from mlxserve.engine.scheduler import ScheduledBatch
from mlxserve.engine.step_arrays import StepArrays
from mlxserve.engine.target import Target


class Runner:
    """Launches steps on a target. One step may be in flight: its samples (a lazy array) are inputs
    of the next. Lives on the engine thread."""

    def __init__(self, target: Target, page_size: int, num_pages: int) -> None:
        self._target = target
        self._arrays = StepArrays(page_size)
        self._num_pages = num_pages
        target.resize(num_pages)

    def launch(self, batch: ScheduledBatch, previous: mx.array | None) -> mx.array:
        """Start a step; returns its samples [R] int32 (when R is 0, any array that tells its end)."""
        if batch.num_pool_pages > self._num_pages:
            if previous is not None:
                mx.eval(previous)
            self._target.resize(batch.num_pool_pages)
            self._num_pages = batch.num_pool_pages
        self._target.begin_step(batch, previous)
        for copies in independent_groups(batch.page_copies):
            self._target.copy_pages(copies)
        result = self._target.forward(batch, self._arrays.build(batch, previous))
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


def sampling_rows(batch: ScheduledBatch) -> list[SamplingRow]:
    """How each sampled row of a batch picks its token, in order."""
    return [
        SamplingRow(row.sequence.request.sampling, row.sequence.seed, row.sample_index + offset)
        for row in batch.rows
        for offset in range(row.num_sampled)
    ]
