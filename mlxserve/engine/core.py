"""The engine proper: scheduler, runner and the step between them. Lives on the engine thread."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxserve.config import EngineConfig
from mlxserve.engine.block_pool import BlockPool
from mlxserve.engine.memory import plan_pages
from mlxserve.engine.pacing import PrefillPacer
from mlxserve.engine.runner import Runner
from mlxserve.engine.scheduler import ScheduledBatch, Scheduler
from mlxserve.engine.sequence import Sequence, SequenceStatus
from mlxserve.engine.target import Target
from mlxserve.errors import MlxserveError, ModelNotFoundError, RequestFailedError
from mlxserve.types import EngineStats, GenerationRequest, TokenOutput
from mlxserve_kernels.adapters import LowRank

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    batch: ScheduledBatch
    samples: mx.array


class EngineCore:
    """Runs sequences on a target, one step in flight where the kernels allow it.

    Contract: ``add`` and ``abort`` between calls of ``step``; every request added gives exactly one
    output with a ``finish_reason``, from ``add``, ``step`` or ``abort``.
    """

    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        *,
        is_pipelined: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._config = config
        self._is_pipelined = is_pipelined
        self._clock = clock
        plan = plan_pages(config, page_bytes=target.page_bytes, weight_bytes=target.weight_bytes)
        self._scheduler = Scheduler(config, BlockPool(plan.num_initial, plan.limit), target.propose)
        self._runner = Runner(target, config.page_size, plan.num_initial)
        self._pacer = PrefillPacer(config.max_step_tokens)
        self._in_flight: _LaunchedStep | None = None
        self._sequences: dict[str, Sequence] = {}
        self._num_arrived = 0
        self._is_stalled = False
        self._num_adapters = 0
        self._adapters: set[int] = set()
        self._retired_adapters: set[int] = set()

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that the page pool can hold."""
        return self._scheduler.pool.limit * self._config.page_size

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._in_flight is not None

    @property
    def wait_s(self) -> float:
        """Seconds until some row is ready to go on; 0 when there is something to do now."""
        if not self._is_stalled or self._in_flight is not None:
            return 0.0
        ready_at = self._scheduler.next_ready_time()
        return 0.0 if ready_at is None else max(0.0, ready_at - self._clock())

    def add(self, request: GenerationRequest) -> list[TokenOutput]:
        """Queue a request whose prompt and output fit ``max_sequence_tokens``. A request that the
        target refuses ends at once: its terminal output is returned."""
        if request.adapter_id is not None and request.adapter_id not in self._adapters:
            gone = ModelNotFoundError("the adapter of this request is not loaded any more")
            return [TokenOutput(request.request_id, (), "error", error=gone)]
        try:
            prefill_delay_s, decode_delay_s = self._target.delays(request)
        except MlxserveError as error:
            return [TokenOutput(request.request_id, (), "error", error=error)]
        seed = request.sampling.seed
        sequence = Sequence(
            request=request,
            arrival=self._num_arrived,
            seed=secrets.randbits(63) if seed is None else seed,
            prefill_delay_s=prefill_delay_s,
            decode_delay_s=decode_delay_s,
        )
        self._num_arrived += 1
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)
        return []

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request; None when it has ended already."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        output = self._scheduler.abort(sequence)
        self._drop_unused_adapters()
        return output

    def load_adapter(self, load: Callable[[], Mapping[str, LowRank]]) -> int:
        """Load an adapter; returns the id that requests name it by, which is never used again. Raises what
        ``load`` raises and MlxserveError for an adapter that does not fit; then nothing has changed."""
        adapter_id = self._num_adapters
        self._target.load_adapter(adapter_id, load())
        self._num_adapters += 1
        self._adapters.add(adapter_id)
        return adapter_id

    def drop_adapter(self, adapter_id: int) -> None:
        """Take no more requests of an adapter; it goes when the last that it has is done."""
        self._adapters.discard(adapter_id)
        self._retired_adapters.add(adapter_id)
        self._drop_unused_adapters()

    def _drop_unused_adapters(self) -> None:
        if not self._retired_adapters:
            return
        used = {sequence.request.adapter_id for sequence in self._sequences.values()}
        for adapter_id in self._retired_adapters - used:
            self._scheduler.cache.forget(adapter_id)
            self._target.drop_adapter(adapter_id)
            self._retired_adapters.remove(adapter_id)

    def step(self) -> list[TokenOutput]:
        """Launch the next step and read back the one before it.

        A failure ends the requests that run, as errors; those that wait go on.
        """
        try:
            outputs = self._step()
        except Exception as error:
            logger.exception("a step failed")
            return self._fail_running(error)
        for output in outputs:
            if output.finish_reason is not None:
                self._sequences.pop(output.request_id, None)
        self._drop_unused_adapters()
        return outputs

    def rest(self) -> None:
        """Nothing is left to do: check the books. A mistake in them costs the cache, not an answer."""
        self._pacer.rest()
        try:
            self.check_integrity()
        except AssertionError:
            logger.exception("KV pages are miscounted; the prefix cache is dropped")
            self._reset_pages()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            is_alive=True,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            pool_pages=scheduler.pool.num_pages,
            pool_limit_pages=scheduler.pool.limit,
            pool_free_pages=scheduler.pool.num_free,
            cached_pages=scheduler.cache.num_pages,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is accounted for."""
        self._scheduler.check_integrity()

    def _step(self) -> list[TokenOutput]:
        previous, self._in_flight = self._in_flight, None
        batch = self._scheduler.schedule(self._clock(), self._pacer.prefill_budget)
        self._is_stalled = batch is None
        if batch is not None:
            samples = self._runner.launch(batch, previous.samples if previous else None)
            self._in_flight = _LaunchedStep(batch, samples)
        outputs = self._read_back(previous) if previous else []
        if self._in_flight is not None and not self._is_pipelined:
            launched, self._in_flight = self._in_flight, None
            outputs += self._read_back(launched)
        return outputs

    def _read_back(self, step: _LaunchedStep) -> list[TokenOutput]:
        """Wait for a step; its samples go to the scheduler."""
        mx.eval(step.samples)
        batch = step.batch
        samples: Any = step.samples.tolist() if batch.num_sampled else []
        self._pacer.observe(batch.num_prefill_tokens, batch.num_tokens, self._clock())
        broken = self._fail_broken(batch, samples) if min(samples, default=0) < 0 else []
        return broken + self._scheduler.commit(batch, samples)

    def _fail_broken(self, batch: ScheduledBatch, samples: list[int]) -> list[TokenOutput]:
        """End the sequences whose logits were not numbers, before their samples are taken in."""
        outputs: list[TokenOutput] = []
        for row, sampled in batch.split(samples):
            request_id = row.sequence.request.request_id
            if any(token < 0 for token in sampled) and request_id in self._sequences:
                error = RequestFailedError("the model produced a NaN for this request")
                outputs.append(self._scheduler.abort(row.sequence, error))
        return outputs

    def _fail_running(self, cause: Exception) -> list[TokenOutput]:
        message = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        error = RequestFailedError(f"the engine failed on this step: {message}")
        self._in_flight = None
        outputs = []
        for request_id, sequence in list(self._sequences.items()):
            if sequence.status is SequenceStatus.RUNNING:
                outputs.append(self._scheduler.abort(sequence, error))
            elif sequence.status is SequenceStatus.FINISHED:
                # It ended within the step that failed, so nobody was told.
                outputs.append(TokenOutput(request_id, (), "error", error=error))
            else:
                continue
            del self._sequences[request_id]
        self._reset_pages()
        return outputs

    def _reset_pages(self) -> None:
        """Nothing runs and nothing is in flight: start over with empty pages and an empty cache."""
        pool = BlockPool(self._scheduler.pool.num_pages, self._scheduler.pool.limit)
        waiting = self._scheduler.waiting
        self._scheduler = Scheduler(self._config, pool, self._target.propose)
        for sequence in waiting:
            sequence.forget_pending()
            self._scheduler.add(sequence)
        self._runner.reset(pool.num_pages)
