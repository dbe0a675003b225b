"""Low-rank adapters of an ``OpStack``: of each changed projection the matrices of all slots, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxserve_kernels.decoder import DecoderLayer
from mlxserve_kernels.dispatch import FLOAT_TYPES

Change = tuple[int, int, str, mx.array, mx.array, float]
"""Slot, layer, projection, a, b, scale."""


@dataclass(frozen=True, slots=True)
class RowChanges:
    """``ops.lora_delta`` for one projection in one forward."""

    a: mx.array
    b: mx.array
    scales: mx.array
    slots: mx.array


LayerChanges = Mapping[str, RowChanges]
"""By the name of the projection."""


@dataclass(frozen=True, slots=True)
class _Site:
    """The changes of one projection. ``places[slot + 1]``: which of them a slot has, -1 for none."""

    a: mx.array
    b: mx.array
    scales: mx.array
    places: mx.array


class OpAdapters:
    """Immutable. Raises ValueError, naming layer and projection, for a change of what a layer does not have,
    of its experts, or of other shapes or dtypes. Matrices of one projection are widened to one dtype."""

    def __init__(
        self, stack: object, layers: Sequence[DecoderLayer], num_slots: int, changes: Sequence[Change]
    ) -> None:
        self.stack = stack
        found: list[dict[str, dict[int, Change]]] = [{} for _ in layers]
        for change in changes:
            slot, index, name, *_ = change
            _check(layers[index], change)
            found[index].setdefault(name, {})[slot] = change
        self._sites = [{name: _site(slots, num_slots) for name, slots in sites.items()} for sites in found]
        mx.eval([[s.a, s.b, s.scales, s.places] for sites in self._sites for s in sites.values()])

    def of_rows(self, slots: mx.array) -> list[LayerChanges]:
        """Of each layer, for rows in these slots."""
        return [
            {name: RowChanges(s.a, s.b, s.scales, s.places[slots + 1]) for name, s in sites.items()}
            for sites in self._sites
        ]


def _check(layer: DecoderLayer, change: Change) -> None:
    _, index, name, a, b, _ = change
    where = f"Adapters: layer {index}, {name}"
    part = layer.projections.get(name)
    if part is None:
        is_of_experts = layer.experts is not None and name in ("gate", "up", "down")
        what = "adapters of experts are not supported" if is_of_experts else "there is no such projection"
        raise ValueError(f"{where}: {what}")
    if a.dtype not in FLOAT_TYPES or a.dtype != b.dtype:
        raise ValueError(f"{where}: a and b must have one dtype, got {a.dtype} and {b.dtype}")
    k, n = part.num_inputs, part.num_outputs
    is_shaped = a.ndim == b.ndim == 2 and (a.shape[0], b.shape[1]) == (k, n)
    if not is_shaped or a.shape[1] != b.shape[0] or not a.shape[1]:
        raise ValueError(f"{where}: a must be [{k}, R] and b [R, {n}], got {_shape(a)} and {_shape(b)}")


def _shape(array: mx.array) -> str:
    return f"({','.join(map(str, array.shape))})"


def _site(changes: Mapping[int, Change], num_slots: int) -> _Site:
    order = sorted(changes)
    rank = max(changes[slot][3].shape[1] for slot in order)
    dtypes = {changes[slot][3].dtype for slot in order}
    dtype = dtypes.pop() if len(dtypes) == 1 else mx.float32
    a = [_padded(changes[slot][3].astype(dtype), rank, axis=1) for slot in order]
    b = [_padded(changes[slot][4].astype(dtype), rank, axis=0) for slot in order]
    places = [-1] * (num_slots + 1)
    for place, slot in enumerate(order):
        places[slot + 1] = place
    scales = mx.array([changes[slot][5] for slot in order], dtype=mx.float32)
    return _Site(mx.stack(a), mx.stack(b), scales, mx.array(places, dtype=mx.int32))


def _padded(array: mx.array, rank: int, *, axis: int) -> mx.array:
    widths = [(0, 0), (0, 0)]
    widths[axis] = (0, rank - array.shape[axis])
    return mx.pad(array, widths)
