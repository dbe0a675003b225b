"""KV pages of integers: what they hold is defined here in numpy; attention reads exactly that."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxserve_kernels import ops, quantized_pages, reference
from mlxserve_kernels.decoder import DecoderLayer, DecoderStack, Projection

pytestmark = pytest.mark.usefixtures("cpu_kernels")

BITS = (8, 4)


def ids(values: Any) -> mx.array:
    return mx.array(np.asarray(values, dtype=np.int32))


def quantized(rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers [..., D / 32, 32], scales and biases [..., D / 32] of rows, by the definition."""
    with np.errstate(all="ignore"):
        groups = rows.astype(np.float32).reshape(*rows.shape[:-1], -1, 32)
        low, high = groups.min(-1), groups.max(-1)
        span = np.abs(groups).max(-1) if bits == 8 else high - low
        is_broken = ~(np.isfinite(groups).all(-1) & np.isfinite(span))
        scales = span / np.float32(127 if bits == 8 else 15)
        biases = np.zeros_like(scales) if bits == 8 else low
        quotients = (groups - biases[..., None]) / np.where(scales == 0, np.float32(1), scales)[..., None]
        integers = np.rint(np.clip(quotients, *((-127, 127) if bits == 8 else (0, 15))))
    integers[is_broken], scales[is_broken], biases[is_broken] = 0, np.nan, np.nan
    return integers.astype(np.int32), scales, biases


def dequantized(rows: np.ndarray, bits: int) -> np.ndarray:
    integers, scales, biases = quantized(rows, bits)
    values = integers.astype(np.float32) * scales[..., None]
    return (values if bits == 8 else values + biases[..., None]).reshape(rows.shape)


def head_content(rows: np.ndarray, bits: int, *, is_keys: bool) -> np.ndarray:
    """The bytes of a page and head that holds rows [page, D]."""
    integers, scales, biases = quantized(rows, bits)
    if bits == 8:
        items = integers.astype(np.int8).view(np.uint8).reshape(len(rows), -1)
    else:
        items = (integers[..., :16] + 16 * integers[..., 16:]).astype(np.uint8).reshape(len(rows), -1)
    parts = [items, scales] if bits == 8 else [items, scales, biases]
    return np.concatenate(
        [np.ascontiguousarray(part.T if is_keys else part).view(np.uint8).ravel() for part in parts]
    )


def empty_pools(pages: int, heads: int, page: int, dims: tuple[int, int], bits: int) -> list[mx.array]:
    """Full of bytes that read as NaN scales."""
    sizes = (quantized_pages.head_bytes(dim, page, bits) for dim in dims)
    pools = [mx.full((pages, heads, size), 255, dtype=mx.uint8) for size in sizes]
    mx.eval(pools)
    return pools


