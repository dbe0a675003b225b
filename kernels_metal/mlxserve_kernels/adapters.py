"""Low-rank adapters of the projections of a stack of decoder layers, one a row.

A call of a stack with adapters has slots, one adapter each, and a slot for each of its rows. A projection
``y`` of a row becomes ``y + scale * (x @ a) @ b``, with the change that its slot has for it, before norms,
rope, activation and residual: what mlx-lm's ``LoRALinear`` computes. A row in slot -1, and a projection for
which its slot has no change, have the bits that they have without adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxserve_kernels.stacks import Stack


@dataclass(frozen=True, slots=True)
class LowRank:
    """``scale * (x @ a) @ b``: a [K, R], b [R, N] of one dtype: float32, float16 or bfloat16."""

    a: mx.array
    b: mx.array
    scale: float


Adapter = Sequence[Mapping[str, LowRank]]
"""For each layer of a stack its changes, by the name of the projection: q, k, v, o, gate, up, down."""


class StackAdapters:
    """The adapters in the slots of ``stack``'s calls. Ranks may differ. Evaluates the arrays and copies
    them. Immutable: to load or drop an adapter, make another one; steps in flight
    keep theirs.

    Raises ValueError, naming layer and projection, for a change of what a layer does not have, of its
    experts, or of other shapes or dtypes.
    """

    def __init__(self, stack: Stack, adapters: Sequence[Adapter]) -> None:
        for slot, adapter in enumerate(adapters):
            if len(adapter) != stack.num_layers:
                raise ValueError(f"adapter {slot} has {len(adapter)} layers, the stack {stack.num_layers}")
        self.num_slots = len(adapters)
        self.native: Any = stack.native_adapters(
            len(adapters),
            [
                (slot, index, name, change.a, change.b, change.scale)
                for slot, adapter in enumerate(adapters)
                for index, layer in enumerate(adapter)
                for name, change in layer.items()
            ],
        )
