"""Whole decoder layers as one operation: what a layer is made of, and the stack that runs some of them.

One layer, with x the hidden state [T, hidden] and everything in brackets left out where its field is None::

    h = [attention_norm](x)
    q, k, v = q_proj(h), k_proj(h), v_proj(h)
    q, k = rope([q_norm](q)), rope([k_norm](k))             (per head, or over all heads of a row)
    write k, v to the pages; attended = paged_attention(q)  (ops.write_pages, ops.paged_attention)
    x = x + residual_multiplier * [post_attention_norm](o_proj(attended))
    h = [mlp_norm](x)
    x = x + residual_multiplier * [post_mlp_norm](down(activation(gate(h)) * up(h)))

Rows may have adapters, which change their projections (``mlxserve_kernels.adapters``).

A row's bits do not depend on the other rows of a call, on page placement or on the number of threads, and
are those that the single operations of ``ops`` give. Angles are the float32 products that mx.fast.rope takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx

from mlxserve_kernels.dispatch import FLOAT_TYPES, TILE_ROWS, extension, reads_quantized
from mlxserve_kernels.experts import ExpertWeights

if TYPE_CHECKING:
    from mlxserve_kernels.adapters import StackAdapters


@dataclass(frozen=True, slots=True)
class Projection:
    """``x @ dequantize(w).T + bias``: rows ``begin`` to ``end - 1`` (None: all) of a quantized weight as in
    ``ops.quantized_matmul``, or, without scales, of a dense one as in ``ops.linear``, or, with a
    ``scale_dtype``, of tiles as in ``ops.tiled_matmul`` (``begin`` and ``end`` between tiles)."""

    w: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    group_size: int = 0
    bits: int = 0
    bias: mx.array | None = None
    begin: int = 0
    end: int | None = None
    scale_dtype: mx.Dtype | None = None
    mode: str = "affine"

    @property
    def num_rows(self) -> int:
        """Rows of the whole weight."""
        rows = int(self.w.shape[0])
        return rows if self.scale_dtype is None else rows * TILE_ROWS

    @property
    def num_inputs(self) -> int:
        if self.scale_dtype is not None:
            return int(self.w.shape[1]) * self.group_size
        width = int(self.w.shape[1])
        return width if self.scales is None else width * 32 // self.bits

    @property
    def num_outputs(self) -> int:
        return (self.num_rows if self.end is None else self.end) - self.begin

    @property
    def is_supported(self) -> bool:
        """Whether the kernels read this format."""
        if self.scale_dtype is not None:
            return self.begin % TILE_ROWS == 0 and (self.end or 0) % TILE_ROWS == 0
        if self.w.ndim != 2 or not self.w.size:
            return False
        if self.scales is None:
            return self.biases is None and self.w.dtype in FLOAT_TYPES
        return reads_quantized(
            self.scales, self.biases, group_size=self.group_size, bits=self.bits, mode=self.mode
        )


@dataclass(frozen=True, slots=True)
class Norm:
    """``ops.rms_norm`` with this weight."""

    weight: mx.array
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of the first ``2 * len(inverse_frequencies)`` values of a head, scaled by ``input_scale``
    before, by ``position * position_scale * inverse_frequencies[i]``. Pairs are halves of the rotated part
    or, ``is_interleaved``, neighbours."""

    inverse_frequencies: mx.array
    position_scale: float = 1.0
    input_scale: float = 1.0
    is_interleaved: bool = False
    wavelengths: mx.array = field(init=False)
    """The inverses, as mx.fast.rope wants them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "wavelengths", 1.0 / self.inverse_frequencies.astype(mx.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What stands in the place of a layer's gate, up and down (``ops.route``, ``ops.gated_experts``)::

        ids, shares = route(router(h), top_k)
        y = gated_experts(h, ids, shares)

    ``shared_gate``, of one output, is for layers that have gate, up and down as well: to y is added
    ``sigmoid(shared_gate(h)) * down(activation(gate(h)) * up(h))``.
    """

    router: Projection
    gate: ExpertWeights
    up: ExpertWeights
    down: ExpertWeights
    top_k: int
    is_normalized: bool
    shared_gate: Projection | None = None

    @property
    def is_supported(self) -> bool:
        """Whether the kernels read all formats."""
        parts = (self.router, self.shared_gate, self.gate, self.up, self.down)
        return all(part.is_supported for part in parts if part is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """See the module's docstring; attention parameters as in ``ops.paged_attention``. ``gate``, ``up`` and
    ``down`` are all None for a layer with experts and no shared one, and, without experts too, for one that
    ends after its attention."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    scale: float
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    gate: Projection | None = None
    up: Projection | None = None
    down: Projection | None = None
    experts: Experts | None = None
    attention_norm: Norm | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    post_attention_norm: Norm | None = None
    mlp_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    rope: Rope | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: mx.array | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    residual_multiplier: float = 1.0

    @property
    def projections(self) -> dict[str, Projection]:
        """Those that there are, by name."""
        parts = {name: getattr(self, name) for name in ("q", "k", "v", "o", "gate", "up", "down")}
        return {name: part for name, part in parts.items() if part is not None}


class DecoderStack:
    """Consecutive layers in the extension, which must be there (see ``stacks.can_stack``). Evaluates the
    arrays of the layers, and shares their memory: they must not change.

    Raises ValueError where the parts of a layer do not fit together.
    """

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self._cpu = extension()
        assert self._cpu is not None
        self.num_layers = len(layers)
        self._stack = self._cpu.DecoderStack([_native(self._cpu, layer) for layer in layers])

    def hold(
        self, k_pools: Sequence[mx.array], v_pools: Sequence[mx.array], kv_bits: int | None = None
    ) -> StackPools:
        """Pools, one pair a layer, as in ``ops.paged_attention``, for calls of this stack; evaluated. They
        are held: drop what is returned before they are replaced. ValueError where they do not fit."""
        cpu = self._cpu
        return StackPools(cpu.StackPools(self._stack, list(k_pools), list(v_pools), kv_bits or 0))  # type: ignore[union-attr]

    def __call__(
        self,
        pools: StackPools,
        hidden: mx.array,
        positions: mx.array,
        slot_mapping: mx.array,
        block_tables: mx.array,
        q_starts: mx.array,
        kv_lens: mx.array,
        order: mx.array,
        *,
        adapters: StackAdapters | None = None,
        adapter_slots: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """The hidden state behind the last layer, and the new handle of ``order``.

        ``order`` is the newest handle of the first layer's key pool (contract of ``ops.write_pages``): what
        takes it, another call above all, comes after this one. The other pools are written in place behind
        the handles that were held, since MLX takes time for each array that it hands on. Whatever else is to
        be done to them must be built when this call has at least been started (``mx.async_eval``), and must
        itself have been started before the next call is.

        hidden float32 [..., hidden] with T rows; positions, slot_mapping int32 of T entries; the other index
        arrays as in ``ops.paged_attention``. ``adapters`` of this stack come with ``adapter_slots``, int32 of
        T entries, -1 for a row without.
        """
        result: tuple[mx.array, mx.array] = self._cpu.decoder_stack(  # type: ignore[union-attr]
            pools.native,
            hidden,
            positions,
            slot_mapping,
            block_tables,
            q_starts,
            kv_lens,
            order,
            None if adapters is None else adapters.native,
            adapter_slots,
        )
        return result

    def native_adapters(
        self, num_slots: int, changes: list[tuple[int, int, str, mx.array, mx.array, float]]
    ) -> Any:
        """What ``StackAdapters`` wraps; a change is slot, layer, projection, a, b, scale."""
        return self._cpu.Adapters(self._stack, num_slots, changes)  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class StackPools:
    """What ``DecoderStack.hold`` gives."""

    native: Any


def _native(cpu: Any, layer: DecoderLayer) -> Any:
    native = cpu.DecoderLayer()
    for name in ("heads", "kv_heads", "dim", "value_dim", "scale", "residual_multiplier"):
        setattr(native, name, getattr(layer, name))
    native.window = layer.window or 0
    native.softcap = layer.softcap or 0.0
    native.activation = getattr(cpu.Activation, layer.activation)
    for name, projection in layer.projections.items():
        setattr(native, name, _native_matrix(cpu, projection))
    if layer.experts is not None:
        native.experts = _native_experts(cpu, layer.experts)
    for name in (
        "attention_norm", "q_norm", "k_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm",
    ):  # fmt: skip
        if (norm := getattr(layer, name)) is not None:
            setattr(native, name, cpu.Norm(norm.weight, norm.eps))
    if (rope := layer.rope) is not None:
        native.rope = cpu.Rope(
            rope.inverse_frequencies, rope.position_scale, rope.input_scale, rope.is_interleaved
        )
    if layer.sinks is not None:
        native.sinks = layer.sinks.astype(mx.float32)
    return native


def _native_matrix(cpu: Any, part: Projection) -> Any:
    if part.scale_dtype is not None:
        matrix = cpu.Matrix(part.w, part.group_size, part.bits, part.scale_dtype, part.bias)
    else:
        matrix = cpu.Matrix(
            part.w, part.scales, part.biases, part.group_size, part.bits, part.mode, part.bias
        )
    if part.begin == 0 and part.end is None:
        return matrix
    return matrix.rows(part.begin, part.num_rows if part.end is None else part.end)


def _native_experts(cpu: Any, experts: Experts) -> Any:
    shared_gate = None if experts.shared_gate is None else _native_matrix(cpu, experts.shared_gate)
    return cpu.Experts(
        _native_matrix(cpu, experts.router),
        *(_native_matrix(cpu, _rows(part)) for part in (experts.gate, experts.up, experts.down)),
        experts.top_k,
        experts.is_normalized,
        shared_gate,
    )


def _rows(experts: ExpertWeights) -> Projection:
    """All experts, one behind the other, as one matrix; on the same memory."""
    w, *others = (
        None if array is None else array.flatten(0, 1)
        for array in (experts.w, experts.scales, experts.biases, experts.bias)
    )
    assert w is not None
    scales, biases, bias = others
    return Projection(
        w,
        scales,
        biases,
        experts.group_size,
        experts.bits,
        bias,
        scale_dtype=experts.scale_dtype,
        mode=experts.mode,
    )
