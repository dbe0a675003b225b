"""A long context at once, for benchmarks of decoding: most of a prompt is not computed but copied."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from mlxserve.engine.scheduler import ScheduledBatch, ScheduledSequence
from mlxserve.engine.sequence import Sequence
from mlxserve.engine.target import StepInputs, Target
from mlxserve.types import GenerationRequest
from mlxserve_kernels.adapters import LowRank

COMPUTED_TOKENS = 512
"""Tokens at the head of a prompt whose keys and values are computed."""


class CopiedContext:
    """A ``Target`` that computes the first tokens of each prompt and fills its further pages with copies of
    theirs, whatever their format is. Decode steps are the inner target's own: they read as many keys and
    values, and as far apart, as after a real prefill. The tokens that come out mean nothing."""

    def __init__(self, inner: Target, page_size: int) -> None:
        self._inner = inner
        self._page_size = page_size
        self._num_computed_pages = max(COMPUTED_TOKENS // page_size, 1)
        self.vocab_size = inner.vocab_size
        self.weight_bytes = inner.weight_bytes
        self.page_bytes = inner.page_bytes

    def resize(self, num_pages: int) -> None:
        self._inner.resize(num_pages)

    def begin_step(self, batch: ScheduledBatch, previous: mx.array | None) -> None:
        self._inner.begin_step(batch, previous)

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        self._inner.copy_pages(copies)

    def forward(self, batch: ScheduledBatch, inputs: StepInputs) -> mx.array:
        prefills = [row for row in batch.rows if row.is_prefill]
        head = self._num_computed_pages * self._page_size
        if not prefills or any(row.start < head for row in prefills):
            return self._inner.forward(batch, inputs)
        self._inner.copy_pages(tuple(pair for row in prefills for pair in self._copies(row)))
        return mx.zeros((max(batch.num_sampled, 1), self.vocab_size))

    def _copies(self, row: ScheduledSequence) -> list[tuple[int, int]]:
        """(source, target) of each page that a chunk touches. Pages of the head are never touched by it."""
        end = row.start + row.num_tokens
        touched = range(row.start // self._page_size, -(-end // self._page_size))
        return [(row.pages[index % self._num_computed_pages], row.pages[index]) for index in touched]

    def load_adapter(self, adapter_id: int, changes: Mapping[str, LowRank]) -> None:
        self._inner.load_adapter(adapter_id, changes)

    def drop_adapter(self, adapter_id: int) -> None:
        self._inner.drop_adapter(adapter_id)

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        return self._inner.propose(sequence, limit)

    def delays(self, request: GenerationRequest) -> tuple[float, float]:
        return self._inner.delays(request)
