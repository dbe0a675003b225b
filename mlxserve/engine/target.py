"""What the engine needs of a model: paged keys and values in, logits of the sampled rows out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlxserve.engine.scheduler import ScheduledBatch
from mlxserve.engine.sequence import Sequence
from mlxserve.types import GenerationRequest


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arrays of one step; all int32. T tokens in S runs, R of the tokens sampled.

    token_ids    [T]     inputs, runs one after the other
    positions    [T]     position of each token in its sequence
    slot_mapping [T]     page * page_size + offset, where its key and value go
    block_tables [S, P]  pages of each run's sequence, padded with 0
    q_starts     [S+1]   run s is tokens q_starts[s] : q_starts[s+1]
    kv_lens      [S]     keys of the sequence up to and including the run
    sampled_rows [R]     which tokens are sampled
    """

    token_ids: mx.array
    positions: mx.array
    slot_mapping: mx.array
    block_tables: mx.array
    q_starts: mx.array
    kv_lens: mx.array
    sampled_rows: mx.array


class Target(Protocol):
    """A loaded model. Lives on the engine thread, which alone may call it."""

    vocab_size: int
    weight_bytes: int
    page_bytes: int
    """Bytes of one KV page over all layers."""

    def resize(self, num_pages: int) -> None:
        """Make the page tensors hold ``num_pages``, keeping what they hold. No step is in flight."""

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy pages (source, target) on all layers (lazily); no target is a source or another target."""

    def forward(self, batch: ScheduledBatch, inputs: StepInputs) -> mx.array:
        """Write keys and values and return the logits [R, vocab_size], lazily. When R is 0, return any
        small array that is ready when all is written."""

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """At most ``limit`` draft tokens that may follow the sequence."""

    def delays(self, request: GenerationRequest) -> tuple[float, float]:
        """Seconds that a request's prefill and each of its steps take at least (scripted models)."""
