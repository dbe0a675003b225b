"""A stack of decoder layers op by op: what ``decoder.DecoderStack`` is on the CPU, for the Metal kernels.

Each layer is the description of ``decoder`` run through ``ops``. The sum of a layer's two residuals is left
to the norm that follows, so that it is one operation with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx

from mlxserve_kernels import ops
from mlxserve_kernels.decoder import DecoderLayer, Experts, Norm, Projection, Rope
from mlxserve_kernels.op_adapters import LayerChanges, OpAdapters


class LayerKeys(Protocol):
    """The keys and values of one layer in one forward. Lives as long as it."""

    def rope_and_write(self, q: mx.array, k: mx.array, v: mx.array, rope: Rope | None) -> mx.array:
        """Turn q [T, H, D] and k [T, H_kv, D] by the rows' positions, store k and v [T, H_kv, Dv]; returns
        the turned queries."""

    def attend(
        self,
        q: mx.array,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """``ops.paged_attention`` of q [T, H, D] over all that is stored: [T, H, Dv]."""


class OpStack:
    """Consecutive layers, op by op. Evaluates the arrays of the layers, and holds them."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self.num_layers = len(layers)
        self._layers = [_prepared(layer) for layer in layers]
        for layer in self._layers:
            mx.eval(layer.arrays)

    def __call__(
        self,
        hidden: mx.array,
        keys: Sequence[LayerKeys],
        *,
        adapters: OpAdapters | None = None,
        adapter_slots: mx.array | None = None,
    ) -> mx.array:
        """The hidden state behind the last layer: hidden [..., K] with T rows and the keys of each layer.

        ``adapters`` of this stack come with ``adapter_slots``, int32 of T entries, -1 for a row without.
        Raises ValueError for adapters of another stack and other slots; a slot that there is not is the
        caller's mistake.
        """
        rows = hidden.reshape(-1, hidden.shape[-1])
        changes = self._changes(rows.shape[0], adapters, adapter_slots)
        stream = _Stream(rows)
        for layer, layer_keys, layer_changes in zip(self._layers, keys, changes, strict=True):
            _run(layer, stream, layer_keys, layer_changes)
        return stream.total().reshape(hidden.shape)

    def native_adapters(
        self, num_slots: int, changes: list[tuple[int, int, str, mx.array, mx.array, float]]
    ) -> OpAdapters:
        """What ``StackAdapters`` wraps; a change is slot, layer, projection, a, b, scale."""
        return OpAdapters(self, [layer.description for layer in self._layers], num_slots, changes)

    def _changes(
        self, num_rows: int, adapters: OpAdapters | None, slots: mx.array | None
    ) -> Sequence[LayerChanges | None]:
        if adapters is None or slots is None:
            return [None] * self.num_layers
        if adapters.stack is not self:
            raise ValueError("DecoderStack: the adapters were made for another stack")
        if slots.dtype != mx.int32 or slots.size != num_rows:
            raise ValueError(f"DecoderStack: adapter_slots must be int32 with {num_rows} entries")
        return adapters.of_rows(slots)


@dataclass(slots=True)
class _Stream:
    """The hidden state: rows, and what is still to be added to them."""

    rows: mx.array
    delta: mx.array | None = None

    def add(self, delta: mx.array) -> None:
        """Of two in a row, as where no norm comes between, the first is added at once."""
        self.rows = self.total()
        self.delta = delta

    def total(self) -> mx.array:
        if self.delta is not None:
            self.rows, self.delta = self.rows + self.delta, None
        return self.rows

    def normed(self, norm: Norm | None) -> mx.array:
        if norm is None or self.delta is None:
            return _normed(self.total(), norm)
        normed, self.rows = ops.rms_norm(self.delta, norm.weight, norm.eps, self.rows)
        self.delta = None
        return normed


@dataclass(frozen=True, slots=True)
class _Layer:
    """A description whose projections are arrays of their own rows; ``qkv`` where these are neighbours of one
    weight, in place of the three."""

    description: DecoderLayer
    qkv: Projection | None

    @property
    def arrays(self) -> list[mx.array]:
        layer = self.description
        parts = [*layer.projections.values(), self.qkv]
        arrays = [a for p in parts if p is not None for a in (p.w, p.scales, p.biases, p.bias)]
        for norm in (
            layer.attention_norm, layer.q_norm, layer.k_norm, layer.post_attention_norm, layer.mlp_norm,
            layer.post_mlp_norm,
        ):  # fmt: skip
            arrays.append(None if norm is None else norm.weight)
        arrays += [layer.sinks, None if layer.rope is None else layer.rope.wavelengths]
        return [array for array in arrays if array is not None]


def _prepared(layer: DecoderLayer) -> _Layer:
    q, k, v = layer.q, layer.k, layer.v
    is_whole = q.w is k.w is v.w and (q.end, k.end) == (k.begin, v.begin) and q.bias is k.bias is v.bias
    qkv = ops.own_rows(replace(q, end=v.end)) if is_whole else None
    parts: dict[str, Any] = {name: ops.own_rows(part) for name, part in layer.projections.items()}
    return _Layer(replace(layer, **parts), qkv)


