"""The adapters that an engine has loaded, and which of them the rows of a step use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxserve.engine.scheduler import ScheduledSequence
from mlxserve.errors import ModelLoadError
from mlxserve.models.adapters import bind_adapters
from mlxserve.models.kept_arrays import KeptArray, ints
from mlxserve.models.loader import LoadedModel
from mlxserve.models.paged import RowAdapters
from mlxserve_kernels.adapters import LowRank, StackAdapters


class AdapterTable:
    """Adapters by their ids. Lives on the engine thread; a step in flight keeps what it was given."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._changes: dict[int, Mapping[str, LowRank]] = {}
        self._bound: dict[int, StackAdapters] = {}
        self._slots: dict[int, int] = {}
        self._row_slots: KeptArray[list[int]] = KeptArray(ints)

    def load(self, adapter_id: int, changes: Mapping[str, LowRank]) -> None:
        """Raises UnsupportedModelError or ModelLoadError, and changes nothing, for an adapter that does not
        fit the model."""
        assert adapter_id not in self._changes
        self._bind({**self._changes, adapter_id: changes})

    def drop(self, adapter_id: int) -> None:
        """No row uses it any more."""
        self._bind({other: changes for other, changes in self._changes.items() if other != adapter_id})

    def _bind(self, changes: dict[int, Mapping[str, LowRank]]) -> None:
        try:
            bound = bind_adapters(self._model.module, list(changes.values()))
        except ValueError as error:
            raise ModelLoadError(f"the adapter does not fit the model: {error}") from None
        self._changes, self._bound = changes, bound
        self._slots = {adapter_id: slot for slot, adapter_id in enumerate(changes)}

    def of_rows(self, rows: Sequence[ScheduledSequence]) -> RowAdapters | None:
        """The slots of a step's tokens; None when no row has an adapter."""
        ids = [row.sequence.request.adapter_id for row in rows]
        if all(adapter_id is None for adapter_id in ids):
            return None
        slots: list[int] = []
        for row, adapter_id in zip(rows, ids, strict=True):
            slot = -1 if adapter_id is None else self._slots[adapter_id]
            slots.extend([slot] * row.num_tokens)
        return RowAdapters(self._bound, self._row_slots.get(slots))
