"""The index arrays of steps, made anew only where a step differs from the one before it."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxserve.engine.scheduler import ScheduledBatch, ScheduledSequence
from mlxserve.engine.target import StepInputs
from mlxserve.models.kept_arrays import KeptArray, ints, padded_tables

# No numpy here, whose code a step would read from memory that the kernels have just driven from the caches.


class StepArrays:
    """Builds ``StepInputs``. Keeps what the next step may need again: while the same rows decode, each has
    one token, and its pages change once in a page."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._q_starts: KeptArray[list[int]] = KeptArray(ints)
        self._tables: KeptArray[list[tuple[int, ...]]] = KeptArray(padded_tables)

    def build(self, batch: ScheduledBatch, previous: mx.array | None) -> StepInputs:
        """The arrays of a batch; ``previous`` holds the samples that pending inputs refer to."""
        page_size, rows = self._page_size, batch.rows
        positions: list[int] = []
        slots: list[int] = []
        sampled: list[int] = []
        q_starts, kv_lens = [0], []
        for row in rows:
            start, pages = row.start, row.pages
            end = start + row.num_tokens
            for position in range(start, end):
                positions.append(position)
                slots.append(pages[position // page_size] * page_size + position % page_size)
            num_tokens = len(positions)
            sampled.extend(range(num_tokens - row.num_sampled, num_tokens))
            q_starts.append(num_tokens)
            kv_lens.append(end)
        return StepInputs(
            positions=ints(positions),
            slot_mapping=ints(slots),
            block_tables=self._tables.get([row.pages for row in rows]),
            q_starts=self._q_starts.get(q_starts),
            kv_lens=ints(kv_lens),
            token_ids=_token_ids(rows, q_starts, previous),
            sampled_rows=None if len(sampled) == len(positions) else ints(sampled),
        )


def _token_ids(
    rows: Sequence[ScheduledSequence], q_starts: Sequence[int], previous: mx.array | None
) -> mx.array:
    places = [start for row, start in zip(rows, q_starts, strict=False) if row.pending_slot is not None]
    if not places:
        return ints([token for row in rows for token in row.token_ids])
    assert previous is not None, "a pending input without a step in flight"
    slots = [row.pending_slot for row in rows if row.pending_slot is not None]
    if len(places) == q_starts[-1]:
        return previous if slots == list(range(previous.size)) else previous[ints(slots)]
    token_ids = ints([token for row in rows for token in row.token_ids])
    token_ids[ints(places)] = previous[ints(slots)]
    return token_ids
