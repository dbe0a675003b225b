"""An adapter put into the weights of its base: a folder that needs no adapter.

Weights stream through the converter's writer. A quantized layer cannot simply take a small change: rounding
to its own grid would bring the base back. So each changed layer is measured, ``lost`` being the size of the
rounding error over the size of the change, and gets the fewest bits that keep the change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx

from mlxserve.errors import ConversionError, UsageError
from mlxserve.models.adapter_folder import AdapterFolder
from mlxserve_convert.checkpoint import Checkpoint
from mlxserve_convert.mlx_checkpoint import dequantized
from mlxserve_convert.plan import Plan, Target
from mlxserve_convert.rounding import quantized_rows
from mlxserve_convert.weights import Layout, Leaf, Weight

FuseBits = Literal["auto", "keep", "floats"]

MAX_LOST = 0.25
"""Rounding error over change, by their Frobenius norms, that a fused layer may have."""
CLOSE_LOST = 0.02
"""The same where ``MAX_LOST`` in each layer is too much for all of them together."""
MAX_LOST_WIDE = 1.0
"""The same from 8 bits on: there, steps are small beside the weights, and errors are noise that does not
bring the base back."""
_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """How a changed layer was written. ``lost`` is the rounding error over the change."""

    path: str
    bits_before: int | None
    bits_after: int | None
    lost: float


class Changed(Weight):
    """The rows of a weight with an adapter's change, in float32. A zero change gives the base's values."""

    def __init__(self, base: Weight, adapter: LayerChange) -> None:
        super().__init__(base.shape, mx.float32, base.source_types, is_quantized=base.is_quantized)
        self.base = base
        self._adapter = adapter

    def read(self, start: int, stop: int) -> mx.array:
        base = self.base.read(start, stop).astype(mx.float32)
        return self._adapter.applied(base, start, stop, self.shape)

    def prefetch(self, start: int, stop: int) -> None:
        self.base.prefetch(start, stop)

    def release(self) -> None:
        self.base.release()


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A low-rank change of a linear layer, of experts or of an embedding, with DoRA's lengths ``m``."""

    path: str
    a: mx.array
    b: mx.array
    scale: float
    m: mx.array | None
    is_embedding: bool

    def applied(self, base: mx.array, start: int, stop: int, shape: tuple[int, ...]) -> mx.array:
        """Rows [start, stop) of the flattened weight with the change."""
        changed = base + self._delta(start, stop, shape)
        if self.m is None:
            return changed
        length = mx.linalg.norm(changed, axis=-1, keepdims=True)
        return changed * (self.m[start:stop, None].astype(mx.float32) / length)

    def _delta(self, start: int, stop: int, shape: tuple[int, ...]) -> mx.array:
        a, b = self.a.astype(mx.float32), self.b.astype(mx.float32)
        if self.is_embedding:
            return self.scale * (a[start:stop] @ b)
        if len(shape) == 2:
            return self.scale * (b[:, start:stop].T @ a.T)
        outputs = shape[1]
        parts = []
        for expert in range(start // outputs, -(-stop // outputs)):
            first, last = max(start - expert * outputs, 0), min(stop - expert * outputs, outputs)
            parts.append(b[expert, first:last] @ a[expert])
        return self.scale * mx.concatenate(parts)


def fused_plan(
    checkpoint: Checkpoint, plan: Plan, adapter: AdapterFolder, bits: FuseBits, limit: float = MAX_LOST
) -> tuple[Plan, tuple[FusedLayer, ...]]:
    """The plan of the base with the adapter's layers changed. Reads the changed layers once, to measure.
    ``limit`` is what ``auto`` allows a layer of fewer than 8 bits to lose.

    Raises UsageError for a layer that the base does not have or that has another shape, and ConversionError
    with the figures when ``keep`` would lose a change.
    """
    changes = _changes(adapter, plan)
    layers: list[FusedLayer] = []
    targets = []
    for target in plan.targets:
        change = changes.get(target.name)
        if change is None:
            targets.append(target if bits != "floats" else _as_floats(target))
        elif isinstance(change, mx.array):
            targets.append(_replaced(target, change))
        else:
            fused, layer = _fused(target, change, bits, limit)
            targets.append(fused)
            layers.append(layer)
    lost = [layer for layer in layers if layer.lost > _limit(layer.bits_after)]
    if lost:
        worst = max(lost, key=lambda layer: layer.lost)
        raise ConversionError(
            f"{len(lost)} of {len(layers)} changed layers would lose their change by rounding, the most "
            f"{worst.path}: an error of {worst.lost:.2f} times the change at {worst.bits_after} bits (limit "
            f"{_limit(worst.bits_after)}); use --bits auto or --dequantize"
        )
    return replace(plan, targets=tuple(targets)), tuple(layers)


def _changes(adapter: AdapterFolder, plan: Plan) -> dict[str, LayerChange | mx.array]:
    """By the name of the parameter that is changed; an array replaces it."""
    shapes = {target.name: target.weight.shape for target in plan.targets}
    if adapter.type == "full":
        for name, value in adapter.weights.items():
            _check(adapter, name, shapes.get(name) == tuple(value.shape), value.shape, shapes.get(name))
        return dict(adapter.weights)
    scale = adapter.scale
    changes: dict[str, LayerChange | mx.array] = {}
    for name in adapter.weights:
        path, _, kind = name.rpartition(".")
        if kind not in ("lora_a", "lora_b", "m"):
            raise UsageError(f"{adapter.path}: {name} is no part of an adapter")
        a, b = adapter.weights.get(f"{path}.lora_a"), adapter.weights.get(f"{path}.lora_b")
        if a is None or b is None:
            raise UsageError(f"{adapter.path}: {path} has only one of lora_a and lora_b")
        shape = shapes.get(f"{path}.weight")
        is_embedding = path.endswith(("embed_tokens", "wte", "embeddings"))
        _check(adapter, path, shape is not None and _fits(a, b, shape, is_embedding), a.shape, shape)
        m = adapter.weights.get(f"{path}.m")
        if (m is not None) != (adapter.type == "dora"):
            raise UsageError(
                f"{adapter.path}: {path}: fine_tune_type {adapter.type} does not fit its tensors"
            )
        changes[f"{path}.weight"] = LayerChange(path, a, b, scale, m, is_embedding)
    return changes


def _check(adapter: AdapterFolder, name: str, is_right: bool, found: Any, expected: Any) -> None:
    if not is_right:
        where = "the base has no such layer" if expected is None else f"the base's weight is {expected}"
        raise UsageError(f"{adapter.path}: {name} of shape {tuple(found)} does not fit: {where}")


def _fits(a: mx.array, b: mx.array, shape: tuple[int, ...], is_embedding: bool) -> bool:
    if is_embedding:
        return len(shape) == 2 and a.shape[0] == shape[0] and b.shape[1] == shape[1]
    if len(shape) == 3:
        num_experts, outputs, inputs = shape
        rank = b.shape[-1]
        expected = ((num_experts, rank, inputs), (num_experts, outputs, rank))
        return (tuple(a.shape), tuple(b.shape)) == expected
    return a.shape[0] == shape[1] and b.shape[1] == shape[0] and a.shape[1] == b.shape[0]


def _replaced(target: Target, value: mx.array) -> Target:
    return replace(target, weight=Leaf(value, "trained"), layout=None, dtype=value.dtype, is_kept=False)


def _as_floats(target: Target) -> Target:
    return replace(target, layout=None, is_kept=False)


def _fused(target: Target, change: LayerChange, bits: FuseBits, limit: float) -> tuple[Target, FusedLayer]:
    weight = Changed(target.weight, change)
    source = target.weight.layout or target.layout
    before = None if source is None else source.bits
    candidates = _candidates(target, bits)
    losses = _lost(weight, candidates, target.dtype)
    if losses is None:
        # Even without a change, rounding again would not bring every value back.
        same = _as_floats(target) if bits == "floats" else target
        return same, FusedLayer(change.path, before, None if bits == "floats" else before, 0.0)
    # Without a change that fits none, the last is the best there is.
    limits = [_limit(None if layout is None else layout.bits, limit) for layout in candidates]
    fitting = [i for i, (lost, most) in enumerate(zip(losses, limits, strict=True)) if lost <= most]
    chosen = fitting[0] if fitting else len(losses) - 1
    layout = candidates[chosen]
    fused = replace(target, weight=weight, layout=layout, is_kept=False)
    after = None if layout is None else layout.bits
    return fused, FusedLayer(change.path, before, after, losses[chosen])


def _limit(bits: int | None, narrow: float = MAX_LOST) -> float:
    return narrow if bits is not None and bits < 8 else MAX_LOST_WIDE


def _candidates(target: Target, bits: FuseBits) -> list[Layout | None]:
    """Layouts from the fewest bits on; None is floats."""
    own = target.layout
    if own is None or bits == "floats":
        return [None]
    if bits == "keep":
        return [own]
    wider = []
    if own.bits < 8 or not own.has_biases:
        dtype = own.scale_dtype if own.has_biases else target.dtype
        wider = [Layout("affine", 8, 32, dtype)] if target.weight.num_columns % 32 == 0 else []
    return [own, *wider, None]


def _lost(weight: Changed, candidates: list[Layout | None], dtype: mx.Dtype) -> list[float] | None:
    """For each candidate the size of its rounding error over the size of the change; None without one."""
    errors = [0.0] * len(candidates)
    change = 0.0
    step = max(1, _BLOCK_ELEMENTS // max(weight.num_columns, 1))
    for start in range(0, weight.num_rows, step):
        stop = min(start + step, weight.num_rows)
        wanted = weight.read(start, stop)
        change += _squares(wanted - weight.base.read(start, stop).astype(mx.float32))
        for index, layout in enumerate(candidates):
            errors[index] += _squares(_rounded(wanted, layout, dtype) - wanted)
    return [(error / change) ** 0.5 for error in errors] if change else None


def _rounded(values: mx.array, layout: Layout | None, dtype: mx.Dtype) -> mx.array:
    if layout is None:
        return values.astype(dtype).astype(mx.float32)
    return dequantized(quantized_rows(values.astype(dtype), layout, None), layout, mx.float32)


def _squares(values: mx.array) -> float:
    total: Any = mx.sum(mx.square(values)).item()
    return float(total)


def layers_summary(layers: tuple[FusedLayer, ...]) -> Mapping[str, int]:
    """How many changed layers got which bits."""
    counts: dict[str, int] = {}
    for layer in layers:
        name = "floats" if layer.bits_after is None else f"{layer.bits_after}-bit"
        counts[name] = counts.get(name, 0) + 1
    return counts
