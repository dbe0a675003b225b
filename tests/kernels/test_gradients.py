"""Gradients through the kernels equal those through the reference."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops, reference

pytestmark = pytest.mark.usefixtures("cpu_kernels")

Function = Callable[..., mx.array]


def assert_same_gradients(ours: Function, theirs: Function, *args: mx.array) -> None:
    weights = mx.random.normal(ours(*args).shape)
    for argnum, arg in enumerate(args):
        left = mx.grad(lambda *a: (ours(*a) * weights).sum(), argnum)(*args)
        right = mx.grad(lambda *a: (theirs(*a) * weights).sum(), argnum)(*args)
        assert left.shape == arg.shape and left.dtype == arg.dtype
        tolerance = 1e-4 if arg.dtype == mx.float32 else 2e-2
        a, b = (np.array(each.astype(mx.float32)) for each in (left, right))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 5, 64)])
@pytest.mark.parametrize(("mode", "group", "bits"), [("affine", 32, 4), ("affine", 64, 3), ("nvfp4", 16, 4)])
def test_quantized_matmul(mode: str, group: int, bits: int, shape: tuple[int, ...]) -> None:
    parts = mx.quantize(mx.random.normal((33, 64)), group_size=group, bits=bits, mode=mode)
    w, scales, biases = (*parts, None)[:3]
    dense = mx.dequantize(w, scales, biases, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    options = {"group_size": group, "bits": bits, "mode": mode}
    x = mx.random.normal(shape)
    assert_same_gradients(
        lambda x: ops.quantized_matmul(x, w, scales, biases, **options), lambda x: x @ dense.T, x
    )
    with pytest.raises(ValueError, match="no gradient of quantized weights"):
        mx.grad(lambda s: ops.quantized_matmul(x, w, s, biases, **options).sum())(scales)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 5, 7)])
def test_linear(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    w = mx.random.normal((9, 7)).astype(dtype)
    assert_same_gradients(ops.linear, reference.linear, mx.random.normal(shape), w)


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 5, 7)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, w = mx.random.normal(shape), mx.random.normal((7,))
    assert_same_gradients(
        lambda x, w: ops.rms_norm(x, w, 1e-3), lambda x, w: reference.rms_norm(x, w, 1e-3), x, w
    )
    assert_same_gradients(
        lambda x: ops.rms_norm(x, None, 1e-3), lambda x: reference.rms_norm(x, None, 1e-3), x
    )


def test_silu_mul() -> None:
    args = mx.random.normal((3, 11)) * 4, mx.random.normal((3, 11))
    assert_same_gradients(ops.silu_mul, reference.silu_mul, *args)


def test_finite_differences() -> None:
    w = mx.random.normal((4, 6))

    def loss(x: mx.array) -> mx.array:
        normed = ops.rms_norm(x, None, 1e-2)
        return ops.silu_mul(ops.linear(normed, w), ops.linear(normed, w[::-1])).sum()

    x, step = mx.random.normal((2, 6)), 1e-2
    gradient = np.array(mx.grad(loss)(x))
    for row, column in np.ndindex(2, 6):
        move = np.zeros((2, 6), dtype=np.float32)
        move[row, column] = step
        slope = (loss(x + mx.array(move)) - loss(x - mx.array(move))).item() / (2 * step)
        assert abs(slope - gradient[row, column]) < 1e-2 * max(1.0, abs(gradient).max())
