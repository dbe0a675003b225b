"""What the tests of products share: weights, the true result, and the cost of the weights' buffers."""

from __future__ import annotations

import mlx.core as mx

from metal_on_host import Report
from mlxserve_kernels import reference
from mlxserve_kernels.metal_kernels.weights import QuantizedWeight

TOLERANCE = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
"""Times the largest value of the true result: float32 sums in another order, then one rounding."""


def quantized(
    *shape: int, group_size: int = 64, bits: int = 4, mode: str = "affine", dtype: mx.Dtype = mx.float16
) -> QuantizedWeight:
    """A normal matrix, or several, with scales of ``dtype`` where they are affine."""
    w = mx.random.normal(shape).astype(dtype)
    w_q, scales, *biases = mx.quantize(w, group_size=group_size, bits=bits, mode=mode)
    return QuantizedWeight(w_q, scales, biases[0] if biases else None, group_size, bits, mode)


def true_product(x: mx.array, weight: QuantizedWeight) -> mx.array:
    """reference.quantized_matmul, all in float32."""
    scales, biases = weight.scales, weight.biases
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return reference.quantized_matmul(
        x.astype(mx.float32),
        weight.w,
        scales,
        biases,
        group_size=weight.group_size,
        bits=weight.bits,
        mode=weight.mode,
    )


def assert_close(y: mx.array, expected: mx.array, dtype: mx.Dtype) -> None:
    assert y.dtype == dtype and y.shape == expected.shape
    error = mx.abs(y.astype(mx.float32) - expected).max().item()
    assert error <= TOLERANCE[dtype] * mx.abs(expected).max().item()


def assert_weights_once(report: Report, names: tuple[str, ...], coalescing: float = 0.9) -> None:
    """Each byte of these buffers once, and all of them; together coalesced, no line fetched in vain."""
    costs = [report.buffer(name) for name in names]
    for cost in costs:
        assert cost.unique_read == cost.bytes, cost
        assert cost.simd_read <= 1.05 * cost.bytes, cost
        assert cost.line_use >= 0.9, cost
    assert sum(c.simd_read for c in costs) >= coalescing * sum(c.line_bytes for c in costs), report.table()
