"""What the engine needs of a model: paged keys and values in, logits of the sampled rows out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlxserve.engine.scheduler import ScheduledBatch
from mlxserve.engine.sequence import Sequence
from mlxserve.models.paged import PagedMetadata
from mlxserve.types import GenerationRequest
from mlxserve_kernels.adapters import LowRank


@dataclass(frozen=True, slots=True)
class StepInputs(PagedMetadata):
    """The arrays of one step; all int32. T tokens in S runs, R of the tokens sampled.

    token_ids    [T]     inputs, runs one after the other
    sampled_rows [R]     which tokens are sampled; None: all
    """

    token_ids: mx.array
    sampled_rows: mx.array | None


class Target(Protocol):
    """A loaded model. Lives on the engine thread, which alone may call it."""

    vocab_size: int
    weight_bytes: int
    page_bytes: int
    """Bytes of one KV page over all layers."""

    def resize(self, num_pages: int) -> None:
        """Make the page tensors hold ``num_pages``, keeping what they hold. No step is in flight."""

    def begin_step(self, batch: ScheduledBatch, previous: mx.array | None) -> None:
        """Before anything of a step: ``previous`` is the result of the step in flight, None without one."""

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy pages (source, target) on all layers (lazily); no target is a source or another target."""

    def forward(self, batch: ScheduledBatch, inputs: StepInputs) -> mx.array:
        """Write keys and values and return the logits [R, vocab_size], lazily. When R is 0, return any
        small array that is ready when all is written."""

    def load_adapter(self, adapter_id: int, changes: Mapping[str, LowRank]) -> None:
        """Make an adapter ready for the rows of requests with this id. Raises MlxserveError, and changes
        nothing, for one that does not fit."""

    def drop_adapter(self, adapter_id: int) -> None:
        """Forget an adapter that no live sequence uses."""

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """At most ``limit`` draft tokens that may follow the sequence."""

    def delays(self, request: GenerationRequest) -> tuple[float, float]:
        """Seconds that a request's prefill and each of its steps take at least (scripted models)."""
