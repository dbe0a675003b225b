"""Products of rows with the matrices of experts of their choice."""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels.experts import Activation, ExpertWeights
from mlxserve_kernels.metal_kernels import maker
from mlxserve_kernels.metal_kernels.maker import MIN_DEVICE_SIZE, KernelMaker
from mlxserve_kernels.metal_kernels.weights import (
    MAX_TILE_ROWS,
    QuantizedWeight,
    Template,
    Tiling,
    activation_index,
    check_bias,
    check_pair,
    check_rows,
    padded,
)

_GATHER_MATMUL = """
threadgroup vec<T, 4> tile[TILE];
threadgroup S shared[SHARED];
threadgroup int list[LIST];
using Reader = typename ReaderOf<MODE, S, GROUP, BITS>::type;
multiply_chosen<ROWS, SIMDGROUPS, CHOICES, RAGGED, SCALES, HAS_BIAS, 0>(
    x, ids, one(matrix_of<Reader>(w, scales, biases), bias), y, threadgroups_per_grid.y, w_shape[1],
    x_shape[1], tile, shared, list,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""

_EXPERT_GATE_UP = """
threadgroup vec<T, 4> tile[TILE];
threadgroup S shared[SHARED];
threadgroup int list[LIST];
using Reader = typename ReaderOf<MODE, S, GROUP, BITS>::type;
multiply_chosen<ROWS, SIMDGROUPS, CHOICES, RAGGED, SCALES, HAS_BIAS, ACTIVATION>(
    x, ids,
    pair(
        matrix_of<Reader>(gate_w, gate_scales, gate_biases), matrix_of<Reader>(up_w, up_scales, up_biases),
        gate_bias, up_bias),
    y, threadgroups_per_grid.y, gate_w_shape[1], x_shape[1], tile, shared, list,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


class ExpertKernels:
    """Kernels made by `make`, for few rows: what finds an expert's rows looks at all ids."""

    def __init__(self, make: KernelMaker) -> None:
        names = ("unpack.h", "activation.h", "row_windows.h", "matmul.h", "members.h", "experts.h")
        header = "".join(maker.source(name) for name in names)
        self._gather_matmul = make(
            "gather_matmul", ["x", "ids", "w", "scales", "biases", "bias"], ["y"], _GATHER_MATMUL, header
        )
        parts = [f"{part}_{name}" for part in ("gate", "up") for name in ("w", "scales", "biases")]
        self._gate_up = make(
            "expert_gate_up", ["x", "ids", *parts, "gate_bias", "up_bias"], ["y"], _EXPERT_GATE_UP, header
        )

    def gather_matmul(self, x: mx.array, ids: mx.array, weights: ExpertWeights) -> mx.array:
        """``ops.gather_matmul`` of quantized weights: [..., top_k, N] in the dtype of x.

        x [..., K], or [..., top_k, K], of FLOAT_TYPES; ids int32 or uint32 [..., top_k], from 0 to E - 1.
        An expert's weights are read once for each MAX_TILE_ROWS of its rows, not at all where it has none.
        The bits of a row are those of ``MatmulKernels.quantized_matmul``.
        Raises ValueError for other shapes, dtypes and formats; ids are not looked at.
        """
        weight = _quantized("gather_matmul", x, ids, weights)
        outputs = weight.w.shape[1]
        if not ids.size or not outputs:
            return mx.zeros((*ids.shape, outputs), dtype=x.dtype)
        tiling, template = _plan(x, ids, weight)
        bias = weights.bias
        (y,) = self._gather_matmul(
            inputs=[*_rows(x, ids), *weight.inputs, x if bias is None else padded(bias, MIN_DEVICE_SIZE)],
            template=[*template, *weight.template, ("HAS_BIAS", bias is not None)],
            output_shapes=[(*ids.shape, outputs)],
            output_dtypes=[x.dtype],
            **tiling.launch(outputs, 4, ids.size),
        )
        return y

    def gate_up(
        self, x: mx.array, ids: mx.array, gate: ExpertWeights, up: ExpertWeights, *, activation: Activation
    ) -> mx.array:
        """``activation(gate(x)) * up(x)`` by each expert of each row: [..., top_k, M] in the dtype of x.

        x, ids as in ``gather_matmul``; gate and up of one format and shape [E, M, K], both with a bias or
        neither. Products and activation are float32, rounded once. Raises ValueError as that does.
        """
        weight, other = (_quantized("gate_up", x, ids, part) for part in (gate, up))
        check_pair("gate_up", weight, other, gate.bias, up.bias)
        outputs = weight.w.shape[1]
        if not ids.size or not outputs:
            return mx.zeros((*ids.shape, outputs), dtype=x.dtype)
        tiling, template = _plan(x, ids, weight)
        biases = (x if part.bias is None else padded(part.bias, MIN_DEVICE_SIZE) for part in (gate, up))
        (y,) = self._gate_up(
            inputs=[*_rows(x, ids), *weight.inputs, *other.inputs, *biases],
            template=[
                *template,
                *weight.template,
                ("HAS_BIAS", gate.bias is not None),
                ("ACTIVATION", activation_index(activation)),
            ],
            output_shapes=[(*ids.shape, outputs)],
            output_dtypes=[x.dtype],
            **tiling.launch(outputs, 2, ids.size),
        )
        return y

    def gated_experts(
        self,
        x: mx.array,
        ids: mx.array,
        gate: ExpertWeights,
        up: ExpertWeights,
        down: ExpertWeights,
        *,
        activation: Activation = "silu",
        shares: mx.array | None = None,
    ) -> mx.array:
        """``ops.gated_experts`` of quantized weights, as ``gate_up`` and ``gather_matmul`` have it."""
        y = self.gather_matmul(self.gate_up(x, ids, gate, up, activation=activation), ids, down)
        return y if shares is None else (y * shares[..., None]).sum(axis=-2).astype(x.dtype)


def _quantized(name: str, x: mx.array, ids: mx.array, weights: ExpertWeights) -> QuantizedWeight:
    """ValueError unless all fit together."""
    check_rows(name, x)
    if x.shape[: ids.ndim] != ids.shape and (x.shape[:-1] != ids.shape[:-1] or not ids.ndim):
        raise ValueError(f"{name}: x {list(x.shape)} and ids {list(ids.shape)} do not fit together")
    if ids.dtype not in (mx.int32, mx.uint32):
        raise ValueError(f"{name}: ids must be int32 or uint32, got {ids.dtype}")
    weight = QuantizedWeight.of(name, weights)
    weight.check(name, x.shape[-1], 3)
    check_bias(name, weights.bias, weights.w.shape[:-1])
    return weight


def _rows(x: mx.array, ids: mx.array) -> list[mx.array]:
    return [x.reshape(-1, x.shape[-1]), padded(ids.flatten(), MIN_DEVICE_SIZE)]


def _plan(x: mx.array, ids: mx.array, weight: QuantizedWeight) -> tuple[Tiling, Template]:
    """Tiles for an expert that all rows have chosen."""
    top_k = ids.shape[-1]
    tiling = Tiling.of(ids.size // top_k)
    choices = 1 if x.ndim == ids.ndim + 1 else top_k
    lists = tiling.simdgroups * MAX_TILE_ROWS
    template = [("T", x.dtype), ("CHOICES", choices), ("LIST", lists), *tiling.template_of(weight)]
    return tiling, template
