"""16-bit activations: each operation gives the float32 result, rounded once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxserve_kernels import ops, reference
from mlxserve_kernels.experts import Activation, ExpertWeights

pytestmark = pytest.mark.usefixtures("cpu_kernels")

NARROW = (mx.float16, mx.bfloat16)
UNIT = {mx.float32: 2e-6, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def assert_rounded(function: Callable[..., mx.array], *args: mx.array) -> None:
    """The bits of the float32 result, rounded to the dtype of the arguments."""
    got, wide = function(*args), function(*(arg.astype(mx.float32) for arg in args))
    assert got.dtype == args[0].dtype and wide.dtype == mx.float32
    assert mx.array_equal(got, wide.astype(got.dtype), equal_nan=True)


def assert_near(got: mx.array, want: mx.array, dtype: mx.Dtype) -> None:
    assert got.dtype == want.dtype == dtype and got.shape == want.shape
    a, b = (np.array(each.astype(mx.float32)) for each in (got, want))
    np.testing.assert_allclose(a, b, rtol=4 * UNIT[dtype], atol=4 * UNIT[dtype] * np.abs(b).max())


@pytest.mark.parametrize("dtype", NARROW)
def test_every_value_is_rounded_as_mlx_rounds(dtype: mx.Dtype, isa: str) -> None:
    # All 16-bit values, what lies between neighbours, and float32 values of every exponent.
    exact = mx.arange(65536).astype(mx.uint16).view(dtype).astype(mx.float32)
    raw = mx.random.randint(0, 2**31 - 1, (65536,)).astype(mx.uint32) * 2 + 1
    steps = exact.view(mx.int32)
    half = 0x1000 if dtype == mx.float16 else 0x8000
    values = mx.concatenate([exact, *((steps + half + i).view(mx.float32) for i in (-1, 0, 1))])
    values = mx.concatenate([values, raw.view(mx.float32)])
    ones = mx.ones((1, 1), dtype=dtype)
    # A product with 1, of which the weight alone is wide; sums begin with a positive 0.
    got = ops.linear(ones, values[:, None])[0]
    want = (values + 0.0).astype(dtype)
    assert mx.array_equal(mx.isnan(got), mx.isnan(values))
    keep = ~mx.isnan(values)
    assert mx.array_equal(mx.where(keep, got, 0).view(mx.uint16), mx.where(keep, want, 0).view(mx.uint16))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("mode", "group", "bits"), [("affine", 32, 4), ("affine", 64, 8), ("mxfp8", 32, 8)])
def test_quantized_matmul(mode: str, group: int, bits: int, dtype: mx.Dtype, isa: str) -> None:
    parts = mx.quantize(mx.random.normal((97, 192)), group_size=group, bits=bits, mode=mode)
    w, scales, biases = (*parts, None)[:3]
    options = {"group_size": group, "bits": bits, "mode": mode}
    for rows, transpose in itertools.product((1, 4, 9, 600), (True, False)):
        x = mx.random.normal((rows, 192 if transpose else 97)).astype(dtype)

        def multiply(x: mx.array, transpose: bool = transpose) -> mx.array:
            return ops.quantized_matmul(x, w, scales, biases, **options, transpose=transpose)

        assert_rounded(multiply, x)
        want = reference.quantized_matmul(
            x.astype(mx.float32), w, scales, biases, **options, transpose=transpose
        )
        assert_near(multiply(x), want.astype(dtype), dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_products_with_tiles(dtype: mx.Dtype) -> None:
    w, scales, biases = mx.quantize(mx.random.normal((48, 192)), group_size=64, bits=4)
    if not ops.can_tile(scales, biases, 48, group_size=64, bits=4):
        pytest.skip("this CPU has no AVX-512 VNNI")
    tiles = ops.pack_tiles(w, scales, biases, group_size=64, bits=4)
    for rows in (1, 3, 20, 600):
        x = mx.random.normal((rows, 192)).astype(dtype)
        assert_rounded(lambda x: ops.tiled_matmul(x, tiles, group_size=64, bits=4, scale_dtype=mx.float32), x)


@pytest.mark.parametrize("w_dtype", [mx.float32, *NARROW])
@pytest.mark.parametrize("dtype", NARROW)
def test_linear(dtype: mx.Dtype, w_dtype: mx.Dtype, isa: str) -> None:
    for rows, n, k in itertools.product((1, 5, 40), (1, 50), (1, 37, 576)):
        x, w = mx.random.normal((rows, k)).astype(dtype), mx.random.normal((n, k)).astype(w_dtype)
        assert_rounded(lambda x, w=w: ops.linear(x, w), x)
        assert_near(ops.linear(x, w), reference.linear(x, w), dtype)
    strided = mx.random.normal((40, 3, 20)).astype(dtype).transpose(2, 1, 0)
    assert_rounded(lambda x: ops.linear(x, mx.ones((3, 40))), strided)


@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_experts(dtype: mx.Dtype, is_tiled: bool) -> None:
    def weights(n: int, k: int) -> ExpertWeights:
        w, scales, biases = mx.quantize(mx.random.normal((4, n, k)) / 8, group_size=32, bits=4)
        if not is_tiled:
            return ExpertWeights(w, scales, biases, 32, 4)
        if not ops.can_tile(scales, biases, n, group_size=32, bits=4):
            pytest.skip("this CPU has no AVX-512 VNNI")
        tiles = mx.stack(
            [ops.pack_tiles(w[e], scales[e], biases[e], group_size=32, bits=4) for e in range(4)]
        )
        return ExpertWeights(tiles, group_size=32, bits=4, scale_dtype=mx.float32)

    gate, up, down = weights(96, 64), weights(96, 64), weights(64, 96)
    for rows in (1, 9, 60):
        x = mx.random.normal((rows, 64)).astype(dtype)
        ids = mx.random.randint(0, 4, (rows, 2))
        shares = mx.random.uniform(shape=(rows, 2))
        assert_rounded(lambda x, ids=ids: ops.gather_matmul(x, ids, gate), x)
        paired = mx.random.normal((rows, 2, 64)).astype(dtype)
        assert_rounded(lambda x, ids=ids: ops.gather_matmul(x, ids, gate), paired)
        assert_rounded(lambda x, ids=ids: ops.gated_experts(x, ids, gate, up, down), x)
        assert_rounded(
            lambda x, ids=ids, shares=shares: ops.gated_experts(x, ids, gate, up, down, shares=shares), x
        )


@pytest.mark.parametrize("dtype", [mx.float32, *NARROW])
@pytest.mark.parametrize("k", [1, 5, 64, 577])
def test_rms_norm(k: int, dtype: mx.Dtype, isa: str) -> None:
    for rows, weight in itertools.product((1, 3, 300), (None, mx.random.normal((k,)))):
        x, residual = (mx.random.normal((rows, k)).astype(dtype) for _ in range(2))
        normed, total = ops.rms_norm(x, weight, 1e-5, residual)
        assert mx.array_equal(total, x + residual)
        assert mx.array_equal(normed, ops.rms_norm(total, weight, 1e-5))
        wide = reference.rms_norm(total.astype(mx.float32), weight, 1e-5)
        assert_near(normed, wide.astype(dtype), dtype)
        assert_rounded(lambda x, weight=weight: ops.rms_norm(x, weight, 1e-5), x)
    for got, want in zip(
        ops.rms_norm(x, weight, 1e-5, residual), reference.rms_norm(x, weight, 1e-5, residual), strict=True
    ):
        assert_near(got, want, dtype)
    turned = ops.rms_norm(x.T.reshape(-1, k), None, 1e-5, residual.T.reshape(-1, k))
    assert turned[0].shape == turned[1].shape == (rows, k)


def test_a_residual_of_another_kind_is_refused() -> None:
    x = mx.zeros((2, 4))
    with pytest.raises(ValueError, match=r"residual must be mlx.core.float32 \[2, 4\] as x is, got .*\[4\]"):
        ops.rms_norm(x, None, 1e-5, mx.zeros((4,)))
    with pytest.raises(ValueError, match=r"got mlx\.core\.float16"):
        ops.rms_norm(x, None, 1e-5, x.astype(mx.float16))


@pytest.mark.parametrize("dtype", [mx.float32, *NARROW])
def test_gradients_of_rms_norm_with_a_residual(dtype: mx.Dtype) -> None:
    x, residual = (mx.random.normal((3, 21)).astype(dtype) for _ in range(2))
    weight = mx.random.normal((21,))

    def loss(kind: object, x: mx.array, residual: mx.array, weight: mx.array) -> mx.array:
        normed, total = kind.rms_norm(x, weight, 1e-3, residual)  # type: ignore[attr-defined]
        return (normed.astype(mx.float32) ** 3).sum() + (total.astype(mx.float32) ** 2).sum()

    ours = mx.grad(lambda *args: loss(ops, *args), (0, 1, 2))(x, residual, weight)
    wide = [each.astype(mx.float32) for each in (x, residual, weight)]
    theirs = mx.grad(lambda *args: loss(reference, *args), (0, 1, 2))(*wide)
    for got, want, given in zip(ours, theirs, (x, residual, weight), strict=True):
        assert_near(got, want.astype(given.dtype), given.dtype) if dtype == mx.float32 else None
        assert got.dtype == given.dtype
        assert mx.allclose(got.astype(mx.float32), want, rtol=0.05, atol=0.05 * mx.abs(want).max().item())


ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "silu": nn.silu,
    "gelu_tanh": nn.gelu_approx,
    "gelu": nn.gelu,
}


def activate(kind: object, activation: Activation, gate: mx.array, up: mx.array) -> mx.array:
    if activation == "silu":
        return kind.silu_mul(gate, up)  # type: ignore[attr-defined, no-any-return]
    approx = "none" if activation == "gelu" else "tanh"
    return kind.gelu_mul(gate, up, approx=approx)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("dtype", [mx.float32, *NARROW])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated(activation: Activation, dtype: mx.Dtype, isa: str) -> None:
    for size in (1, 7, 1024, 1025, 40000):
        gate, up = (mx.random.normal((3, size)) * 4).astype(dtype), mx.random.normal((3, size)).astype(dtype)
        got = activate(ops, activation, gate, up)
        assert_rounded(lambda g, u: activate(ops, activation, g, u), gate, up)
        assert_near(got, activate(reference, activation, gate, up), dtype)
        assert_near(got, (ACTIVATIONS[activation](gate.astype(mx.float32)) * up).astype(dtype), dtype)
    assert_rounded(lambda g, u: activate(ops, activation, g, u), gate.T, up.T)
    ends = activate(
        ops, activation, mx.array([-3e4, 3e4, 0.0, mx.nan], dtype=dtype), mx.ones((4,), dtype=dtype)
    )
    assert ends[:3].tolist() == [0.0, mx.array(3e4, dtype=dtype).item(), 0.0]
    assert bool(mx.isnan(ends[3]))


def test_small_shares_of_gelu_are_exact(isa: str) -> None:
    """Where 1 + erf cancels, as it does in ``nn.gelu``."""
    values = np.linspace(-12, 9, 4001).astype(np.float32)
    got = np.array(ops.gelu_mul(mx.array(values), mx.ones((4001,)), approx="none")).astype(np.float64)
    want = np.array([0.5 * z * math.erfc(-z / math.sqrt(2)) for z in values.astype(np.float64)])
    np.testing.assert_allclose(got, want, rtol=5e-6, atol=1e-37)


@pytest.mark.parametrize("dtype", [mx.float32, *NARROW])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_gated(activation: Activation, dtype: mx.Dtype) -> None:
    gate, up = (mx.random.normal((3, 11)) * 3).astype(dtype), mx.random.normal((3, 11)).astype(dtype)
    dy = mx.random.normal((3, 11)).astype(dtype)
    _, ours = mx.vjp(lambda g, u: activate(ops, activation, g, u), (gate, up), (dy,))
    wide = [each.astype(mx.float32) for each in (gate, up, dy)]
    _, theirs = mx.vjp(lambda g, u: ACTIVATIONS[activation](g) * u, wide[:2], wide[2:])
    for got, want in zip(ours, theirs, strict=True):
        assert_near(got, want.astype(dtype), dtype)


def test_kinds_of_gelu_are_named() -> None:
    with pytest.raises(ValueError, match="approx must be none or tanh, got 'fast'"):
        ops.gelu_mul(mx.zeros((1,)), mx.zeros((1,)), approx="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one shape and dtype"):
        ops.silu_mul(mx.zeros((2,)), mx.zeros((1,)))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kv_dtype", [mx.float32, mx.bfloat16])
def test_paged_attention(dtype: mx.Dtype, kv_dtype: mx.Dtype) -> None:
    def index(*ids: int) -> mx.array:
        return mx.array(ids, dtype=mx.int32)

    keys = mx.random.normal((20, 2, 32, 16)).astype(kv_dtype)
    values = mx.random.normal((20, 2, 16, 48)).astype(kv_dtype)
    tables = mx.arange(20).astype(mx.int32).reshape(2, 10)
    q = mx.random.normal((8, 4, 32)).astype(dtype)

    def attend(q: mx.array) -> mx.array:
        return ops.paged_attention(
            q, keys, values, tables, index(0, 1, 7), index(150, 20), scale=0.2, softcap=20.0
        )

    assert_rounded(attend, q)
    assert attend(q).shape == (8, 4, 48)
    assert not bool(mx.any(attend(q)[7]))
