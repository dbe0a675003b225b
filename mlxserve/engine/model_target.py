"""A loaded mlx-lm model as the engine's target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx

from mlxserve.engine.adapter_table import AdapterTable
from mlxserve.engine.scheduler import ScheduledBatch
from mlxserve.engine.sequence import Sequence
from mlxserve.engine.target import StepInputs
from mlxserve.errors import UsageError
from mlxserve.models.loader import LoadedModel
from mlxserve.models.page_routes import make_pages
from mlxserve.types import GenerationRequest
from mlxserve_kernels.adapters import LowRank


class ModelTarget:
    """Implements ``Target`` (see there) for a model with pages a layer, of integers with ``kv_bits`` 8 or 4.

    Raises UsageError where the model's heads cannot be stored so.
    """

    def __init__(self, model: LoadedModel, page_size: int, kv_bits: int | None = None) -> None:
        self._model = model
        self._adapters = AdapterTable(model)
        self.vocab_size = model.vocab_size
        self.weight_bytes = model.weight_bytes
        specs = [replace(spec, kv_bits=kv_bits) for spec in model.layers]
        try:
            self.page_bytes = sum(spec.page_bytes(page_size) for spec in specs)
            self._pages = make_pages(specs, page_size)
        except ValueError as error:
            raise UsageError(f"kv_bits {kv_bits} does not fit this model: {error}") from error

    def resize(self, num_pages: int) -> None:
        self._pages.resize(num_pages)

    def begin_step(self, batch: ScheduledBatch, previous: mx.array | None) -> None:
        self._pages.begin_step(batch.rows, previous)

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        self._pages.copy(copies)

    def forward(self, batch: ScheduledBatch, inputs: StepInputs) -> mx.array:
        inputs = self._pages.placed(batch.rows, inputs)
        adapters = self._adapters.of_rows(batch.rows)
        if adapters is not None:
            inputs = replace(inputs, adapters=adapters)
        # A chunk that samples nothing still sends one row to the end, to tell when it is done.
        if batch.num_sampled:
            return self._model.logits(inputs.token_ids, self._pages, inputs, inputs.sampled_rows)
        one_row = mx.array([0], dtype=mx.int32)
        return self._model.logits(inputs.token_ids, self._pages, inputs, one_row)[0, :1]

    def load_adapter(self, adapter_id: int, changes: Mapping[str, LowRank]) -> None:
        self._adapters.load(adapter_id, changes)

    def drop_adapter(self, adapter_id: int) -> None:
        self._adapters.drop(adapter_id)

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        return ()

    def delays(self, request: GenerationRequest) -> tuple[float, float]:
        return 0.0, 0.0