def _run(layer: _Layer, stream: _Stream, keys: LayerKeys, changes: LayerChanges | None) -> None:
    described = layer.description
    multiplier = described.residual_multiplier
    attended = _attention(layer, stream.normed(described.attention_norm), keys, changes)
    stream.add(_scaled(_normed(attended, described.post_attention_norm), multiplier))
    mlp = _mlp(described, stream, changes)
    if mlp is not None:
        stream.add(_scaled(_normed(mlp, described.post_mlp_norm), multiplier))


def _attention(layer: _Layer, h: mx.array, keys: LayerKeys, changes: LayerChanges | None) -> mx.array:
    described, num_rows = layer.description, h.shape[0]
    q, k, v = _qkv(layer, h, changes)
    heads, kv_heads = (num_rows, described.heads, -1), (num_rows, described.kv_heads, -1)
    q, k = (
        _head_normed(x, n, s) for x, n, s in ((q, described.q_norm, heads), (k, described.k_norm, kv_heads))
    )
    q = keys.rope_and_write(q, k, v.reshape(kv_heads), described.rope)
    attended = keys.attend(
        q,
        scale=described.scale,
        window=described.window,
        softcap=described.softcap,
        sinks=described.sinks,
    )
    return _product("o", attended.reshape(num_rows, -1), described.o, changes)


def _qkv(layer: _Layer, h: mx.array, changes: LayerChanges | None) -> tuple[mx.array, mx.array, mx.array]:
    described = layer.description
    parts = {"q": described.q, "k": described.k, "v": described.v}
    if layer.qkv is None:
        q, k, v = (_product(name, h, part, changes) for name, part in parts.items())
        return q, k, v
    ends = [described.q.num_outputs, described.q.num_outputs + described.k.num_outputs]
    split = mx.split(ops.project(h, layer.qkv), ends, axis=-1)
    q, k, v = (_changed(name, h, y, changes) for name, y in zip(parts, split, strict=True))
    return q, k, v


def _mlp(layer: DecoderLayer, stream: _Stream, changes: LayerChanges | None) -> mx.array | None:
    if layer.experts is None and layer.gate is None:
        return None
    h = stream.normed(layer.mlp_norm)
    if layer.experts is None:
        return _dense(layer, h, changes)
    y = _experts(layer.experts, h, layer)
    if layer.experts.shared_gate is None:
        return y
    return y + mx.sigmoid(ops.project(h, layer.experts.shared_gate)) * _dense(layer, h, changes)


def _dense(layer: DecoderLayer, h: mx.array, changes: LayerChanges | None) -> mx.array:
    gate, up, down = layer.gate, layer.up, layer.down
    assert gate is not None
    assert up is not None
    assert down is not None
    if changes is None or not changes.keys() & {"gate", "up"}:
        inner = ops.gate_up(h, gate, up, activation=layer.activation)
    else:
        act = _ACTIVATIONS[layer.activation]
        inner = act(_product("gate", h, gate, changes), _product("up", h, up, changes))
    return _product("down", inner, down, changes)


def _gelu_mul(gate: mx.array, up: mx.array) -> mx.array:
    return ops.gelu_mul(gate, up, approx="tanh")


_ACTIVATIONS: Mapping[str, Callable[[mx.array, mx.array], mx.array]] = {
    "silu": ops.silu_mul,
    "gelu_tanh": _gelu_mul,
}


def _experts(experts: Experts, h: mx.array, layer: DecoderLayer) -> mx.array:
    logits = ops.project(h, experts.router).astype(mx.float32)
    ids, shares = ops.route(logits, experts.top_k, is_normalized=experts.is_normalized)
    return ops.gated_experts(
        h, ids, experts.gate, experts.up, experts.down, activation=layer.activation, shares=shares
    )


def _product(name: str, x: mx.array, part: Projection, changes: LayerChanges | None) -> mx.array:
    return _changed(name, x, ops.project(x, part), changes)


def _changed(name: str, x: mx.array, y: mx.array, changes: LayerChanges | None) -> mx.array:
    change = None if changes is None else changes.get(name)
    return y if change is None else y + ops.lora_delta(x, change.a, change.b, change.slots, change.scales)


def _head_normed(x: mx.array, norm: Norm | None, shape: tuple[int, int, int]) -> mx.array:
    """Per head, or over all heads of a row, as the norm has weights."""
    if norm is not None and norm.weight.size == x.shape[-1]:
        return _normed(x, norm).reshape(shape)
    return _normed(x.reshape(shape), norm)


def _normed(x: mx.array, norm: Norm | None) -> mx.array:
    return x if norm is None else ops.rms_norm(x, norm.weight, norm.eps)


def _scaled(x: mx.array, multiplier: float) -> mx.array:
    return x if multiplier == 1.0 else x * multiplier
