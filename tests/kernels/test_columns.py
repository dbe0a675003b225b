"""x @ w, the other way through a weight: of quantized weights, and as the gradient of every product."""

from __future__ import annotations

import itertools
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops, reference

pytestmark = pytest.mark.usefixtures("cpu_kernels")

AFFINE = [("affine", group, bits) for bits, group in itertools.product((2, 3, 4, 5, 6, 8), (32, 64, 128))]
FORMATS = [*AFFINE, ("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# A row, blocks and tails of rows, more rows than a unit of work has.
ROWS = (1, 2, 3, 5, 6, 7, 8, 9, 15, 130)

Parts = tuple[mx.array, mx.array, mx.array | None]


def quantized(mode: str, group: int, bits: int, n: int, k: int) -> tuple[Parts, mx.array]:
    w, scales, *biases = mx.quantize(mx.random.normal((n, k)), group_size=group, bits=bits, mode=mode)
    parts = (w, scales, biases[0] if biases else None)
    return parts, mx.dequantize(*parts, group_size=group, bits=bits, mode=mode, dtype=mx.float32)


def wide(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def assert_product(got: mx.array, x: mx.array, w: mx.array, unit: float = 1e-6) -> None:
    """x @ w within ``unit`` of the sum of magnitudes: far under what a lost or repeated term makes."""
    assert got.shape == (*x.shape[:-1], w.shape[-1])
    bound = np.abs(wide(x)) @ np.abs(wide(w))
    assert np.all(np.abs(wide(got) - wide(x) @ wide(w)) <= unit * bound + 1e-12)


@pytest.mark.parametrize(("mode", "group", "bits"), FORMATS)
def test_equals_the_product_with_dequantized_weights(mode: str, group: int, bits: int, isa: str) -> None:
    options = {"group_size": group, "bits": bits, "mode": mode, "transpose": False}
    for n, k in ((1, 128), (63, 256), (200, 640)):
        parts, dense = quantized(mode, group, bits, n, k)
        for rows in ROWS if n == 63 else (1, 9):
            x = mx.random.normal((rows, n))
            got = ops.quantized_matmul(x, *parts, **options)
            assert_product(got, x, dense)
            assert np.allclose(got, reference.quantized_matmul(x, *parts, **options), rtol=1e-4, atol=1e-3)
            one = mx.zeros((1, n))
            one[0, n - 1] = 1.0
            assert mx.array_equal(ops.quantized_matmul(one, *parts, **options)[0], dense[n - 1])


def test_bits_of_a_row_do_not_depend_on_its_batch(isa: str) -> None:
    parts, _ = quantized("affine", 64, 4, 300, 192)
    x = mx.random.normal((300, 300))

    def multiply(x: mx.array) -> mx.array:
        return ops.quantized_matmul(x, *parts, group_size=64, bits=4, transpose=False)

    whole = multiply(x)
    for begin, rows in ((0, 1), (299, 1), (17, 5), (100, 8), (3, 64), (50, 250)):
        assert mx.array_equal(multiply(x[begin : begin + rows]), whole[begin : begin + rows])


def test_strided_and_batched_inputs() -> None:
    parts, dense = quantized("affine", 32, 8, 40, 64)
    x = mx.random.normal((40, 3, 20))
    for view in (x.transpose(1, 2, 0), x.transpose(2, 1, 0)[::2], x[:, 0, 0]):
        got = ops.quantized_matmul(view, *parts, group_size=32, bits=8, transpose=False)
        assert_product(got, view, dense)
    sliced = tuple(part[::2] for part in parts if part is not None)
    got = ops.quantized_matmul(x[::2, 0].T, *sliced, group_size=32, bits=8, transpose=False)
    assert_product(got, x[::2, 0].T, dense[::2])


@pytest.mark.parametrize("rows", [1, 40])
def test_nan_and_infinity_stay_in_their_rows(rows: int) -> None:
    parts, _ = quantized("affine", 32, 4, 70, 128)
    x = mx.random.normal((rows + 2, 70))
    options = {"group_size": 32, "bits": 4, "transpose": False}
    clean = ops.quantized_matmul(x, *parts, **options)
    x[0, 69], x[1, 7] = mx.nan, mx.inf
    got = ops.quantized_matmul(x, *parts, **options)
    assert bool(mx.all(mx.isnan(got[0]))) and not bool(mx.any(mx.isfinite(got[1])))
    assert mx.array_equal(got[2:], clean[2:])


def test_no_rows_on_either_side() -> None:
    parts, _ = quantized("affine", 32, 4, 8, 64)
    got = ops.quantized_matmul(mx.zeros((0, 8)), *parts, group_size=32, bits=4, transpose=False)
    assert got.shape == (0, 64)
    empty = tuple(part[:0] for part in parts if part is not None)
    got = ops.quantized_matmul(mx.zeros((3, 0)), *empty, group_size=32, bits=4, transpose=False)
    assert mx.array_equal(got, mx.zeros((3, 64)))


def test_wrong_shapes_are_named() -> None:
    parts, _ = quantized("affine", 32, 4, 8, 64)
    with pytest.raises(ValueError, match="x has 64 columns, w has 8 rows"):
        ops.quantized_matmul(mx.zeros((1, 64)), *parts, group_size=32, bits=4, transpose=False)


@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_gradients_of_linear(x_dtype: mx.Dtype, w_dtype: mx.Dtype, isa: str) -> None:
    for rows, n, k in ((1, 1, 1), (5, 9, 7), (70, 33, 150), (3, 300, 257)):
        x, w = mx.random.normal((rows, k)).astype(x_dtype), mx.random.normal((n, k)).astype(w_dtype)
        dy = mx.random.normal((rows, n)).astype(x_dtype)
        _, (dx, dw) = mx.vjp(ops.linear, (x, w), (dy,))
        assert dx.dtype == x_dtype and dw.dtype == w_dtype
        rounding = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
        assert_product(dx, dy, w, rounding[x_dtype])
        assert_product(dw, dy.T, x, rounding[w_dtype])


def test_gradients_of_linear_over_batches() -> None:
    x, w = mx.random.normal((2, 3, 4, 40)), mx.random.normal((21, 40))
    dy = mx.random.normal((2, 3, 4, 21))
    _, (dx, dw) = mx.vjp(ops.linear, (x, w), (dy,))
    assert_product(dx, dy, w)
    assert_product(dw, dy.reshape(-1, 21).T, x.reshape(-1, 40))
    _, (dw,) = mx.vjp(lambda w: ops.linear(x[0, 0, 0], w), (w,), (dy[0, 0, 0],))
    assert_product(dw, dy[0, 0, :1].T, x[0, 0, :1])


def test_gradients_of_gradients() -> None:
    x, w, v = mx.random.normal((6, 10)), mx.random.normal((7, 10)), mx.random.normal((7, 10))

    def loss(linear: object, x: mx.array, w: mx.array) -> mx.array:
        def inner(x: mx.array, w: mx.array) -> mx.array:
            return (linear(x, w) ** 3).sum()  # type: ignore[operator]

        dx, dw = mx.grad(inner, (0, 1))(x, w)
        return (dx**2).sum() + (dw * v).sum()

    ours = mx.grad(lambda x, w: loss(ops.linear, x, w), (0, 1))(x, w)
    theirs = mx.grad(lambda x, w: loss(lambda x, w: x @ w.T, x, w), (0, 1))(x, w)
    for a, b in zip(ours, theirs, strict=True):
        assert mx.allclose(a, b, rtol=1e-4, atol=1e-4 * mx.abs(b).max().item())


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize(("mode", "group", "bits"), [("affine", 32, 4), ("affine", 128, 3), ("nvfp4", 16, 4)])
def test_gradients_of_quantized_products(mode: str, group: int, bits: int, transpose: bool, isa: str) -> None:
    parts, dense = quantized(mode, group, bits, 160, 256)
    options = {"group_size": group, "bits": bits, "mode": mode, "transpose": transpose}
    w = dense if transpose else dense.T
    for rows, dtype in itertools.product((1, 20), DTYPES):
        x = mx.random.normal((rows, w.shape[1])).astype(dtype)
        dy = mx.random.normal((rows, w.shape[0])).astype(dtype)
        _, (dx,) = mx.vjp(lambda x: ops.quantized_matmul(x, *parts, **options), (x,), (dy,))
        assert dx.dtype == dtype
        assert_product(dx, dy, w, {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}[dtype])
    with pytest.raises(ValueError, match="no gradient of quantized weights"):
        mx.grad(lambda s: ops.quantized_matmul(x, parts[0], s, parts[2], **options).sum())(parts[1])


def test_gradients_of_products_with_tiles() -> None:
    for bits, group, dtype in itertools.product((4, 8), (32, 64, 128), DTYPES):
        (w, scales, biases), _ = quantized("affine", group, bits, 48, 3 * group)
        assert biases is not None
        scales, biases = scales.astype(dtype), biases.astype(dtype)
        if not ops.can_tile(scales, biases, 48, group_size=group, bits=bits):
            pytest.skip("this CPU has no AVX-512 VNNI")
        tiles = ops.pack_tiles(w, scales, biases, group_size=group, bits=bits)
        x, dy = mx.random.normal((5, 3 * group)), mx.random.normal((5, 48))
        tiled = partial(ops.tiled_matmul, group_size=group, bits=bits, scale_dtype=dtype)
        _, (dx,) = mx.vjp(lambda x, tiled=tiled, tiles=tiles: tiled(x, tiles), (x,), (dy,))
        plain = ops.quantized_matmul(dy, w, scales, biases, group_size=group, bits=bits, transpose=False)
        assert mx.array_equal(dx, plain)
        with pytest.raises(ValueError, match="no gradient of quantized weights"):
            mx.vjp(lambda tiles, x=x, tiled=tiled: tiled(x, tiles), (tiles,), (dy,))


def test_no_dequantized_copy_is_made() -> None:
    parts, dense = quantized("affine", 64, 4, 2048, 2048)
    x, dy = mx.random.normal((4, 2048)), mx.random.normal((4, 2048))
    mx.eval(x, dy, parts)
    size = dense.nbytes
    del dense
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    _, (dx,) = mx.vjp(lambda x: ops.quantized_matmul(x, *parts, group_size=64, bits=4), (x,), (dy,))
    mx.eval(dx)
    assert mx.get_peak_memory() - before < size / 8
