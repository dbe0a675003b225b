"""``lora_delta``: against the reference, and bit by bit against itself on single rows."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops, reference
from mlxserve_kernels.dispatch import extension, num_threads

pytestmark = pytest.mark.usefixtures("cpu_kernels")

SCALES = (2.0, -0.5, 1.25)


def ints(values: list[int]) -> mx.array:
    return mx.array(np.array(values, dtype=np.int32))


def random_slots(rows: int, count: int = 3) -> mx.array:
    return ints(np.random.default_rng(rows).integers(-1, count, rows).tolist())


def tables(k: int, rank: int, n: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array, mx.array]:
    a, b = mx.random.normal((3, k, rank)) / k**0.5, mx.random.normal((3, rank, n)) / rank**0.5
    return a.astype(dtype), b.astype(dtype), mx.array(SCALES)


def assert_close(got: mx.array, want: mx.array) -> None:
    assert got.shape == want.shape
    left, right = np.array(got), np.array(want)
    np.testing.assert_allclose(left, right, rtol=0, atol=1e-5 * max(np.abs(right).max(initial=0), 1.0))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_it_equals_the_reference(dtype: mx.Dtype) -> None:
    shapes = ((1, 1, 1), (33, 3, 50), (64, 8, 16), (576, 16, 200), (2100, 20, 77), (130, 64, 96))
    for rows, (k, rank, n) in itertools.product((1, 2, 4, 5, 37, 150), shapes):
        a, b, scales = tables(k, rank, n, dtype)
        x, slots = mx.random.normal((rows, k)), random_slots(rows)
        got = ops.lora_delta(x, a, b, slots, scales)
        assert_close(got, reference.lora_delta(x, a, b, slots, scales))
        assert not np.array(got)[np.array(slots) < 0].any()


@pytest.mark.usefixtures("isa")
def test_bits_of_a_row_depend_on_itself_alone() -> None:
    for k, rank, n in ((1000, 8, 70), (64, 20, 33), (31, 64, 300)):
        a, b, scales = tables(k, rank, n)
        x, slots = mx.random.normal((70, k)), random_slots(70)
        whole = ops.lora_delta(x, a, b, slots, scales)
        for begin, end in ((0, 1), (69, 70), (3, 7), (10, 15), (2, 68)):
            rows = slice(begin, end)
            assert mx.array_equal(ops.lora_delta(x[rows], a, b, slots[rows], scales), whole[rows])
        same = ops.lora_delta(mx.broadcast_to(x[5], (9, k)), a, b, ints([-1, *[1] * 8]), scales)
        one = ops.lora_delta(x[5:6], a, b, ints([1]), scales)
        assert mx.array_equal(same[1:], mx.broadcast_to(one, (8, n)))


def test_bits_are_the_same_with_any_number_of_threads() -> None:
    cpu = extension()
    assert cpu is not None
    a, b, scales = tables(300, 16, 200)
    try:
        for rows in (3, 90):
            x, slots = mx.random.normal((rows, 300)), random_slots(rows)
            results = []
            for threads in (1, 2, 5):
                cpu.configure(threads, cpu.isa())
                results.append(np.array(ops.lora_delta(x, a, b, slots, scales)))
            for result in results[1:]:
                np.testing.assert_array_equal(result, results[0])
    finally:
        cpu.configure(num_threads(), cpu.isa())


@pytest.mark.parametrize("rows", [2, 30])
def test_a_smaller_rank_is_padded_with_zeros(rows: int) -> None:
    a, b, scales = tables(64, 5, 40)
    wide_a, wide_b = mx.pad(a, ((0, 0), (0, 0), (0, 11))), mx.pad(b, ((0, 0), (0, 11), (0, 0)))
    x, slots = mx.random.normal((rows, 64)), random_slots(rows)
    padded = ops.lora_delta(x, wide_a, wide_b, slots, scales)
    assert mx.array_equal(padded, ops.lora_delta(x, a, b, slots, scales))


@pytest.mark.parametrize("rows", [3, 60])
def test_nan_and_infinity_stay_in_their_rows(rows: int) -> None:
    a, b, scales = tables(32, 8, 48)
    x, slots = mx.random.normal((rows, 32)), ints([-1, 0, 1] * (rows // 3))
    clean = ops.lora_delta(x, a, b, slots, scales)
    x[0, 1], x[1, 3], x[2, 4] = mx.nan, mx.nan, mx.inf
    got = ops.lora_delta(x, a, b, slots, scales)
    assert not bool(mx.any(got[0]))
    assert bool(mx.all(mx.isnan(got[1]))) and not bool(mx.any(mx.isfinite(got[2])))
    assert mx.array_equal(got[3:], clean[3:])


def test_strided_inputs() -> None:
    a, b, scales = tables(32, 8, 24)
    x, slots = mx.random.normal((32, 9)), random_slots(18)
    got = ops.lora_delta(
        x.T,
        a.swapaxes(1, 2).flatten().reshape(3, 8, 32).swapaxes(1, 2),
        b[:, ::-1][:, ::-1],
        slots[::2],
        scales,
    )
    assert mx.array_equal(
        got, ops.lora_delta(mx.array(np.array(x).T.copy()), a, b, ints(slots[::2].tolist()), scales)
    )


@pytest.mark.parametrize("implementation", [ops, reference])
def test_nothing_to_do(implementation: object) -> None:
    lora_delta = implementation.lora_delta  # type: ignore[attr-defined]
    a, b, scales = tables(32, 8, 24)
    assert lora_delta(mx.zeros((0, 32)), a, b, ints([]), scales).shape == (0, 24)
    assert not bool(mx.any(lora_delta(mx.ones((6, 32)), a, b, ints([-1] * 6), scales)))
    none = lora_delta(mx.ones((2, 32)), a[:0], b[:0], ints([-1, -1]), scales[:0])
    assert none.tolist() == [[0.0] * 24] * 2


def test_other_dtypes_run_the_reference() -> None:
    a, b, scales = tables(32, 8, 24)
    x, slots = mx.random.normal((5, 32)).astype(mx.bfloat16), random_slots(5)
    assert ops.lora_delta(x, a, b, slots, scales).dtype == mx.bfloat16
    mixed = ops.lora_delta(mx.ones((5, 32)), a, b.astype(mx.float16), slots, scales)
    assert_close(mixed, reference.lora_delta(mx.ones((5, 32)), a, b.astype(mx.float16), slots, scales))


@pytest.mark.parametrize("wrong", [-2, 3])
@pytest.mark.parametrize("rows", [2, 50])
def test_wrong_slots_are_found_at_evaluation(wrong: int, rows: int) -> None:
    a, b, scales = tables(32, 8, 24)
    y = ops.lora_delta(mx.ones((rows, 32)), a, b, ints([0] * (rows - 1) + [wrong]), scales)
    with pytest.raises(RuntimeError, match=rf"slots\[{rows - 1}\] is {wrong}, there are 3 adapters"):
        mx.eval(y)


def test_wrong_shapes_are_named() -> None:
    a, b, scales = tables(32, 8, 24)
    x, slots = mx.ones((2, 32)), ints([0, 1])
    with pytest.raises(ValueError, match=r"a must be \[S, 16, R\]"):
        ops.lora_delta(mx.ones((2, 16)), a, b, slots, scales)
    with pytest.raises(ValueError, match=r"b \[S, R, N\], got"):
        ops.lora_delta(x, a, b[:, :4], slots, scales)
    with pytest.raises(ValueError, match=r"slots must be int32 \[2\]"):
        ops.lora_delta(x, a, b, slots[:1], scales)
    with pytest.raises(ValueError, match=r"slots must be int32 \[2\]"):
        ops.lora_delta(x, a, b, slots.astype(mx.int64), scales)
    with pytest.raises(ValueError, match=r"scales must be float32 \[3\]"):
        ops.lora_delta(x, a, b, slots, scales[:2])
    with pytest.raises(ValueError, match=r"x must be float32 \[T, K\]"):
        ops.lora_delta(mx.ones((2, 1, 32)), a, b, slots, scales)
