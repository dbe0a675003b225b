"""The scripted model as a target: plays given tokens through the real scheduler, pages and sampler.

Its one layer stores token ids as keys and values, so that the reply "hash" can be picked from what
the pages really hold: a leaked or misplaced page changes the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxserve.engine.scheduler import ScheduledBatch, ScheduledSequence
from mlxserve.engine.sequence import Sequence
from mlxserve.engine.target import StepInputs
from mlxserve.errors import UnsupportedModelError
from mlxserve.models.page_routes import make_pages
from mlxserve.models.paged import LayerSpec
from mlxserve.text.scripted import ScriptedReply, ScriptedSpec
from mlxserve.text.scripted_tokenizer import EOS_ID
from mlxserve.types import GenerationRequest
from mlxserve_kernels.adapters import LowRank

PLAYED_LOGIT = np.float32(30.0)
"""Logit of the scripted token; all others have 0."""

_FIRST_LOGIT = np.nextafter(PLAYED_LOGIT, np.float32(31.0))
"""Of several equal tokens the first listed has the next larger float, so that greedy takes it."""

_HASH_LETTERS = b"abcdefghijklmnopqrstuvwxyz"


class ScriptedTarget:
    """Implements ``Target`` (see there) for a script."""

    weight_bytes = 0

    def __init__(self, spec: ScriptedSpec, page_size: int) -> None:
        self._spec = spec
        self.vocab_size = spec.tokenizer.vocab_size
        layer = LayerSpec(1, 1, 1, mx.float32, None)
        self.page_bytes = layer.page_bytes(page_size)
        self._pages = make_pages([layer], page_size)

    def resize(self, num_pages: int) -> None:
        self._pages.resize(num_pages)

    def begin_step(self, batch: ScheduledBatch, previous: mx.array | None) -> None:
        self._pages.begin_step(batch.rows, previous)

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        self._pages.copy(copies)

    def forward(self, batch: ScheduledBatch, inputs: StepInputs) -> mx.array:
        stored = inputs.token_ids.astype(mx.float32)[:, None, None]
        self._pages[0].write(stored, stored, self._pages.placed(batch.rows, inputs))
        if not batch.num_sampled:
            return self._pages[0].written()
        return mx.array(np.stack([row for run in batch.rows for row in self._logits(run)]))

    def load_adapter(self, adapter_id: int, changes: Mapping[str, LowRank]) -> None:
        raise UnsupportedModelError("a scripted model takes no adapters")

    def drop_adapter(self, adapter_id: int) -> None:
        raise AssertionError("no adapter was loaded")

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """A burst of n pieces is n - 1 right guesses, verified as any draft is."""
        reply = self._reply(sequence.request)
        count = min(reply.burst - 1, limit)
        if count <= 0 or reply.mode == "hash":
            return ()
        start = sequence.num_generated
        return tuple(self._played(sequence, start + index)[0] for index in range(count))

    def delays(self, request: GenerationRequest) -> tuple[float, float]:
        reply = self._reply(request)
        return reply.prefill_delay_s, reply.delay_s

    def _reply(self, request: GenerationRequest) -> ScriptedReply:
        return self._spec.select(request.script_key)

    def _logits(self, run: ScheduledSequence) -> list[npt.NDArray[np.float32]]:
        """Logits [vocab_size] of each sampled row of a run."""
        rows = []
        for offset in range(run.num_sampled):
            row = np.zeros(self.vocab_size, dtype=np.float32)
            played = self._picked(run, offset)
            row[list(played)] = PLAYED_LOGIT
            if len(played) > 1:
                row[played[0]] = _FIRST_LOGIT
            rows.append(row)
        return rows

    def _picked(self, run: ScheduledSequence, offset: int) -> tuple[int, ...]:
        if self._reply(run.sequence.request).mode != "hash":
            return self._played(run.sequence, run.sample_index + offset)
        length = run.start + run.num_tokens - run.num_sampled + 1 + offset
        digest = hashlib.blake2b(self._stored_ids(run, length).tobytes(), digest_size=8).digest()
        return (_HASH_LETTERS[int.from_bytes(digest, "big") % len(_HASH_LETTERS)],)

    def _played(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        """The equal best tokens of generated token ``index``."""
        reply = self._reply(sequence.request)
        if reply.mode == "prompt":
            pieces: tuple[tuple[int, ...], ...] = tuple((token,) for token in sequence.request.prompt_ids)
        else:
            pieces = reply.pieces
        if index < len(pieces):
            return pieces[index]
        return (EOS_ID,) if reply.end == "eos" else pieces[-1]

    def _stored_ids(self, run: ScheduledSequence, length: int) -> npt.NDArray[np.int32]:
        """Ids of the first ``length`` tokens, read from the pages."""
        pages = self._pages[0].keys_of(self._pages.entries(run.pages))
        return np.array(pages).reshape(-1)[:length].astype(np.int32)
