"""Low-rank adapters of rows."""

from __future__ import annotations

import mlx.core as mx

from mlxserve_kernels import reference
from mlxserve_kernels.dispatch import FLOAT_TYPES, extension, metal
from mlxserve_kernels.ops.products import has_few_rows


def lora_delta(x: mx.array, a: mx.array, b: mx.array, slots: mx.array, scales: mx.array) -> mx.array:
    """What low-rank adapters add to a product of rows that have different ones: row t of the result is
    ``scales[s] * (x[t] @ a[s]) @ b[s]`` with ``s = slots[t]``, and exactly 0 for slot -1.

    x [T, K]; a [S, K, R] and b [S, R, N] of one dtype; slots int32 [T], from -1 to S - 1; scales float32 [S].
    Adapters of smaller rank are padded with zeros. Returns [T, N] in the dtype of x.

    >>> ones = mx.ones((2, 4, 1))
    >>> slots, scales = mx.array([1, -1], dtype=mx.int32), mx.array([1.0, 0.5])
    >>> lora_delta(mx.ones((2, 4)), ones, mx.ones((2, 1, 3)), slots, scales).tolist()
    [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    """
    are_floats = a.dtype in FLOAT_TYPES and a.dtype == b.dtype
    kernels = metal("lora_delta")
    if kernels is not None and are_floats and x.dtype in FLOAT_TYPES and has_few_rows(x):
        return kernels.adapters.lora_delta(x, a, b, slots, scales)
    cpu = extension()
    if cpu is None or x.dtype != mx.float32 or not are_floats:
        return reference.lora_delta(x, a, b, slots, scales)
    y: mx.array = cpu.lora_delta(x, a, b, slots, scales)
    return y
