"""Products with quantized weights."""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels.experts import Activation
from mlxserve_kernels.metal_kernels import maker
from mlxserve_kernels.metal_kernels.maker import MIN_DEVICE_SIZE, KernelMaker
from mlxserve_kernels.metal_kernels.weights import (
    QuantizedWeight,
    Tiling,
    activation_index,
    check_bias,
    check_pair,
    check_rows,
    padded,
)

_QUANTIZED_MATMUL = """
threadgroup vec<T, 4> tile[TILE];
threadgroup S shared[SHARED];
using Reader = typename ReaderOf<MODE, S, GROUP, BITS>::type;
multiply_tile<ROWS, SIMDGROUPS, RAGGED, SCALES, HAS_BIAS, 0>(
    x, one(matrix_of<Reader>(w, scales, biases), bias), y, x_shape[0], w_shape[0], x_shape[1], tile, shared,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""

_GATE_UP = """
threadgroup vec<T, 4> tile[TILE];
threadgroup S shared[SHARED];
using Reader = typename ReaderOf<MODE, S, GROUP, BITS>::type;
multiply_tile<ROWS, SIMDGROUPS, RAGGED, SCALES, HAS_BIAS, ACTIVATION>(
    x,
    pair(
        matrix_of<Reader>(gate_w, gate_scales, gate_biases), matrix_of<Reader>(up_w, up_scales, up_biases),
        gate_bias, up_bias),
    y, x_shape[0], gate_w_shape[0], x_shape[1], tile, shared,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


class MatmulKernels:
    """Kernels made by `make`."""

    def __init__(self, make: KernelMaker) -> None:
        header = "".join(
            maker.source(name) for name in ("unpack.h", "activation.h", "row_windows.h", "matmul.h")
        )
        self._quantized_matmul = make(
            "quantized_matmul", ["x", "w", "scales", "biases", "bias"], ["y"], _QUANTIZED_MATMUL, header
        )
        parts = [f"{part}_{name}" for part in ("gate", "up") for name in ("w", "scales", "biases")]
        self._gate_up = make("gate_up", ["x", *parts, "gate_bias", "up_bias"], ["y"], _GATE_UP, header)

    def quantized_matmul(
        self,
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        *,
        group_size: int,
        bits: int,
        mode: str = "affine",
        bias: mx.array | None = None,
    ) -> mx.array:
        """``x @ dequantize(w).T + bias``: ``ops.quantized_matmul`` with its formats.

        x [..., K] of FLOAT_TYPES; w uint32 [N, K * bits / 32]; scales, biases [N, K / group_size], of one
        dtype; bias [N] of FLOAT_TYPES. Arrays start at a multiple of 16 bytes of their buffer. Sums are
        float32, rounded once to the dtype of x. Up to MAX_TILE_ROWS rows read the weights once, more rows
        once for each MAX_TILE_ROWS; the bits of a row do not depend on the others.
        Raises ValueError for other shapes, dtypes and formats.
        """
        weight = QuantizedWeight(w, scales, biases, group_size, bits, mode)
        check_rows("quantized_matmul", x)
        weight.check("quantized_matmul", x.shape[-1])
        check_bias("quantized_matmul", bias, (w.shape[0],))
        size, outputs = x.shape[-1], w.shape[0]
        rows = x.size // size
        if not rows or not outputs:
            return mx.zeros((*x.shape[:-1], outputs), dtype=x.dtype)
        tiling = Tiling.of(rows)
        inputs = weight.inputs
        computed = inputs[0].shape[0]
        (y,) = self._quantized_matmul(
            inputs=[x.reshape(rows, size), *inputs, x if bias is None else padded(bias, MIN_DEVICE_SIZE)],
            template=[
                ("T", x.dtype),
                *weight.template,
                *tiling.template_of(weight),
                ("HAS_BIAS", bias is not None),
            ],
            output_shapes=[(rows, computed)],
            output_dtypes=[x.dtype],
            **tiling.launch(computed, 4, -(-rows // tiling.rows)),
        )
        return y[:, :outputs].reshape(*x.shape[:-1], outputs)

    def gate_up(
        self,
        x: mx.array,
        gate: QuantizedWeight,
        up: QuantizedWeight,
        *,
        activation: Activation,
        gate_bias: mx.array | None = None,
        up_bias: mx.array | None = None,
    ) -> mx.array:
        """``activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias)``: [..., M] in the dtype of x.

        Arrays as in ``quantized_matmul``; gate and up of one format and shape [M, K], also ``rows`` of one
        stacked matrix; both have a bias [M], or neither. Products and activation are float32, rounded
        once; the sums of a product have the order of ``quantized_matmul``. Raises ValueError as that does.
        """
        size, outputs = x.shape[-1], gate.w.shape[0]
        check_rows("gate_up", x)
        gate.check("gate_up", size)
        check_pair("gate_up", gate, up, gate_bias, up_bias)
        rows = x.size // size
        if not rows or not outputs:
            return mx.zeros((*x.shape[:-1], outputs), dtype=x.dtype)
        tiling = Tiling.of(rows)
        inputs = [*gate.inputs, *up.inputs]
        computed = inputs[0].shape[0]
        (y,) = self._gate_up(
            inputs=[
                x.reshape(rows, size),
                *inputs,
                *(x if bias is None else padded(bias, MIN_DEVICE_SIZE) for bias in (gate_bias, up_bias)),
            ],
            template=[
                ("T", x.dtype),
                *gate.template,
                *tiling.template_of(gate),
                ("HAS_BIAS", gate_bias is not None),
                ("ACTIVATION", activation_index(activation)),
            ],
            output_shapes=[(rows, computed)],
            output_dtypes=[x.dtype],
            **tiling.launch(computed, 2, -(-rows // tiling.rows)),
        )
        return y[:, :outputs].reshape(*x.shape[:-1], outputs)
