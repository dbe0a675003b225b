"""Which tokens of which sequences go into the next forward. Plain Python on ints.

A step is one flat list of tokens: a decode row is one token, a prefill chunk several, speculative
verification the last token and its drafts. Decodes go first, then prefills in order of arrival, under
a token budget; new sequences are admitted while pages and places last. When pages run out, cached
pages are evicted; then the youngest running sequence is preempted and later recomputed.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mlxserve.config import EngineConfig
from mlxserve.engine.block_pool import BlockPool
from mlxserve.engine.prefix_cache import Node, PrefixCache
from mlxserve.engine.sequence import Sequence, SequenceStatus
from mlxserve.errors import MlxserveError
from mlxserve.types import FinishReason, TokenOutput

Propose = Callable[[Sequence, int], tuple[int, ...]]
"""Draft tokens that may follow a sequence, at most as many as the second argument says."""

_EVICTION_DIVISOR = 64
"""An eviction walks the whole tree, so it takes a part of it at once: of a full cache, one page in 64."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A run of consecutive tokens of one sequence in a step.

    ``token_ids`` are the inputs; where ``pending_slot`` is set, the one input is instead the token at
    that place of the previous step's samples. The last ``num_sampled`` rows are sampled; the first of
    these gives the sequence's generated token number ``sample_index``. The last ``num_drafts`` inputs
    are proposals to verify. ``pages`` is the block table.
    """

    sequence: Sequence
    start: int
    token_ids: tuple[int, ...]
    pending_slot: int | None
    num_sampled: int
    num_drafts: int
    sample_index: int
    pages: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_prefill(self) -> bool:
        return self.num_tokens - self.num_drafts > 1


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. ``page_copies`` (source, target) happen in order, before anything is written.
    ``num_pool_pages`` is the size that the page tensors must have."""

    rows: tuple[ScheduledSequence, ...]
    page_copies: tuple[tuple[int, int], ...]
    num_pool_pages: int

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_sampled(self) -> int:
        return sum(row.num_sampled for row in self.rows)

    def split(self, samples: list[int]) -> Iterator[tuple[ScheduledSequence, list[int]]]:
        """The sampled runs, each with its share of the step's samples."""
        position = 0
        for row in self.rows:
            if row.num_sampled:
                yield row, samples[position : position + row.num_sampled]
                position += row.num_sampled

    @property
    def num_prefill_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows if row.is_prefill)


@dataclass(slots=True)
class _Step:
    """A batch while it is put together."""

    budget: int
    rows: list[ScheduledSequence] = field(default_factory=list)
    num_samples: int = 0
    has_preempted: bool = False


