"""The operations of training equal their twins, forward and backward, and finite differences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops, reference_training
from mlxserve_kernels.decoder import Rope
from mlxserve_kernels.dispatch import extension

pytestmark = pytest.mark.usefixtures("cpu_kernels")

Function = Callable[..., mx.array]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, isa: str) -> int:
    """Runs a test on each instruction set with one thread and with two; ``isa`` puts both back."""
    cpu = extension()
    assert cpu is not None
    cpu.configure(request.param, isa)
    count: int = request.param
    return count


def gradients(function: Function, args: Sequence[mx.array], weights: mx.array) -> list[mx.array]:
    """The result and what belongs to each argument."""
    wanted = list(range(len(args)))
    both = mx.value_and_grad(lambda *a: (function(*a) * weights).sum(), wanted)(*args)
    return [function(*args), *both[1]]


def assert_same(ours: Function, theirs: Function, *args: mx.array, tolerance: float = 2e-5) -> None:
    weights = mx.random.normal(theirs(*args).shape)
    results = (gradients(each, args, weights) for each in (ours, theirs))
    for index, (left, right) in enumerate(zip(*results, strict=True)):
        assert left.shape == right.shape and left.dtype == right.dtype
        a, b = np.array(left), np.array(right)
        limit = tolerance * max(np.abs(b).max(initial=0), 0.5)
        np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=f"result {index}")


ATTENTION = list(
    itertools.product(
        [(1, 1, 1, 1, 8, 8), (2, 4, 2, 65, 16, 16), (1, 3, 1, 130, 20, 24), (1, 2, 2, 200, 64, 7)],
        [None, 1, 40],
        [None, 5.0],
        [False, True],
    )
)


@pytest.mark.parametrize(("shape", "window", "softcap", "is_packed"), ATTENTION)
def test_causal_attention(
    shape: tuple[int, ...], window: int | None, softcap: float | None, is_packed: bool, threads: int
) -> None:
    rows, heads, groups, length, dim, value_dim = shape
    # Heads as a model splits them off, not contiguous.
    q = mx.random.normal((rows, length, heads, dim)).transpose(0, 2, 1, 3)
    k = mx.random.normal((rows, length, groups, dim)).transpose(0, 2, 1, 3)
    v = mx.random.normal((rows, groups, length, value_dim))
    segments = None
    if is_packed:
        segments = mx.array(np.random.default_rng(3).integers(0, 2, (rows, length)).cumsum(axis=1) // 9)
        segments = segments.astype(mx.int32)
    options = {"scale": 0.7, "window": window, "softcap": softcap, "segments": segments}
    assert_same(
        lambda *a: ops.causal_attention(*a, **options),
        lambda *a: reference_training.causal_attention(*a, **options),
        q,
        k,
        v,
    )


def test_segments_are_runs() -> None:
    """An id that comes again begins another segment, and tokens of others have no effect to the bit."""
    q, k, v = (mx.random.normal((1, 2, 90, 16)) for _ in range(3))
    ids = mx.array([[0] * 30 + [1] * 30 + [0] * 30], dtype=mx.int32)
    whole = ops.causal_attention(q, k, v, scale=0.3, segments=ids)
    for begin in (0, 30, 60):
        part = slice(begin, begin + 30)
        alone = ops.causal_attention(q[:, :, part], k[:, :, part], v[:, :, part], scale=0.3)
        np.testing.assert_allclose(np.array(whole[:, :, part]), np.array(alone), rtol=1e-5, atol=1e-6)


def test_attention_has_the_same_bits_with_any_threads() -> None:
    cpu = extension()
    assert cpu is not None
    args = [mx.random.normal((2, 4, 100, 16)) for _ in range(3)]
    weights, results = mx.random.normal((2, 4, 100, 16)), []
    for count in (1, 2, 3):
        cpu.configure(count, cpu.isa())
        results.append(gradients(lambda *a: ops.causal_attention(*a, scale=0.5), args, weights))
        mx.eval(results)
    cpu.configure(ops.num_threads(), cpu.isa())
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert mx.array_equal(a, b)


FORMATS = [
    ("affine", 32, 4),
    ("affine", 64, 8),
    ("affine", 32, 3),
    ("affine", 32, 6),
    ("mxfp4", 32, 4),
    ("mxfp8", 32, 8),
    ("nvfp4", 16, 4),
    (None, 0, 0),
]

Weights = tuple[mx.array, mx.array | None, mx.array | None]


def weights_of(mode: str | None, group: int, bits: int, n: int, k: int) -> tuple[Weights, mx.array]:
    """A weight in a format, and the same dense."""
    w = mx.random.normal((n, k)) * 0.3
    if mode is None:
        return (w, None, None), w
    parts = (*mx.quantize(w, group_size=group, bits=bits, mode=mode), None)[:3]
    dense = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    return parts, dense


@pytest.mark.parametrize(("mode", "group", "bits"), FORMATS)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 37, 64), (260, 64)])
@pytest.mark.parametrize("rank", [1, 8, 17])
def test_adapted_linear(
    mode: str | None, group: int, bits: int, shape: tuple[int, ...], rank: int, isa: str
) -> None:
    w, dense = weights_of(mode, group, bits, 131, 64)
    options = {"group_size": group, "bits": bits, "mode": mode or "affine"}
    x, a, b = mx.random.normal(shape), mx.random.normal((64, rank)) * 0.2, mx.random.normal((rank, 131))
    assert_same(
        lambda x, a, b: ops.adapted_linear(x, a, b, 2.5, *w, **options),
        lambda x, a, b: reference_training.adapted_linear(x, a, b, 2.5, dense),
        x,
        a,
        b,
    )
    only_b = mx.grad(lambda b: ops.adapted_linear(x, a, b, 2.5, *w, **options).sum())(b)
    want = mx.grad(lambda b: reference_training.adapted_linear(x, a, b, 2.5, dense).sum())(b)
    np.testing.assert_allclose(np.array(only_b), np.array(want), rtol=1e-3, atol=1e-3)


def test_the_weight_below_an_adapter_is_frozen() -> None:
    x, a, b, w = mx.ones((2, 8)), mx.ones((8, 2)), mx.ones((2, 4)), mx.ones((4, 8))
    with pytest.raises(ValueError, match="no gradient of the weight below an adapter"):
        mx.grad(lambda w: ops.adapted_linear(x, a, b, 1.0, w).sum())(w)


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 5, 7)])
def test_matmul(shape: tuple[int, ...], isa: str) -> None:
    assert_same(ops.matmul, reference_training.matmul, mx.random.normal(shape), mx.random.normal((7, 9)))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("dim", "half"), [(8, 4), (64, 32), (80, 10)])
@pytest.mark.parametrize("is_shared", [False, True])
def test_rotate_heads(is_interleaved: bool, dim: int, half: int, is_shared: bool, isa: str) -> None:
    rope = Rope(
        mx.exp(-mx.arange(half) / half),
        position_scale=0.5,
        input_scale=1.5,
        is_interleaved=is_interleaved,
    )
    positions = mx.random.randint(0, 50, (33,) if is_shared else (2, 33)).astype(mx.int32)
    x = mx.random.normal((2, 33, 3, dim)).transpose(0, 2, 1, 3)
    assert_same(
        lambda x: ops.rotate_heads(x, positions, rope),
        lambda x: reference_training.rotate_heads(x, positions, rope),
        x,
    )
    joined = ops.rotate_heads(x, positions, rope).transpose(0, 2, 1, 3).reshape(2, 33, -1)
    want = reference_training.rotate_heads(x, positions, rope).transpose(0, 2, 1, 3).reshape(2, 33, -1)
    np.testing.assert_allclose(np.array(joined), np.array(want), atol=1e-5)


@pytest.mark.parametrize(("mode", "group", "bits"), FORMATS)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 5), (3, 384), (70, 1001), (300, 385)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_cross_entropy_head(
    mode: str | None, group: int, bits: int, rows: int, vocabulary: int, softcap: float | None, threads: int
) -> None:
    w, dense = weights_of(mode, group, bits, vocabulary, 128)
    hidden = mx.random.normal((rows, 128))
    targets = mx.random.randint(0, vocabulary, (rows,)).astype(mx.int32)
    weights = mx.where(mx.arange(rows) % 3 == 1, 0.0, mx.random.uniform(shape=(rows,)))
    options = {"group_size": group, "bits": bits, "mode": mode or "affine"}
    shared = {"logit_scale": 0.7, "softcap": softcap}
    assert_same(
        lambda h: ops.cross_entropy_head(h, targets, weights, *w, **options, **shared),
        lambda h: reference_training.cross_entropy_head(h, targets, weights, dense, **shared),
        hidden,
    )
    if mode is None:
        assert_same(
            lambda h, w: ops.cross_entropy_head(h, targets, weights, w, **shared),
            lambda h, w: reference_training.cross_entropy_head(h, targets, weights, w, **shared),
            hidden,
            dense,
        )
    plain = ops.cross_entropy_head(hidden, targets, weights, *w, **options, **shared, with_gradient=False)
    both = ops.cross_entropy_head(hidden, targets, weights, *w, **options, **shared)
    np.testing.assert_allclose(plain.item(), both.item(), rtol=1e-6)


def test_a_masked_target_is_never_read() -> None:
    hidden, head = mx.random.normal((3, 32)), mx.random.normal((10, 32))
    targets, weights = mx.array([1, -100, 2], dtype=mx.int32), mx.array([1.0, 0.0, 1.0])
    loss, gradient = mx.value_and_grad(lambda h: ops.cross_entropy_head(h, targets, weights, head))(hidden)
    assert np.isfinite(loss.item()) and not mx.any(gradient[1] != 0)
    with pytest.raises(RuntimeError, match="target -100 of row 1, the head has 10 rows"):
        mx.eval(ops.cross_entropy_head(hidden, targets, mx.ones((3,)), head))
    none = ops.cross_entropy_head(hidden, targets, mx.zeros((3,)), head)
    assert none.item() == 0


def test_logits_far_apart() -> None:
    """A top that rises late scales down what was before; none overflows."""
    head = mx.concatenate([mx.random.normal((500, 32)), 60 * mx.random.normal((300, 32))])
    hidden, weights = mx.random.normal((20, 32)), mx.ones((20,))
    targets = mx.random.randint(0, 800, (20,)).astype(mx.int32)
    assert_same(
        lambda h: ops.cross_entropy_head(h, targets, weights, head),
        lambda h: reference_training.cross_entropy_head(h, targets, weights, head),
        hidden,
    )


def test_gradient_must_have_been_asked_for() -> None:
    hidden, head = mx.random.normal((3, 32)), mx.random.normal((10, 32))
    targets, weights = mx.array([1, 0, 2], dtype=mx.int32), mx.ones((3,))
    with pytest.raises(ValueError, match="with_gradient=False"):
        mx.grad(lambda h: ops.cross_entropy_head(h, targets, weights, head, with_gradient=False))(hidden)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.causal_attention(x, x[:, :1], x, scale=1.0), "v must have the rows, heads"),
        (lambda x: ops.causal_attention(x[:, :3], x[:, :2], x[:, :2], scale=1.0), "q has 3 heads, k has 2"),
        (lambda x: ops.causal_attention(x, x, x, scale=1.0, window=0), "window must be positive, got 0"),
        (
            lambda x: ops.causal_attention(x, x, x, scale=1.0, segments=mx.zeros((1, 2), dtype=mx.int32)),
            r"segments must be int32 \[1, 5\]",
        ),
        (lambda x: ops.matmul(x, mx.ones((3, 3))), "x has 8 columns, w has 3 rows"),
        (
            lambda x: ops.rotate_heads(x, mx.zeros((4,), dtype=mx.int32), Rope(mx.ones(4))),
            r"positions must be int32 \[5\] or \[1, 5\]",
        ),
        (
            lambda x: ops.adapted_linear(x, mx.ones((7, 2)), mx.ones((2, 3)), 1.0, mx.ones((3, 8))),
            r"a must be float32 \[8, R\]",
        ),
        (
            lambda x: ops.cross_entropy_head(
                x[0, 0], mx.zeros((5,), dtype=mx.int32), mx.ones((4,)), mx.ones((3, 8))
            ),
            r"weights must be float32 \[5\]",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[mx.array], mx.array], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(mx.ones((1, 4, 5, 8)))


def test_under_checkpoint_and_compile() -> None:
    """One layer's worth of operations: the same gradients plain, checkpointed, and compiled."""
    x, a, b = mx.random.normal((2, 40, 32)), mx.random.normal((32, 4)), mx.random.normal((4, 32))
    w, norm, head = mx.random.normal((32, 32)) * 0.2, mx.ones((32,)), mx.random.normal((50, 32))
    rope = Rope(mx.exp(-mx.arange(4) / 4))
    positions, targets = mx.arange(40, dtype=mx.int32), mx.random.randint(0, 50, (80,)).astype(mx.int32)

    def layer(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        y = ops.adapted_linear(ops.rms_norm(x, norm, 1e-5), a, b, 0.5, w)
        heads = ops.rotate_heads(y.reshape(2, 40, 4, 8).transpose(0, 2, 1, 3), positions, rope)
        y = ops.causal_attention(heads, heads, heads, scale=0.4).transpose(0, 2, 1, 3).reshape(2, 40, 32)
        return x + ops.silu_mul(y, x)

    def loss(layer: Function, a: mx.array, b: mx.array) -> mx.array:
        hidden = layer(layer(x, a, b), a, b).reshape(80, 32)
        return ops.cross_entropy_head(hidden, targets, mx.ones((80,)), head)

    plain = mx.value_and_grad(lambda a, b: loss(layer, a, b), [0, 1])
    checkpointed = mx.value_and_grad(lambda a, b: loss(mx.checkpoint(layer), a, b), [0, 1])
    want_loss, want = plain(a, b)
    for function in (checkpointed, mx.compile(plain), mx.compile(checkpointed)):
        value, got = function(a, b)
        np.testing.assert_allclose(value.item(), want_loss.item(), rtol=1e-6)
        for left, right in zip(got, want, strict=True):
            np.testing.assert_allclose(np.array(left), np.array(right), rtol=1e-4, atol=1e-4)


def test_finite_differences() -> None:
    q, k, v = (mx.random.normal((1, 2, 5, 4)) for _ in range(3))
    head, targets = mx.random.normal((7, 8)), mx.array([0, 3, 6, 2, 2], dtype=mx.int32)

    def loss(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        y = ops.causal_attention(q, k, v, scale=0.5, softcap=2.0, window=3)
        hidden = y.transpose(0, 2, 1, 3).reshape(5, 8)
        return ops.cross_entropy_head(hidden, targets, mx.ones((5,)), head, softcap=4.0)

    args, step = [q, k, v], 1e-2
    for index, gradient in enumerate(mx.grad(loss, [0, 1, 2])(*args)):
        values = np.array(gradient)
        for at in np.ndindex(values.shape):
            move = np.zeros(values.shape, dtype=np.float32)
            move[at] = step
            ends = []
            for sign in (1, -1):
                moved = [*args]
                moved[index] = moved[index] + sign * mx.array(move)
                ends.append(loss(*moved).item())
            assert abs((ends[0] - ends[1]) / (2 * step) - values[at]) < 2e-2 * max(1.0, np.abs(values).max())


def peak_bytes(call: Callable[[], object], *inputs: mx.array) -> int:
    """What a call needs at most beside what is there before."""
    mx.eval(inputs)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(call())
    return int(mx.get_peak_memory()) - before


def test_attention_makes_no_array_of_scores() -> None:
    length = 4096
    q, k, v = (mx.random.normal((1, 2, length, 16)) for _ in range(3))
    call = mx.value_and_grad(lambda *a: ops.causal_attention(*a, scale=0.25).sum(), [0, 1, 2])
    assert peak_bytes(lambda: call(q, k, v), q, k, v) < length * length


def test_head_makes_no_array_of_logits() -> None:
    rows, vocabulary = 512, 60000
    hidden, head = mx.random.normal((rows, 32)), mx.random.normal((vocabulary, 32))
    targets, weights = mx.zeros((rows,), dtype=mx.int32), mx.ones((rows,))
    inputs = (hidden, targets, weights, head)
    for wanted, limit in ((0, rows * vocabulary // 10), (3, rows * vocabulary)):
        call = mx.value_and_grad(ops.cross_entropy_head, wanted)
        assert peak_bytes(lambda: call(*inputs), *inputs) < limit  # noqa: B023
