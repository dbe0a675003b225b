"""Operations on experts: against mlx's own, and bit by bit against the plain products."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops, reference
from mlxserve_kernels.experts import Activation, ExpertWeights

pytestmark = pytest.mark.usefixtures("cpu_kernels")


FORMATS = [
    *(("affine", 32, bits) for bits in (2, 3, 5, 6)),
    ("mxfp4", 32, 4),
    ("mxfp8", 32, 8),
    ("nvfp4", 16, 4),
]


def experts(
    count: int,
    n: int,
    k: int,
    bits: int | None,
    group: int = 32,
    dtype: mx.Dtype = mx.float32,
    bias: bool = False,
    mode: str = "affine",
) -> ExpertWeights:
    w = mx.random.normal((count, n, k)) * 0.3
    vector = mx.random.normal((count, n)) if bias else None
    if bits is None:
        return ExpertWeights(w.astype(dtype), bias=vector)
    w, scales, *rest = mx.quantize(w, group_size=group, bits=bits, mode=mode)
    if mode != "affine":
        return ExpertWeights(w, scales, None, group, bits, mode, vector)
    biases = rest[0]
    return ExpertWeights(
        w, scales.astype(dtype), biases.astype(dtype), group_size=group, bits=bits, bias=vector
    )


def random_ids(rows: int, top_k: int, count: int, *, skew: float = 1.0) -> mx.array:
    """Different experts of each row; with ``skew`` the first ones much more often."""
    rng = np.random.default_rng(rows)
    odds = skew ** -np.arange(count, dtype=np.float64)
    chosen = [rng.choice(count, top_k, replace=False, p=odds / odds.sum()) for _ in range(rows)]
    return mx.array(np.array(chosen, dtype=np.int32).reshape(rows, top_k))


def plain(x: mx.array, expert: int, weights: ExpertWeights) -> mx.array:
    """The product of rows with one expert by the plain operations."""
    w = weights.w[expert]
    if weights.scales is None:
        y = ops.linear(x, w)
    else:
        y = ops.quantized_matmul(
            x,
            w,
            weights.scales[expert],
            None if weights.biases is None else weights.biases[expert],
            group_size=weights.group_size,
            bits=weights.bits,
            mode=weights.mode,
        )
    return y if weights.bias is None else y + weights.bias[expert]


def one_by_one(x: mx.array, ids: mx.array, weights: ExpertWeights) -> mx.array:
    """``gather_matmul`` with a product for each pair of row and expert; x is [T, K] or [T, top_k, K]."""
    chosen, results = np.array(ids), []
    for row, choice in np.ndindex(*chosen.shape):
        source = x[row] if x.ndim == 2 else x[row, choice]
        results.append(plain(source[None], int(chosen[row, choice]), weights))
    return mx.concatenate(results).reshape(*chosen.shape, -1)


def assert_close(got: mx.array, want: mx.array) -> None:
    assert got.shape == want.shape
    left, right = np.array(got), np.array(want)
    np.testing.assert_allclose(left, right, rtol=0, atol=1e-5 * max(np.abs(right).max(), 1.0))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("bits", "dtype"), [(4, mx.float32), (4, mx.float16), (8, mx.bfloat16)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_has_the_bits_of_a_plain_product(bits: int, dtype: mx.Dtype, bias: bool) -> None:
    for n, k, (rows, count, top_k) in itertools.product(
        (1, 50), (32, 160), ((1, 4, 2), (7, 3, 3), (30, 5, 2), (40, 1, 1))
    ):
        weights = experts(count, n, k, bits, dtype=dtype, bias=bias)
        ids = random_ids(rows, top_k, count, skew=3.0)
        for shape in ((rows, k), (rows, top_k, k)):
            x = mx.random.normal(shape)
            assert mx.array_equal(ops.gather_matmul(x, ids, weights), one_by_one(x, ids, weights))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("mode", "group", "bits"), FORMATS)
def test_every_format(mode: str, group: int, bits: int) -> None:
    for n, rows in itertools.product((3, 50), (1, 30)):
        gate, up = (experts(5, n, 128, bits, group, bias=True, mode=mode) for _ in range(2))
        down, ids = experts(5, 32, n, None), random_ids(rows, 2, 5, skew=3.0)
        x = mx.random.normal((rows, 128))
        got = ops.gather_matmul(x, ids, gate)
        assert mx.array_equal(got, one_by_one(x, ids, gate))
        assert_close(got, reference.gather_matmul(x, ids, gate))
        assert_close(
            ops.gated_experts(x, ids, gate, up, down), reference.gated_experts(x, ids, gate, up, down)
        )


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_dense_experts(dtype: mx.Dtype) -> None:
    for n, k, rows in itertools.product((3, 49), (1, 33, 64), (1, 20)):
        weights, ids = experts(4, n, k, None, dtype=dtype), random_ids(rows, 2, 4)
        x = mx.random.normal((rows, k))
        got = ops.gather_matmul(x, ids, weights)
        assert mx.array_equal(got, one_by_one(x, ids, weights))
        assert_close(got, reference.gather_matmul(x, ids, weights))


@pytest.mark.parametrize(("bits", "group"), [*itertools.product((4, 8), (32, 64, 128))])
@pytest.mark.parametrize("is_paired", [False, True])
def test_gather_equals_reference(bits: int, group: int, is_paired: bool) -> None:
    weights, ids = experts(6, 40, 256, bits, group, bias=True), random_ids(33, 3, 6)
    x = mx.random.normal((33, 3, 256) if is_paired else (33, 256))
    assert_close(ops.gather_matmul(x, ids, weights), reference.gather_matmul(x, ids, weights))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_gated_experts_equal_reference(activation: Activation, bits: int | None) -> None:
    gate, up, down = (experts(6, *shape, bits, bias=True) for shape in ((96, 64), (96, 64), (64, 96)))
    for rows, top_k in ((1, 1), (1, 4), (3, 2), (5, 6), (70, 3)):
        x, ids = mx.random.normal((rows, 64)), random_ids(rows, top_k, 6, skew=2.0)
        _, shares = ops.route(mx.random.normal((rows, 6)), top_k, is_normalized=False)
        for given in (None, shares):
            got = ops.gated_experts(x, ids, gate, up, down, activation=activation, shares=given)
            want = reference.gated_experts(x, ids, gate, up, down, activation=activation, shares=given)
            assert_close(got, want)


def test_formats_may_differ() -> None:
    gate, up, down = experts(4, 64, 32, 4), experts(4, 64, 32, 8), experts(4, 20, 64, None, dtype=mx.bfloat16)
    x, ids = mx.random.normal((9, 32)), random_ids(9, 2, 4)
    assert_close(ops.gated_experts(x, ids, gate, up, down), reference.gated_experts(x, ids, gate, up, down))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bits", [None, 4])
def test_bits_of_a_row_depend_on_itself_alone(bits: int | None) -> None:
    gate, up, down = (experts(8, *shape, bits) for shape in ((96, 64), (96, 64), (64, 96)))
    x, logits = mx.random.normal((200, 64)), mx.random.normal((200, 8)) - mx.arange(8) * 0.7

    def run(rows: slice) -> mx.array:
        ids, shares = ops.route(logits[rows], 3, is_normalized=True)
        return ops.gated_experts(x[rows], ids, gate, up, down, shares=shares)

    whole = run(slice(0, 200))
    for begin, end in ((0, 1), (199, 200), (3, 7), (10, 15), (20, 57), (100, 200)):
        assert mx.array_equal(run(slice(begin, end)), whole[begin:end])


@pytest.mark.parametrize("rows", [3, 60])
def test_nan_and_infinity_stay_in_their_rows(rows: int) -> None:
    gate, up, down = (experts(4, *shape, 4) for shape in ((64, 32), (64, 32), (32, 64)))
    x, ids = mx.random.normal((rows, 32)), random_ids(rows, 2, 4)
    shares = mx.ones((rows, 2))
    clean = ops.gated_experts(x, ids, gate, up, down, shares=shares)
    x[1, 3], x[2, 4] = mx.nan, mx.inf
    got = ops.gated_experts(x, ids, gate, up, down, shares=shares)
    assert bool(mx.all(mx.isnan(got[1])))
    assert not bool(mx.any(mx.isfinite(got[2])))
    keep = mx.array([row for row in range(rows) if row not in (1, 2)])
    assert mx.array_equal(got[keep], clean[keep])


def test_strided_and_batched_inputs() -> None:
    weights, x = experts(4, 24, 32, 4), mx.random.normal((32, 5, 6))
    ids = random_ids(30, 2, 4).reshape(5, 6, 2)
    want = ops.gather_matmul(mx.array(np.array(x).transpose(1, 2, 0).copy()), ids, weights)
    assert mx.array_equal(ops.gather_matmul(x.transpose(1, 2, 0), ids, weights), want)
    assert mx.array_equal(ops.gather_matmul(x.transpose(1, 2, 0), ids.astype(mx.uint32), weights), want)
    swapped = mx.array(np.array(ids)[..., ::-1].copy())
    assert mx.array_equal(ops.gather_matmul(x.transpose(1, 2, 0), ids[..., ::-1], weights), want[:, :, ::-1])
    assert mx.array_equal(ops.gather_matmul(x.transpose(1, 2, 0), swapped, weights), want[:, :, ::-1])
    assert weights.scales is not None
    half = ExpertWeights(weights.w[::2], weights.scales[::2], weights.biases[::2], 32, 4)  # type: ignore[index]
    even = ids // 2 * 2
    assert mx.array_equal(
        ops.gather_matmul(x.transpose(1, 2, 0), ids // 2, half),
        ops.gather_matmul(x.transpose(1, 2, 0), even, weights),
    )


def test_no_rows() -> None:
    weights = experts(4, 32, 32, 4)
    no_ids = mx.zeros((0, 2), dtype=mx.int32)
    assert ops.gather_matmul(mx.zeros((0, 32)), no_ids, weights).shape == (0, 2, 32)
    y = ops.gated_experts(mx.zeros((0, 32)), no_ids, weights, weights, weights, shares=mx.zeros((0, 2)))
    assert y.shape == (0, 32)
    mx.eval(y, ops.route(mx.zeros((0, 4)), 2, is_normalized=True))


def test_the_same_expert_twice() -> None:
    weights, x = experts(3, 16, 32, 4), mx.random.normal((4, 32))
    ids = mx.full((4, 2), 1, dtype=mx.int32)
    assert mx.array_equal(ops.gather_matmul(x, ids, weights), one_by_one(x, ids, weights))


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
@pytest.mark.parametrize("rows", [1, 50])
def test_wrong_ids_are_found_at_evaluation(wrong: int, rows: int) -> None:
    weights, x = experts(4, 32, 32, 4), mx.zeros((rows, 32))
    ids = mx.zeros((rows, 2), dtype=mx.int32)
    ids[rows - 1, 1] = wrong
    for call in (
        lambda: ops.gather_matmul(x, ids, weights),
        lambda: ops.gated_experts(x, ids, weights, weights, weights),
    ):
        y = call()
        with pytest.raises(RuntimeError, match=rf"id {wrong} at \[{rows - 1}, 1\], there are 4 experts"):
            mx.eval(y)


def test_wrong_shapes_are_named() -> None:
    parts = experts(3, 8, 64, 4, mode="mxfp4")
    assert parts.scales is not None
    wrong = ExpertWeights(parts.w, parts.scales[:2], None, 32, 4, "mxfp4")
    with pytest.raises(ValueError, match=r"scales must be uint8 \[3, 8, 2\]"):
        ops.gather_matmul(mx.zeros((1, 64)), mx.zeros((1, 1), dtype=mx.int32), wrong)
    weights, other = experts(4, 32, 64, 4), experts(3, 64, 32, 4)
    ids = mx.zeros((2, 2), dtype=mx.int32)
    with pytest.raises(ValueError, match=r"x must be \[..., 64\]"):
        ops.gather_matmul(mx.zeros((2, 32)), ids, weights)
    with pytest.raises(ValueError, match="have 4, 4 and 3 experts"):
        ops.gated_experts(mx.zeros((2, 64)), ids, weights, weights, other)
    with pytest.raises(ValueError, match=r"down \[32, 64\]"):
        ops.gated_experts(mx.zeros((2, 64)), ids, weights, weights, weights)
    with pytest.raises(ValueError, match="ids must be int32"):
        ops.gather_matmul(mx.zeros((2, 64)), ids.astype(mx.int64), weights)
    with pytest.raises(ValueError, match="top_k must be 1 to 4, got 5"):
        ops.route(mx.zeros((1, 4)), 5, is_normalized=True)


def test_other_formats_and_activations_run_mlx() -> None:
    x, ids = mx.random.normal((3, 48)), random_ids(3, 2, 4)
    weights = experts(4, 16, 48, 4, 16, mode="nvfp4")
    assert not weights.is_supported
    assert mx.array_equal(ops.gather_matmul(x, ids, weights), reference.gather_matmul(x, ids, weights))
    half = ops.gather_matmul(x.astype(mx.float16), ids, experts(4, 16, 48, None))
    assert half.dtype == mx.float16


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (4, 4), (64, 8), (257, 10)])
def test_route_equals_reference(count: int, top_k: int, is_normalized: bool) -> None:
    logits = mx.random.normal((4, 17, count)) * 3
    ids, shares = ops.route(logits, top_k, is_normalized=is_normalized)
    want_ids, want_shares = reference.route(logits, top_k, is_normalized=is_normalized)
    assert mx.array_equal(ids, want_ids)
    assert mx.allclose(shares, want_shares, rtol=1e-5, atol=1e-7)
    one_ids, one_shares = ops.route(logits[2, 5], top_k, is_normalized=is_normalized)
    assert mx.array_equal(one_ids, ids[2, 5]) and mx.array_equal(one_shares, shares[2, 5])


def test_route_of_ties_and_strange_values() -> None:
    logits = mx.array([[1.0, 2.0, 2.0, 1.0], [0.0, mx.nan, 1.0, 0.5], [-mx.inf, 0.0, -mx.inf, 0.0]])
    ids, shares = ops.route(logits, 3, is_normalized=True)
    assert ids[0].tolist() == [1, 2, 0]
    assert ids[2].tolist() == [1, 3, 0]
    assert len(set(ids[1].tolist())) == 3 and all(0 <= each < 4 for each in ids[1].tolist())
    assert bool(mx.all(mx.isnan(shares[1])))
    assert shares[2].tolist() == [0.5, 0.5, 0.0]