class Scheduler:
    """Owns all live sequences, the block pool and the prefix cache.

    Contract: each batch from ``schedule`` is launched, then given to ``commit`` with its samples, in
    order; at most one further batch is scheduled between a batch and its commit.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, propose: Propose | None = None) -> None:
        self._config = config
        self._propose = propose
        self.pool = pool
        self.cache = PrefixCache(pool, config.page_size)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # Copies wait for a launch: a delayed prefill takes its prefix in a step that may have no rows.
        self._copies: list[tuple[int, int]] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. The caller has made sure that it fits the pool when alone."""
        bisect.insort(self.waiting, sequence, key=lambda other: other.arrival)

    def schedule(self, now: float, prefill_budget: int | None = None) -> ScheduledBatch | None:
        """The next step, or None when no row is ready. ``prefill_budget`` bounds the prefill tokens
        of a step that decodes, too (pacing)."""
        # However many rows decode, a prefill gets on as well.
        step = _Step(max(self._config.max_step_tokens, 2 * self._config.max_running))
        self._schedule_decodes(step, now)
        if step.rows and prefill_budget is not None:
            step.budget = min(step.budget, prefill_budget)
        self._schedule_prefills(step, now)
        self._admit(step, now)
        if not step.rows:
            return None
        for row in step.rows:
            self._cache_full_pages(row.sequence)
        copies, self._copies = tuple(self._copies), []
        return ScheduledBatch(tuple(step.rows), copies, self.pool.num_pages)

    def commit(self, batch: ScheduledBatch, samples: list[int]) -> list[TokenOutput]:
        """Take in the samples of a launched batch, in the order of its sampled rows."""
        return [
            self._accept(row, sampled)
            for row, sampled in batch.split(samples)
            if row.sequence.status is not SequenceStatus.FINISHED
        ]

    def abort(self, sequence: Sequence, error: MlxserveError | None = None) -> TokenOutput:
        """End a live sequence now. A step in flight that has it is ignored at its commit."""
        self._finish(sequence)
        reason: FinishReason = "abort" if error is None else "error"
        return TokenOutput(sequence.request.request_id, (), reason, sequence.num_cached_tokens or 0, error)

    def next_ready_time(self) -> float | None:
        """When the earliest delayed row becomes ready; None when nothing runs."""
        return min((sequence.not_before for sequence in self.running), default=None)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page reference is accounted for."""
        self.cache.check_integrity()
        holders = Counter(self.cache.pages())
        for sequence in self._sequences():
            holders.update(sequence.pages)
        self.pool.check_integrity(holders)

    # Building a step

    def _schedule_decodes(self, step: _Step, now: float) -> None:
        for sequence in list(self.running):
            if self._is_schedulable(sequence, now) and sequence.num_uncomputed == 1 and step.budget > 0:
                self._schedule_chunk(step, sequence, now)

    def _schedule_prefills(self, step: _Step, now: float) -> None:
        for sequence in list(self.running):
            if self._is_schedulable(sequence, now) and sequence.num_uncomputed > 1 and step.budget > 0:
                self._schedule_chunk(step, sequence, now)

    def _is_schedulable(self, sequence: Sequence, now: float) -> bool:
        return (
            sequence.status is SequenceStatus.RUNNING
            and not sequence.is_uncertain
            and sequence.not_before <= now
            and sequence.num_tokens_left > 0
        )

    def _schedule_chunk(self, step: _Step, sequence: Sequence, now: float) -> None:
        num_tokens = min(sequence.num_uncomputed, step.budget)
        is_last = num_tokens == sequence.num_uncomputed
        drafts = self._drafts(sequence, step.budget - num_tokens) if is_last else ()
        if not self._ensure_pages(step, sequence, sequence.num_computed + num_tokens + len(drafts)):
            return
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        is_pending = end > len(sequence.token_ids)
        inputs = (0,) if is_pending else tuple(sequence.token_ids[start:end])
        num_sampled = 1 + len(drafts) if is_last else 0
        step.rows.append(
            ScheduledSequence(
                sequence=sequence,
                start=start,
                token_ids=inputs + drafts,
                pending_slot=sequence.pending_slot if is_pending else None,
                num_sampled=num_sampled,
                num_drafts=len(drafts),
                sample_index=sequence.num_generated + sequence.num_pending,
                pages=tuple(sequence.pages),
            )
        )
        step.budget -= num_tokens + len(drafts)
        sequence.num_computed = end
        if is_last:
            sequence.num_pending += num_sampled
            sequence.pending_slot = step.num_samples
            sequence.is_uncertain = bool(drafts)
            sequence.not_before = now + sequence.decode_delay_s
        step.num_samples += num_sampled

    def _drafts(self, sequence: Sequence, room: int) -> tuple[int, ...]:
        """Proposals are asked for only when all tokens before them are known."""
        if self._propose is None or sequence.num_pending:
            return ()
        return self._propose(sequence, min(room, sequence.num_tokens_left - 1))

    def _admit(self, step: _Step, now: float) -> None:
        while self.waiting and len(self.running) < self._config.max_running:
            sequence = self.waiting[0]
            if step.budget <= 0 or step.has_preempted or sequence.num_pending:
                return
            if not self._take_prefix(sequence):
                return
            del self.waiting[0]
            sequence.status = SequenceStatus.RUNNING
            bisect.insort(self.running, sequence, key=lambda other: other.arrival)
            if sequence.prefill_delay_s:
                sequence.not_before = now + sequence.prefill_delay_s
                sequence.prefill_delay_s = 0.0
            else:
                self._schedule_chunk(step, sequence, now)

    def _take_prefix(self, sequence: Sequence) -> bool:
        """Give a waiting sequence what is cached of it; False (and nothing taken) when the pool has
        no room for the rest."""
        if not self._config.prefix_cache:
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = 0
            return self._has_room_for(self._num_pages_for(sequence.length))
        # At least the last token is computed again: its logits are needed.
        match = self.cache.match(sequence.token_ids, len(sequence.token_ids) - 1, sequence.request.adapter_id)
        if not self._has_room_for(self._num_pages_for(sequence.length) - len(match.pages)):
            self.pool.release_all(match.pages)
            if match.partial_page is not None:
                self.pool.release(match.partial_page)
            return False
        sequence.pages = match.pages
        sequence.node = match.node
        sequence.num_cached_pages = len(match.pages)
        sequence.num_computed = len(match.pages) * self._config.page_size
        if match.partial_page is not None:
            self._copy_partial(sequence, match.partial_page, match.num_partial)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
        return True

    def _copy_partial(self, sequence: Sequence, source: int, num_tokens: int) -> None:
        """Copy-on-write of a page that begins as the sequence goes on."""
        page = self._allocate()
        if page is not None:
            sequence.pages.append(page)
            sequence.num_computed += num_tokens
            self._copies.append((source, page))
        # Copies run first and in order, so the source may be reused before they do.
        self.pool.release(source)

    # Pages

    def _num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.page_size)

    def _has_room_for(self, num_pages: int) -> bool:
        """Whether the pages can be had without preempting, with one to spare for the first decode."""
        room = self.pool.num_free + self.pool.limit - self.pool.num_pages
        if not self.running:
            # Alone, everything that the cache alone holds can be evicted, and submit made sure it fits.
            return True
        if room > num_pages:
            return True
        needed = num_pages + 1 - room
        return self.cache.num_evictable(needed) >= needed

    def _allocate(self) -> int | None:
        page = self.pool.allocate()
        if page is None and self.pool.grow(1):
            page = self.pool.allocate()
        if page is None and self.cache.evict(1 + self.cache.num_pages // _EVICTION_DIVISOR):
            page = self.pool.allocate()
        return page

    def _ensure_pages(self, step: _Step, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for ``num_tokens`` positions; False when the sequence itself was preempted for it."""
        while len(sequence.pages) < self._num_pages_for(num_tokens):
            page = self._allocate()
            if page is not None:
                sequence.pages.append(page)
                continue
            victim = self._youngest_idle(step)
            if victim is None:
                # All others are in this step already; wait for the next one.
                victim = sequence
            self._preempt(victim)
            step.has_preempted = True
            if victim is sequence:
                return False
        return True

    def _youngest_idle(self, step: _Step) -> Sequence | None:
        """The youngest running sequence that is not part of the step."""
        scheduled = {id(row.sequence) for row in step.rows}
        idle = [sequence for sequence in self.running if id(sequence) not in scheduled]
        return max(idle, key=lambda sequence: sequence.arrival, default=None)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue; its cached pages stay until they are evicted."""
        self._release_pages(sequence)
        sequence.status = SequenceStatus.WAITING
        self.running.remove(sequence)
        self.add(sequence)

    def _release_pages(self, sequence: Sequence) -> None:
        self.pool.release_all(sequence.pages)
        sequence.pages = []
        sequence.node = None
        sequence.num_cached_pages = 0
        sequence.num_computed = 0

    # Prefix cache

    def _cache_full_pages(self, sequence: Sequence) -> None:
        if not self._config.prefix_cache:
            return
        size = self._config.page_size
        for index in range(sequence.num_cached_pages, sequence.num_known_computed // size):
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            own = sequence.pages[index]
            node = self.cache.insert_full(self._node(sequence), tokens, own)
            if node.page != own:
                self.pool.retain(node.page)
                self.pool.release(own)
                sequence.pages[index] = node.page
            sequence.node = node
            sequence.num_cached_pages = index + 1

    def _cache_tail(self, sequence: Sequence) -> None:
        size = self._config.page_size
        start, end = sequence.num_cached_pages * size, sequence.num_known_computed
        if self._config.prefix_cache and start < end:
            tail = tuple(sequence.token_ids[start:end])
            self.cache.insert_partial(self._node(sequence), tail, sequence.pages[start // size])

    def _node(self, sequence: Sequence) -> Node:
        """The last cached page of a sequence."""
        return sequence.node or self.cache.root(sequence.request.adapter_id)

    # Results

    def _accept(self, row: ScheduledSequence, sampled: list[int]) -> TokenOutput:
        """A draft is accepted when it is the token that was sampled in its place."""
        sequence = row.sequence
        drafts = row.token_ids[len(row.token_ids) - row.num_drafts :]
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == sampled[num_accepted]:
            num_accepted += 1
        new_ids: list[int] = []
        reason: FinishReason | None = None
        for token in sampled[: num_accepted + 1]:
            new_ids.append(token)
            if token in sequence.request.stop_token_ids:
                reason = "stop"
            elif sequence.num_generated + len(new_ids) >= sequence.request.max_tokens:
                reason = "length"
            if reason is not None:
                break
        sequence.token_ids.extend(new_ids)
        sequence.num_pending -= row.num_sampled
        if row.num_drafts:
            sequence.is_uncertain = False
            if sequence.status is SequenceStatus.RUNNING:
                sequence.num_computed += len(new_ids) - 1
        if reason is not None:
            self._finish(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self._cache_full_pages(sequence)
        cached = sequence.num_cached_tokens or 0
        return TokenOutput(sequence.request.request_id, tuple(new_ids), reason, cached)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._cache_full_pages(sequence)
            self._cache_tail(sequence)
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release_pages(sequence)
        sequence.status = SequenceStatus.FINISHED

    def _sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting
