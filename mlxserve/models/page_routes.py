"""Pages that are written while a step is in flight, on a Mac, where nothing may alias its input. The route is
``dispatch.page_route``:

aliased, drained    ``ModelPages``: the pools are written by ``ops.write_pages``
tail                ``TailedModelPages``: a step writes tails (``tail_table``); pools are written only while
                    nothing is in flight
through             ``ThroughModelPages``: kernels write through the pools, which mlx takes for inputs; tokens
                    keep the order
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlxserve.models.kept_arrays import KeptArray, ints, padded_tables
from mlxserve.models.paged import LayerPages, LayerSpec, Metadata, ModelPages, PagedMetadata
from mlxserve.models.tail_table import Run, TailTable
from mlxserve_kernels import ops
from mlxserve_kernels.dispatch import page_route
from mlxserve_kernels.page_rows import PIECE_SIZE, TOKEN_SIZE, KvPages, KvRows
from mlxserve_kernels.reference import pages_at


def make_pages(specs: Iterable[LayerSpec], page_size: int) -> ModelPages:
    """Pages by the route that is chosen. ValueError for a wrong MLXSERVE_PAGE_ROUTE, and where ``LayerPages``
    raise it."""
    kinds = {"tail": TailedModelPages, "through": ThroughModelPages}
    return kinds.get(page_route(), ModelPages)(specs, page_size)


class TailedLayerPages(LayerPages):
    """Layer pages of which the open ones are in ``tails``, as many as the newest step placed."""

    def __init__(self, spec: LayerSpec, page_size: int) -> None:
        super().__init__(spec, page_size)
        self.clear()

    def clear(self) -> None:
        """One tail that nobody uses: kernels take no empty arrays."""
        self.tails = KvPages(
            *(mx.zeros((1, *pool.shape[1:]), dtype=pool.dtype) for pool in (self.keys, self.values))
        )

    def store(self, rows: mx.array, pages: mx.array) -> None:
        """Put tails into the pools, in place, since nothing else holds these; nothing is in flight."""
        self.keys[pages] = self.tails.keys[rows]
        self.values[pages] = self.tails.values[rows]

    def written(self) -> mx.array:
        return self.tails.keys[0, 0, 0]

    def keys_of(self, entries: Sequence[int]) -> mx.array:
        return pages_at(self.keys, self.tails.keys, mx.array(list(entries), dtype=mx.int32))

    def _write(self, rows: KvRows, metadata: PagedMetadata) -> mx.array | None:
        assert metadata.pieces is not None, "these are no metadata of ModelPages.placed"
        q, self.tails = ops.write_tails(
            rows, self._pools, self.tails, metadata.pieces, kv_bits=self.spec.kv_bits
        )
        return q

    def _read_options(self) -> dict[str, Any]:
        return {"tails": self.tails}


class TailedModelPages(ModelPages):
    """Model pages whose layers have the tails that one table describes."""

    layer_class = TailedLayerPages

    def __init__(self, specs: Iterable[LayerSpec], page_size: int) -> None:
        super().__init__(specs, page_size)
        self._table = TailTable(page_size)
        self._block_tables: KeptArray[list[tuple[int, ...]]] = KeptArray(padded_tables)

    def resize(self, num_pages: int) -> None:
        super().resize(num_pages)
        if num_pages == 0:
            self._table.clear()
            for layer in self._tailed:
                layer.clear()

    def begin_step(self, runs: Sequence[Run], previous: mx.array | None) -> None:
        closed = self._table.take_closed(runs)
        if not closed:
            return
        if previous is not None:
            mx.eval(previous)
        rows, pages = (mx.array(ids, dtype=mx.int32) for ids in zip(*closed, strict=True))
        for layer in self._tailed:
            layer.store(rows, pages)
        mx.eval([[layer.keys, layer.values] for layer in self._tailed])

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        # All copies are of what the pages hold now: no target is a source.
        for source, target in copies:
            self._table.copy(source, target)

    def placed(self, runs: Sequence[Run], metadata: Metadata) -> Metadata:
        pieces = [(*piece, *(0,) * (PIECE_SIZE - 4)) for piece in self._table.place(runs)]
        return replace(
            metadata,
            block_tables=self._block_tables.get([self._table.entries(run.pages) for run in runs]),
            pieces=ints(pieces),
        )

    def entries(self, pages: Sequence[int]) -> Sequence[int]:
        return self._table.entries(pages)

    @property
    def _tailed(self) -> list[TailedLayerPages]:
        return [layer for layer in self if isinstance(layer, TailedLayerPages)]


class ThroughLayerPages(LayerPages):
    """Layer pages that are written through; ``order`` is the newest token."""

    def __init__(self, spec: LayerSpec, page_size: int) -> None:
        super().__init__(spec, page_size)
        self.clear()

    def clear(self) -> None:
        """Wait for nothing."""
        self.order = mx.zeros((TOKEN_SIZE,), dtype=mx.int32)

    def copy(self, source_ids: mx.array, target_ids: mx.array) -> None:
        self.order = ops.copy_through(self._pools, source_ids, target_ids, self.order)

    def written(self) -> mx.array:
        return self.order

    def keys_of(self, entries: Sequence[int]) -> mx.array:
        mx.eval(self.order)
        return super().keys_of(entries)

    def _write(self, rows: KvRows, metadata: PagedMetadata) -> mx.array | None:
        q, self.order = ops.write_through(
            rows, self._pools, metadata.slot_mapping, self.order, kv_bits=self.spec.kv_bits
        )
        return q

    def _read_options(self) -> dict[str, Any]:
        return {"order": self.order}


class ThroughModelPages(ModelPages):
    """Model pages whose layers are written through."""

    layer_class = ThroughLayerPages

    def __init__(self, specs: Iterable[LayerSpec], page_size: int) -> None:
        super().__init__(specs, page_size)
        self._are_copies_unread = False

    def resize(self, num_pages: int) -> None:
        super().resize(num_pages)
        if num_pages == 0:
            # A step that failed leaves tokens that never come.
            for layer in self._written_through:
                layer.clear()

    def begin_step(self, runs: Sequence[Run], previous: mx.array | None) -> None:
        """What this step writes comes behind all that the step in flight reads."""
        layers = self._written_through
        # Copies that nothing has read: the result of their step does not wait for them.
        mx.eval([layer.order for layer in layers] if self._are_copies_unread else [])
        self._are_copies_unread = False
        if previous is not None:
            order = ops.order_behind(previous)
            for layer in layers:
                layer.order = order

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        super().copy(copies)
        self._are_copies_unread = True

    def placed(self, runs: Sequence[Run], metadata: Metadata) -> Metadata:
        self._are_copies_unread = False
        return metadata

    @property
    def _written_through(self) -> list[ThroughLayerPages]:
        return [layer for layer in self if isinstance(layer, ThroughLayerPages)]
