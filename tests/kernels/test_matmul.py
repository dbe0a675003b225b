from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops, reference

pytestmark = pytest.mark.usefixtures("cpu_kernels")

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 64, 130)


def quantized(n: int, k: int, bits: int, group: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, ...]:
    w, scales, biases = mx.quantize(mx.random.normal((n, k)), group_size=group, bits=bits)
    return w, scales.astype(dtype), biases.astype(dtype)


def multiply(x: mx.array, weight: tuple[mx.array, ...], bits: int, group: int) -> mx.array:
    return ops.quantized_matmul(x, *weight, group_size=group, bits=bits)


def exact(x: mx.array, w: mx.array) -> np.ndarray:
    """The product in float64."""
    return np.array(x, dtype=np.float64) @ np.array(w.astype(mx.float32), dtype=np.float64).T


def assert_close(got: mx.array, x: mx.array, w: mx.array) -> None:
    """Within 1e-6 of the sum of magnitudes: far under what a lost or repeated term makes."""
    bound = np.abs(np.array(x, dtype=np.float64)) @ np.abs(np.array(w.astype(mx.float32), dtype=np.float64)).T
    assert np.all(np.abs(np.array(got) - exact(x, w)) <= 1e-6 * bound + 1e-12)


@pytest.mark.parametrize(("bits", "group"), [*itertools.product((4, 8), (32, 64, 128))])
def test_equals_the_product_with_dequantized_weights(bits: int, group: int) -> None:
    for n, k in itertools.product((1, 3, 50, 97), (group, 5 * group)):
        weight = quantized(n, k, bits, group)
        dense = mx.dequantize(*weight, group_size=group, bits=bits)
        for rows in ROWS:
            x = mx.random.normal((rows, k))
            got = multiply(x, weight, bits, group)
            assert_close(got, x, dense)
            assert mx.array_equal(got, ops.linear(x, dense)), "dequantization is not exact"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_narrow_scales_are_widened(bits: int, dtype: mx.Dtype) -> None:
    w, scales, biases = quantized(33, 256, bits, 64, dtype)
    wide = (w, scales.astype(mx.float32), biases.astype(mx.float32))
    for rows in (1, 40):
        x = mx.random.normal((rows, 256))
        assert mx.array_equal(multiply(x, (w, scales, biases), bits, 64), multiply(x, wide, bits, 64))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_dense_weights(dtype: mx.Dtype) -> None:
    for n, k, rows in itertools.product((1, 2, 49, 100), (1, 7, 16, 33, 577), (1, 3, 8, 9, 65)):
        x, w = mx.random.normal((rows, k)), mx.random.normal((n, k)).astype(dtype)
        assert_close(ops.linear(x, w), x, w)


@pytest.mark.parametrize("k", [64, 576])
def test_bits_of_a_row_do_not_depend_on_its_batch(k: int) -> None:
    weight = quantized(200, k, 4, 32)
    dense = mx.random.normal((200, k - 3)).astype(mx.bfloat16)
    x = mx.random.normal((512, k))
    whole, whole_dense = multiply(x, weight, 4, 32), ops.linear(x[:, 3:], dense)
    for begin, rows in ((0, 1), (511, 1), (17, 5), (100, 8), (3, 64), (250, 200)):
        part = x[begin : begin + rows]
        assert mx.array_equal(multiply(part, weight, 4, 32), whole[begin : begin + rows])
        assert mx.array_equal(ops.linear(part[:, 3:], dense), whole_dense[begin : begin + rows])


@pytest.mark.parametrize("rows", [5, 40])
def test_nan_and_infinity_stay_in_their_rows(rows: int) -> None:
    weight = quantized(60, 128, 4, 32)
    x = mx.random.normal((rows, 128))
    clean = multiply(x, weight, 4, 32)
    x[2, 5], x[3, 7] = mx.nan, mx.inf
    got = multiply(x, weight, 4, 32)
    assert bool(mx.all(mx.isnan(got[2])))
    assert not bool(mx.any(mx.isfinite(got[3])))
    keep = mx.array([row for row in range(rows) if row not in (2, 3)])
    assert mx.array_equal(got[keep], clean[keep])


def test_strided_and_batched_inputs() -> None:
    weight = quantized(40, 64, 8, 32)
    x = mx.random.normal((64, 3, 20))
    for view in (x.transpose(1, 2, 0), x.transpose(2, 1, 0)[::2], mx.broadcast_to(x[:, 0, :1].T, (4, 64))):
        plain = mx.array(np.ascontiguousarray(np.array(view)))
        assert mx.array_equal(multiply(view, weight, 8, 32), multiply(plain, weight, 8, 32))
    assert multiply(x.transpose(1, 2, 0), weight, 8, 32).shape == (3, 20, 40)
    sliced = tuple(part[::2] for part in weight)
    assert mx.array_equal(multiply(x[:, 0].T, sliced, 8, 32), multiply(x[:, 0].T, weight, 8, 32)[:, ::2])


def test_no_rows() -> None:
    assert multiply(mx.zeros((0, 64)), quantized(8, 64, 4, 32), 4, 32).shape == (0, 8)
    assert ops.linear(mx.zeros((0, 5)), mx.zeros((3, 5))).shape == (0, 3)


def test_wrong_shapes_are_named() -> None:
    w, scales, biases = quantized(8, 64, 4, 32)
    with pytest.raises(ValueError, match="x has 32 columns, w has 64"):
        multiply(mx.zeros((1, 32)), (w, scales, biases), 4, 32)
    with pytest.raises(ValueError, match="scales and biases must be"):
        multiply(mx.zeros((1, 64)), (w, scales[:, :1], biases[:, :1]), 4, 32)
    with pytest.raises(ValueError, match="x has 4 columns, w has 5"):
        ops.linear(mx.zeros((1, 4)), mx.zeros((3, 5)))


@pytest.mark.parametrize("k", [1, 5, 64, 100, 577])
@pytest.mark.parametrize("dtype", [None, mx.float32, mx.float16, mx.bfloat16])
def test_rms_norm(k: int, dtype: mx.Dtype | None) -> None:
    x = mx.random.normal((2, 130, k))
    weight = None if dtype is None else mx.random.normal((k,)).astype(dtype)
    got = ops.rms_norm(x, weight, 1e-5)
    assert mx.allclose(got, reference.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-6)
    assert mx.array_equal(got[1, 40:43], ops.rms_norm(x[1, 40:43], weight, 1e-5))
    strided = x.swapaxes(0, 1)
    assert mx.array_equal(ops.rms_norm(strided, weight, 1e-5), got.swapaxes(0, 1))


def test_silu_mul() -> None:
    gate, up = mx.random.normal((3, 1001)) * 10, mx.random.normal((3, 1001))
    assert mx.allclose(ops.silu_mul(gate, up), reference.silu_mul(gate, up), rtol=2e-6, atol=1e-6)
    ends = ops.silu_mul(mx.array([-1e4, 1e4, 0.0, mx.nan]), mx.ones((4,)))
    assert ends[:3].tolist() == [0.0, 1e4, 0.0]
    assert bool(mx.isnan(ends[3]))