def random_rows(*shape: int, seed: int = 5, spread: int = 20) -> np.ndarray:
    """Rows whose groups differ in size, up to 2 ** spread, some all zero and some constant."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal(shape, dtype=np.float32)
    groups = rows.reshape(-1, 32)
    groups *= np.exp2(rng.integers(-spread, spread, (len(groups), 1))).astype(np.float32)
    groups[::7] = 0
    groups[3::11] = groups[3::11, :1]
    return rows


@pytest.mark.parametrize("implementation", [ops, reference], ids=["ops", "reference"])
@pytest.mark.parametrize("page", [16, 32, 80])
@pytest.mark.parametrize("bits", BITS)
def test_pages_hold_the_definition(bits: int, page: int, implementation: Any) -> None:
    pages, heads, dims = 5, 3, (64, 32)
    keys, values = (
        random_rows(pages * page, heads, dims[0]),
        random_rows(pages * page, heads, dims[1], seed=6),
    )
    slots = np.random.default_rng(1).permutation(pages * page)
    pools = empty_pools(pages, heads, page, dims, bits)
    for part in np.array_split(slots, 3):
        pools = implementation.write_pages(
            *pools, mx.array(keys[part]), mx.array(values[part]), ids(part), kv_bits=bits
        )
    for pool, rows, is_keys in ((pools[0], keys, True), (pools[1], values, False)):
        content = np.array(pool)
        for at, head in itertools.product(range(pages), range(heads)):
            want = head_content(rows[at * page : (at + 1) * page, head], bits, is_keys=is_keys)
            np.testing.assert_array_equal(content[at, head], want)
        read = quantized_pages.read_pages(pool, rows.shape[2], bits, is_keys=is_keys)
        want = dequantized(rows, bits).reshape(pages, page, heads, -1).swapaxes(1, 2)
        np.testing.assert_array_equal(np.array(read), want)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_narrow_rows_are_widened_first(dtype: mx.Dtype) -> None:
    rows = mx.random.normal((20, 2, 32)).astype(dtype)
    slots = ids(range(20))
    for bits in BITS:
        pools = empty_pools(2, 2, 16, (32, 32), bits)
        got = ops.write_pages(*pools, rows, rows, slots, kv_bits=bits)
        wide = rows.astype(mx.float32)
        want = ops.write_pages(*empty_pools(2, 2, 16, (32, 32), bits), wide, wide, slots, kv_bits=bits)
        assert all(mx.array_equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("bits", BITS)
def test_extreme_groups(bits: int) -> None:
    tiny, huge = np.float32(1e-45), np.float32(2e38)
    rows = np.zeros((10, 1, 32), np.float32)
    rows[0] = tiny
    rows[1, 0, ::2], rows[1, 0, 1] = 150 * tiny, -70 * tiny
    rows[2] = huge
    rows[3, 0, 0], rows[3, 0, 1] = huge, -huge
    rows[4, 0, 5] = np.nan
    rows[5, 0, 5] = -np.nan
    rows[6, 0, 5] = np.inf
    rows[7, 0, 5] = -np.inf
    rows[8] = -0.0
    rows[9] = -3.25
    for implementation in (ops, reference):
        pools = implementation.write_pages(
            *empty_pools(1, 1, 16, (32, 32), bits),
            mx.array(rows),
            mx.array(rows),
            ids(range(10)),
            kv_bits=bits,
        )
        got = np.array(quantized_pages.read_pages(pools[0], 32, bits, is_keys=True))[0, 0, :10]
        np.testing.assert_array_equal(got, dequantized(rows, bits)[:, 0])
        assert np.isnan(got[4:8]).all()
        assert np.isfinite(got[[0, 1, 2, 8, 9]]).all()
        assert np.isfinite(got[3]).all() == (bits == 8)
        assert (got[8] == 0).all()
        if bits == 4:
            np.testing.assert_array_equal(got[9], rows[9, 0])


@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 15 / 2)])
def test_an_error_is_half_a_step(bits: int, steps: float) -> None:
    rows = np.random.default_rng(2).standard_normal((200, 64), dtype=np.float32)
    step = np.abs(rows.reshape(-1, 32)).max(-1).repeat(32).reshape(rows.shape) / steps
    assert (np.abs(dequantized(rows, bits) - rows) <= step * 0.51).all()


class Sequences:
    """Keys and values of some sequences in quantized pages and, dequantized, in pages of floats."""

    def __init__(self, lengths: list[int], kv_heads: int, dims: tuple[int, int], *, page: int, bits: int):
        self.bits, self.lengths, self.page = bits, lengths, page
        counts = [-(-length // page) for length in lengths]
        order = np.random.default_rng(len(lengths)).permutation(sum(counts) + 2)
        self.tables = np.full((len(lengths), max(counts) + 1), -1, dtype=np.int32)
        self.rows = [random_rows(sum(lengths), kv_heads, dim, seed=dim, spread=2) for dim in dims]
        slots, taken = [], 0
        for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            self.tables[index, :count] = order[taken : taken + count]
            taken += count
            at = np.arange(length)
            slots.append(self.tables[index, at // page] * page + at % page)
        self.slots = np.concatenate(slots)
        self.pages = len(order)
        self.kv_heads, self.dims = kv_heads, dims

    def pools(self) -> list[mx.array]:
        empty = empty_pools(self.pages, self.kv_heads, self.page, self.dims, self.bits)
        rows = (mx.array(part) for part in self.rows)
        return list(ops.write_pages(*empty, *rows, ids(self.slots), kv_bits=self.bits))

    def float_pools(self) -> list[mx.array]:
        pools = [
            np.full((self.pages, self.kv_heads, self.page, dim), np.nan, np.float32) for dim in self.dims
        ]
        for pool, rows in zip(pools, self.rows, strict=True):
            pool[self.slots // self.page, :, self.slots % self.page] = dequantized(rows, self.bits)
        return [mx.array(np.ascontiguousarray(pools[0].swapaxes(2, 3))), mx.array(pools[1])]

    def attend(self, pools: list[mx.array], q_lens: list[int], q: mx.array, **kw: Any) -> np.ndarray:
        starts = np.cumsum([0, *q_lens])
        implementation = kw.pop("implementation", ops)
        tables = self.tables if implementation is ops else np.maximum(self.tables, 0)
        output = implementation.paged_attention(
            q, *pools, ids(tables), ids(starts), ids(self.lengths), scale=0.3, **kw
        )
        return np.array(output)


@pytest.mark.parametrize("bits", BITS)
def test_attention_reads_what_pages_hold(isa: str, bits: int) -> None:
    q_lens = [1, 40, 3, 0, 64]
    for dims, page, group in (((64, 64), 32, 4), ((32, 96), 16, 1), ((128, 32), 48, 3), ((64, 64), 128, 7)):
        cases = Sequences([1, 700, 33, 5, 64], 2, dims, page=page, bits=bits)
        q = mx.random.normal((sum(q_lens), 2 * group, dims[0]))
        for options in ({}, {"window": 37, "softcap": 30.0, "sinks": mx.zeros((2 * group,))}):
            got = cases.attend(cases.pools(), q_lens, q, kv_bits=bits, **options)
            assert np.isfinite(got).all()
            for want in (
                cases.attend(cases.float_pools(), q_lens, q, **options),
                cases.attend(cases.pools(), q_lens, q, kv_bits=bits, implementation=reference, **options),
            ):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("bits", BITS)
def test_a_row_has_its_bits_in_any_tile_and_page(isa: str, bits: int) -> None:
    length, kv_heads, group = 300, 2, 3
    for dims, pages in (((64, 96), (16, 32, 48, 128)), ((32, 64), (32, 80))):
        q = mx.random.normal((100, kv_heads * group, dims[0]))
        bits_of: dict[int, np.ndarray] = {}
        for page in pages:
            cases = Sequences([length], kv_heads, dims, page=page, bits=bits)
            for options in ({}, {"window": 70}):
                whole = cases.attend(cases.pools(), [100], q, kv_bits=bits, **options)
                for rows in (1, 2, 7):
                    part = cases.attend(cases.pools(), [rows], q[-rows:], kv_bits=bits, **options)
                    np.testing.assert_array_equal(part, whole[-rows:])
                first = bits_of.setdefault(len(options), whole)
                np.testing.assert_array_equal(whole, first)


@pytest.mark.parametrize("bits", BITS)
def test_long_contexts_in_splits(bits: int) -> None:
    cases = Sequences([3000], 1, (64, 64), page=32, bits=bits)
    q = mx.random.normal((2, 5, 64))
    got = cases.attend(cases.pools(), [2], q, kv_bits=bits)
    np.testing.assert_allclose(got, cases.attend(cases.float_pools(), [2], q), rtol=1e-4, atol=1e-5)
    batch = Sequences([3000, 200], 1, (64, 64), page=64, bits=bits)
    batch.rows = [np.concatenate([a, b[3000:]]) for a, b in zip(cases.rows, batch.rows, strict=True)]
    both = batch.attend(batch.pools(), [2, 3], mx.concatenate([q, mx.ones((3, 5, 64))]), kv_bits=bits)
    np.testing.assert_array_equal(both[:2], got)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("bits", BITS)
def test_a_broken_row_reaches_only_rows_that_see_it(isa: str, bits: int, broken: float) -> None:
    cases = Sequences([200, 50], 2, (64, 64), page=32, bits=bits)
    q_lens, q = [60, 50], mx.random.normal((110, 4, 64))
    clean = cases.attend(cases.pools(), q_lens, q, kv_bits=bits)
    cases.rows[0][170, 1, 3] = broken
    cases.rows[1][180, 0, 40] = broken
    got = cases.attend(cases.pools(), q_lens, q, kv_bits=bits)
    np.testing.assert_array_equal(got[:30], clean[:30])
    np.testing.assert_array_equal(got[60:], clean[60:])
    assert np.isnan(got[30:60, 2:]).all()
    np.testing.assert_array_equal(got[30:40, :2], clean[30:40, :2])
    assert np.isnan(got[40:60, :2, 32:]).all()
    np.testing.assert_array_equal(got[40:60, :2, :32], clean[40:60, :2, :32])


@pytest.mark.parametrize("bits", BITS)
def test_a_copied_page_is_whole_and_a_write_leaves_its_source_alone(bits: int) -> None:
    row = mx.random.normal((48, 2, 32))
    pools = ops.write_pages(*empty_pools(4, 2, 16, (32, 32), bits), row, row, ids(range(48)), kv_bits=bits)
    before = [np.array(pool) for pool in pools]
    pools = ops.copy_pages(*pools, ids([0]), ids([2]))
    pools = ops.write_pages(*pools, row[:1] + 1, row[:1] + 1, ids([33]), kv_bits=bits)
    for pool, old in zip(pools, before, strict=True):
        np.testing.assert_array_equal(np.array(pool)[[0, 1, 3]], old[[0, 1, 3]])
    source, copy = (quantized_pages.read_pages(pools[1], 32, bits, is_keys=False)[page] for page in (0, 2))
    assert mx.array_equal(source[:, 2:], copy[:, 2:])
    assert mx.array_equal(source[:, 0], copy[:, 0])
    assert not mx.array_equal(source[:, 1], copy[:, 1])


def test_a_stack_equals_its_single_operations(isa: str) -> None:
    heads, kv_heads, dim, hidden = 4, 2, 32, 64

    def projection(outputs: int, inputs: int) -> Projection:
        return Projection(mx.random.normal((outputs, inputs)) * 0.1)

    q, k, v, o = (
        projection(*shape)
        for shape in ((heads * dim, hidden), (kv_heads * dim, hidden), (kv_heads * dim, hidden),
                      (hidden, heads * dim))
    )  # fmt: skip
    layer = DecoderLayer(
        heads=heads, kv_heads=kv_heads, dim=dim, value_dim=dim, scale=0.2, q=q, k=k, v=v, o=o
    )
    stack = DecoderStack([layer])
    for bits, rows in itertools.product(BITS, (1, 3, 40)):
        x = mx.random.normal((rows, hidden))
        indices = [ids(range(rows)), ids(range(rows)), ids([[0, 1, 2]]), ids([0, rows]), ids([rows])]
        k_pool, v_pool = empty_pools(3, kv_heads, 16, (dim, dim), bits)
        got, _ = stack(stack.hold([k_pool], [v_pool], bits), x, *indices, k_pool)
        mx.eval(got)
        pools = ops.write_pages(
            *empty_pools(3, kv_heads, 16, (dim, dim), bits),
            ops.linear(x, k.w).reshape(rows, kv_heads, dim),
            ops.linear(x, v.w).reshape(rows, kv_heads, dim),
            indices[1],
            kv_bits=bits,
        )
        queries = ops.linear(x, q.w).reshape(rows, heads, dim)
        attended = ops.paged_attention(queries, *pools, *indices[2:], scale=0.2, kv_bits=bits)
        want = x + ops.linear(attended.reshape(rows, -1), o.w)
        assert mx.array_equal(got, want), (bits, rows)
    with pytest.raises(ValueError, match="StackPools: with kv_bits pools must be uint8"):
        stack.hold([mx.zeros((3, 2, 32, 16))], [mx.zeros((3, 2, 16, 32))], 8)


@pytest.mark.parametrize("implementation", [ops, reference], ids=["ops", "reference"])
def test_wrong_sizes_are_named(implementation: Any) -> None:
    def write(dim: int, size: int, bits: int | None, value_dim: int | None = None) -> None:
        pools = (mx.zeros((2, 1, size), dtype=mx.uint8), mx.zeros((2, 1, size), dtype=mx.uint8))
        rows = (mx.ones((1, 1, dim)), mx.ones((1, 1, value_dim or dim)))
        mx.eval(implementation.write_pages(*pools, *rows, ids([0]), kv_bits=bits))

    size = quantized_pages.head_bytes(32, 16, 8)
    write(32, size, 8)
    with pytest.raises(ValueError, match="kv_bits must be 8 or 4, got 5"):
        write(32, size, 5)
    with pytest.raises(ValueError, match="kv_bits must be 8 or 4, got 0"):
        write(32, size, 0)
    with pytest.raises(ValueError, match="D that is a multiple of 32, got 40"):
        write(40, size, 8)
    with pytest.raises(ValueError, match="D that is a multiple of 32, got 16"):
        write(32, size, 8, value_dim=16)
    with pytest.raises(ValueError, match="page size that is a multiple of 16, got 8"):
        write(32, size // 2, 8)
    with pytest.raises(ValueError, match=f"has {size + 1} bytes a head"):
        write(32, size + 1, 8)
    with pytest.raises(ValueError, match=f"has {size} bytes a head"):
        write(32, size, 8, value_dim=64)
    floats = (mx.zeros((1, 1, 32, 16)), mx.zeros((1, 1, 16, 32)))
    q, rest = mx.ones((1, 1, 32)), (ids([[0]]), ids([0, 1]), ids([1]))
    with pytest.raises(ValueError, match=r"with kv_bits pools must be uint8 \[pages, heads, bytes\]"):
        implementation.paged_attention(q, *floats, *rest, scale=1.0, kv_bits=8)


def test_pools_of_bytes_need_bits() -> None:
    pools = empty_pools(2, 1, 16, (32, 32), 8)
    row = mx.ones((1, 1, 32))
    with pytest.raises(ValueError, match="k_pool must be float32, float16 or bfloat16, got uint8"):
        ops.write_pages(*pools, row, row, ids([0]))
    with pytest.raises(RuntimeError, match=r"slot_mapping\[0\] is 32, the pool has slots 0 to 31"):
        mx.eval(ops.write_pages(*pools, row, row, ids([32]), kv_bits=8))
    with pytest.raises(RuntimeError, match=r"source_ids\[0\] is 2, the pool has 2 pages"):
        mx.eval(ops.copy_pages(*pools, ids([2]), ids([0])))
