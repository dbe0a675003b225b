from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops, reference

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@dataclass(frozen=True)
class Case:
    """Contiguous keys and values of some sequences, and how many of their last tokens are queries."""

    keys: list[np.ndarray]
    values: list[np.ndarray]
    queries: list[np.ndarray]

    @property
    def kv_lens(self) -> list[int]:
        return [len(keys) for keys in self.keys]


def random_pools(pages: int, heads: int, page: int, dim: int) -> tuple[mx.array, mx.array]:
    return mx.random.normal((pages, heads, dim, page)), mx.random.normal((pages, heads, page, dim))


def make_case(
    kv_lens: list[int], q_lens: list[int], heads: int, kv_heads: int, dim: int, value_dim: int
) -> Case:
    rng = np.random.default_rng(sum(kv_lens))

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    return Case(
        [normal(length, kv_heads, dim) for length in kv_lens],
        [normal(length, kv_heads, value_dim) for length in kv_lens],
        [normal(length, heads, dim) for length in q_lens],
    )


def run(
    case: Case,
    *,
    page: int = 32,
    placement: int = 0,
    implementation: Any = ops,
    dtype: mx.Dtype = mx.float32,
    **kw: Any,
) -> list[np.ndarray]:
    """The output of each sequence. Pages lie in a random order and all that is unused holds NaN."""
    counts = [-(-length // page) for length in case.kv_lens]
    max_pages, num_pages = max(counts) + 1, sum(counts) + 3
    order = np.random.default_rng(placement).permutation(num_pages)
    tables = np.full((len(counts), max_pages), -1 if implementation is ops else 0, dtype=np.int32)
    pools = [np.full((num_pages, part[0].shape[1], page, part[0].shape[2]), np.nan, np.float32)
             for part in (case.keys, case.values)]  # fmt: skip
    taken = 0
    for index, count in enumerate(counts):
        tables[index, :count] = order[taken : taken + count]
        taken += count
        for pool, rows in zip(pools, (case.keys[index], case.values[index]), strict=True):
            for position, row in enumerate(rows):
                pool[tables[index, position // page], :, position % page] = row
    starts = np.cumsum([0, *map(len, case.queries)]).astype(np.int32)
    pools[0] = np.ascontiguousarray(pools[0].swapaxes(2, 3))
    output = implementation.paged_attention(
        mx.array(np.concatenate(case.queries)),
        *(mx.array(pool).astype(dtype) for pool in pools),
        mx.array(tables),
        mx.array(starts),
        mx.array(case.kv_lens, dtype=mx.int32),
        scale=case.queries[0].shape[2] ** -0.5,
        **kw,
    )
    return np.split(np.array(output), starts[1:-1])


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 100},
    {"softcap": 5.0},
    {"sinks": mx.linspace(-2, 4, 8)},
    {"window": 37, "softcap": 30.0, "sinks": mx.zeros((8,))},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_equals_the_reference(kv_heads: int, options: dict[str, Any]) -> None:
    for (dim, value_dim), page in itertools.product(((64, 64), (40, 72), (5, 3)), (32, 7)):
        case = make_case([1, 700, 33, 1100, 64], [1, 40, 0, 17, 64], 8, kv_heads, dim, value_dim)
        got = run(case, page=page, **options)
        want = run(case, page=page, implementation=reference, **options)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_narrow_pools_are_widened(dtype: mx.Dtype) -> None:
    case = make_case([90], [20], 4, 2, 40, 24)

    def rounded(parts: list[np.ndarray]) -> list[np.ndarray]:
        return [np.array(mx.array(part).astype(dtype).astype(mx.float32)) for part in parts]

    wide = replace(case, keys=rounded(case.keys), values=rounded(case.values))
    np.testing.assert_array_equal(run(case, dtype=dtype)[0], run(wide)[0])


@pytest.mark.parametrize("options", [{}, {"window": 300, "softcap": 20.0}], ids=["plain", "window"])
def test_bits_do_not_depend_on_batch_chunk_or_page(options: dict[str, Any]) -> None:
    lengths = [1300, 130, 600]
    case = make_case(lengths, lengths, 6, 2, 64, 64)
    whole = run(case, **options)
    for index, end, rows in ((0, 1300, 1), (0, 1300, 7), (0, 700, 188), (1, 130, 64), (2, 513, 2), (2, 1, 1)):
        chunk = Case(
            [case.keys[index][:end]], [case.values[index][:end]], [case.queries[index][end - rows : end]]
        )
        want = whole[index][end - rows : end]
        np.testing.assert_array_equal(run(chunk, **options)[0], want)
        np.testing.assert_array_equal(run(chunk, page=5, placement=9, **options)[0], want)
        others = make_case([77, 2000], [3, 1], 6, 2, 64, 64)
        batch = Case(*(a + b for a, b in zip(vars(others).values(), vars(chunk).values(), strict=True)))
        np.testing.assert_array_equal(run(batch, placement=4, **options)[2], want)


def test_nan_reaches_only_rows_that_see_it() -> None:
    case = make_case([200, 50], [60, 50], 4, 2, 64, 64)
    clean = run(case)
    case.keys[0][170, 1] = np.nan
    case.values[0][180, 0] = np.inf
    got = run(case)
    np.testing.assert_array_equal(got[0][:30], clean[0][:30])
    np.testing.assert_array_equal(got[1], clean[1])
    assert np.isnan(got[0][30:, 2:]).all()
    np.testing.assert_array_equal(got[0][30:40, :2], clean[0][30:40, :2])
    assert not np.isfinite(got[0][40:, :2]).any()


def test_pages_behind_the_window_may_be_gone() -> None:
    case = make_case([300], [4], 2, 1, 16, 16)
    pools = random_pools(10, 1, 32, 16)
    table = np.arange(10, dtype=np.int32)[None]
    rest = (mx.array([0, 4], dtype=mx.int32), mx.array([300], dtype=mx.int32))
    q = mx.array(case.queries[0])
    kept = ops.paged_attention(q, *pools, mx.array(table), *rest, scale=0.25, window=40)
    table[0, :8] = -1
    assert mx.array_equal(ops.paged_attention(q, *pools, mx.array(table), *rest, scale=0.25, window=40), kept)


def test_rows_of_no_sequence_are_zero() -> None:
    pools = random_pools(2, 1, 4, 8)
    args = [mx.array(ids, dtype=mx.int32) for ids in ([[0]], [0, 2], [3])]
    got = ops.paged_attention(mx.random.normal((5, 2, 8)), *pools, *args, scale=1.0)
    assert bool(mx.all(got[2:] == 0))
    assert bool(mx.all(got[:2] != 0))


def test_no_sequences_and_no_rows() -> None:
    pools = random_pools(2, 1, 4, 8)
    none = [mx.zeros((0, 1), dtype=mx.int32), mx.array([0], dtype=mx.int32), mx.zeros((0,), dtype=mx.int32)]
    assert bool(mx.all(ops.paged_attention(mx.ones((3, 1, 8)), *pools, *none, scale=1.0) == 0))
    assert ops.paged_attention(mx.ones((0, 1, 8)), *pools, *none, scale=1.0).shape == (0, 1, 8)


def test_strided_queries() -> None:
    pools = random_pools(3, 2, 8, 16)
    args = [mx.array(ids, dtype=mx.int32) for ids in ([[2, 0, 1]], [0, 5], [20])]
    q = mx.random.normal((4, 5, 16)).swapaxes(0, 1)
    plain = mx.array(np.ascontiguousarray(np.array(q)))
    first, second = (ops.paged_attention(each, *pools, *args, scale=1.0) for each in (q, plain))
    assert mx.array_equal(first, second)


@pytest.mark.parametrize(
    ("table", "starts", "lengths", "message"),
    [
        ([[0, 9]], [0, 2], [6], r"block_tables\[0, 1\] is 9, the pool has 2 pages"),
        ([[0, -1]], [0, 2], [6], r"block_tables\[0, 1\] is -1"),
        ([[0, 1]], [0, 2], [1], r"kv_lens\[0\] is 1, must be from its 2 rows"),
        ([[0, 1]], [0, 2], [9], r"kv_lens\[0\] is 9, must be .* to the 8 slots"),
        ([[0, 1]], [0, 4], [4], r"q_starts must ascend to at most 3, got 4"),
        ([[0, 1]], [1, 2], [4], r"q_starts\[0\] must be 0, got 1"),
    ],
)
def test_wrong_indices_are_named(
    table: list[list[int]], starts: list[int], lengths: list[int], message: str
) -> None:
    pools = random_pools(2, 1, 4, 8)
    args = [mx.array(ids, dtype=mx.int32) for ids in (table, starts, lengths)]
    with pytest.raises(RuntimeError, match=message):
        mx.eval(ops.paged_attention(mx.zeros((3, 1, 8)), *pools, *args, scale=1.0))


def test_wrong_shapes_are_named() -> None:
    args = [mx.array(ids, dtype=mx.int32) for ids in ([[0]], [0, 1], [1])]
    pools = random_pools(2, 2, 4, 8)
    with pytest.raises(ValueError, match="H must be a multiple of H_kv 2, got 3"):
        ops.paged_attention(mx.zeros((1, 3, 8)), *pools, *args, scale=1.0)
    with pytest.raises(ValueError, match="q has D of 4, k_pool 8"):
        ops.paged_attention(mx.zeros((1, 2, 4)), *pools, *args, scale=1.0)
    with pytest.raises(ValueError, match="block_tables must be int32"):
        ops.paged_attention(mx.zeros((1, 2, 8)), *pools, args[0][0], *args[1:], scale=1.0)
