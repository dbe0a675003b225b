"""Low-rank adapters of a loaded model: which parts of its stacks they change.

An adapter names layers as mlx-lm does, ``model.layers.0.self_attn.q_proj``. What runs as part of a stack
(``mlxserve.models.fused``) can be changed row by row; anything else is refused when adapters are bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.nn as nn

from mlxserve.errors import UnsupportedModelError
from mlxserve.models.fused import FusedPart, fused_parts
from mlxserve_kernels.adapters import LowRank, StackAdapters


def bind_adapters(model: nn.Module, adapters: Sequence[Mapping[str, LowRank]]) -> dict[int, StackAdapters]:
    """The adapters in slots 0, 1, ... for forwards of ``model`` (``RowAdapters``), by the first layer of each
    stack that they change. Each maps paths of layers to their changes.

    Raises UnsupportedModelError, naming path and slot, for a layer that no stack runs, and ValueError for a
    change that does not fit its layer.
    """
    blocks = fused_parts(model)
    slots = [_by_layer(blocks, adapter, slot, len(model.layers)) for slot, adapter in enumerate(adapters)]
    bound = {}
    for part in blocks.values():
        if part.stack is None:
            continue
        changes = [layers[part.index : part.index + part.stack.num_layers] for layers in slots]
        if any(layer for layers in changes for layer in layers):
            bound[part.index] = StackAdapters(part.stack, changes)
    return bound


def _by_layer(
    blocks: Mapping[str, FusedPart], adapter: Mapping[str, LowRank], slot: int, num_layers: int
) -> list[dict[str, LowRank]]:
    layers: list[dict[str, LowRank]] = [{} for _ in range(num_layers)]
    for path, change in adapter.items():
        block = next((block for block in blocks if path.startswith(block + ".")), None)
        if block is None:
            raise UnsupportedModelError(f"adapter {slot} changes {path!r}, which is in no fused block")
        part = blocks[block]
        projections = part.projections.get(path.removeprefix(block + "."))
        if projections is None:
            raise UnsupportedModelError(
                f"adapter {slot} changes {path!r}; of that layer it can change " + ", ".join(part.projections)
            )
        layers[part.index] |= _split(change, projections, f"adapter {slot}, {path}")
    return layers


def _split(change: LowRank, projections: Sequence[tuple[str, int]], name: str) -> dict[str, LowRank]:
    """A layer of the model may be several projections of a stack: consecutive outputs."""
    width = sum(count for _, count in projections)
    if change.b.ndim != 2 or change.b.shape[1] != width:
        raise ValueError(f"{name}: b must be [R, {width}], got {list(change.b.shape)}")
    parts, begin = {}, 0
    for projection, count in projections:
        parts[projection] = LowRank(change.a, change.b[:, begin : begin + count], change.scale)
        begin += count
    return parts
