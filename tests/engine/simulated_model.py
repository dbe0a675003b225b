"""A model of a dictionary: pages hold (token, position), and a sample is a function of all the tokens
that the pages hold for a row, so that a lost copy, a stale prefix or a mixed-up page changes it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from mlxserve.config import EngineConfig
from mlxserve.engine.block_pool import BlockPool
from mlxserve.engine.scheduler import ScheduledBatch, Scheduler
from mlxserve.engine.sequence import Sequence, SequenceStatus
from mlxserve.types import FinishReason, GenerationRequest, TokenOutput

VOCAB = 5


def next_token(tokens: list[int], salt: int = 0) -> int:
    """The sample after ``tokens``."""
    return zlib.crc32(bytes([salt, *tokens])) % VOCAB


def solo(request: GenerationRequest) -> tuple[list[int], FinishReason]:
    """What a request must give, whoever else is there."""
    tokens = list(request.prompt_ids)
    generated: list[int] = []
    while True:
        token = next_token(tokens)
        tokens.append(token)
        generated.append(token)
        if token in request.stop_token_ids:
            return generated, "stop"
        if len(generated) == request.max_tokens:
            return generated, "length"


def mixed_drafts(sequence: Sequence, limit: int) -> tuple[int, ...]:
    """Right guesses, wrong ones and none, by a hash of the sequence."""
    count = min(limit, zlib.crc32(bytes(sequence.token_ids)) % 4)
    tokens, drafts = list(sequence.token_ids), []
    for index in range(count):
        is_right = zlib.crc32(bytes([7, *tokens])) % 3 > 0
        drafts.append(next_token(tokens) if is_right else (next_token(tokens) + 1 + index) % VOCAB)
        tokens.append(drafts[-1])
    return tuple(drafts)


@dataclass
class Result:
    token_ids: list[int] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)

    @property
    def reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None


class Simulation:
    """Drives a scheduler as the engine does; with ``is_pipelined`` a batch is committed after the next
    one was launched. One step is one second."""

    def __init__(
        self, config: EngineConfig, num_pages: int, *, is_pipelined: bool, has_drafts: bool = False
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config, BlockPool(1, num_pages), mixed_drafts if has_drafts else None)
        self.is_pipelined = is_pipelined
        self.now = 0.0
        self.slots: dict[int, tuple[int, int]] = {}
        self.in_flight: tuple[ScheduledBatch, list[int]] | None = None
        self.results: dict[str, Result] = {}
        self.sequences: dict[str, Sequence] = {}
        self.num_prefilled = 0

    def submit(
        self, request: GenerationRequest, *, prefill_delay_s: float = 0.0, decode_delay_s: float = 0.0
    ) -> None:
        sequence = Sequence(
            request, len(self.sequences), 0, prefill_delay_s=prefill_delay_s, decode_delay_s=decode_delay_s
        )
        self.results[request.request_id] = Result()
        self.sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        sequence = self.sequences[request_id]
        if sequence.status is not SequenceStatus.FINISHED:
            self._take([self.scheduler.abort(sequence)])
            self.scheduler.check_integrity()

    def step(self, prefill_budget: int | None = None) -> ScheduledBatch | None:
        self.now += 1
        previous, self.in_flight = self.in_flight, None
        batch = self.scheduler.schedule(self.now, prefill_budget)
        if batch is not None:
            self._check_limits(batch)
            self.in_flight = batch, self._launch(batch, previous[1] if previous else None)
        if previous is not None:
            self._take(self.scheduler.commit(*previous))
            self.scheduler.check_integrity()
        if self.in_flight is not None and not self.is_pipelined:
            launched, self.in_flight = self.in_flight, None
            self._take(self.scheduler.commit(*launched))
        self.scheduler.check_integrity()
        return batch

    def run(self, limit: int, prefill_budget: int | None = None) -> int:
        """Steps until nothing is left to do; fails when ``limit`` steps were not enough."""
        for count in range(limit):
            if not self.scheduler.has_work and self.in_flight is None:
                return count
            self.step(prefill_budget)
        raise AssertionError(f"work is left after {limit} steps: someone starves")

    def check_all_pages_are_accounted_for(self) -> None:
        pool, cache = self.scheduler.pool, self.scheduler.cache
        assert pool.num_free + cache.num_pages == pool.num_pages
        cache.evict(pool.num_pages)
        assert pool.num_free == pool.num_pages

    def _check_limits(self, batch: ScheduledBatch) -> None:
        # Two tokens a running row are always allowed: decodes and a prefill both get on.
        assert batch.num_tokens <= max(self.config.max_step_tokens, 2 * self.config.max_running)
        assert 0 < len(batch.rows) <= self.config.max_running
        assert len(self.scheduler.running) <= self.config.max_running
        assert len({id(row.sequence) for row in batch.rows}) == len(batch.rows)
        assert all(page < batch.num_pool_pages for row in batch.rows for page in row.pages)

    def _launch(self, batch: ScheduledBatch, previous: list[int] | None) -> list[int]:
        size = self.config.page_size
        for source, target in batch.page_copies:
            for offset in range(size):
                self.slots.pop(target * size + offset, None)
                if source * size + offset in self.slots:
                    self.slots[target * size + offset] = self.slots[source * size + offset]
        written: set[int] = set()
        for row in batch.rows:
            self.num_prefilled += row.num_tokens - row.num_sampled
            for index, token in enumerate(row.token_ids):
                position = row.start + index
                if row.pending_slot is not None and index == 0:
                    assert previous is not None
                    token = previous[row.pending_slot]
                slot = row.pages[position // size] * size + position % size
                assert slot not in written, "two rows of a step write the same slot"
                written.add(slot)
                self.slots[slot] = (token, position)
        return [sample for row in batch.rows for sample in self._sample(row)]

    def _sample(self, row: object) -> list[int]:
        from mlxserve.engine.scheduler import ScheduledSequence

        assert isinstance(row, ScheduledSequence)
        size, end = self.config.page_size, row.start + row.num_tokens
        tokens: list[int] = []
        for position in range(end):
            token, stored_position = self.slots[row.pages[position // size] * size + position % size]
            assert stored_position == position, "a page of another place"
            tokens.append(token)
        return [next_token(tokens[: end - row.num_sampled + 1 + offset]) for offset in range(row.num_sampled)]

    def _take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            result = self.results[output.request_id]
            assert result.reason is None, "an output after the terminal one"
            result.outputs.append(output)
            result.token_ids += output.token_ids
