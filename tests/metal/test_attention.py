"""Paged attention, run as Metal: equal to the reference, a row's bits its own, bytes read once, faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_on_host import Host, MetalHostError, Settings
from mlxserve_kernels import quantized_pages, reference
from mlxserve_kernels.metal_kernels import MetalKernels
from tests.metal.conftest import REPORTS, Plant, kind_of

PARTS = frozenset({"part_sums", "part_stats"})
"""Written where a row has a split."""
TOLERANCE = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}


@pytest.fixture
def host(cache_dir: Path) -> Iterator[Host]:
    host = Host(Settings(cache_dir=cache_dir, seeds=(0, 1, 2), may_leave_unwritten=PARTS))
    yield host
    REPORTS.extend(host.reports)


@dataclass(frozen=True)
class Case:
    """Contiguous keys and values of some sequences, and queries for their last tokens."""

    keys: list[np.ndarray]
    values: list[np.ndarray]
    queries: list[np.ndarray]

    @property
    def kv_lens(self) -> list[int]:
        return [len(keys) for keys in self.keys]

    def chunk(self, sequence: int, end: int, rows: int) -> Case:
        """The last `rows` of the first `end` tokens of one sequence, alone."""
        queries = self.queries[sequence]
        last = len(queries) - (len(self.keys[sequence]) - end)
        return Case([self.keys[sequence][:end]], [self.values[sequence][:end]], [queries[last - rows : last]])

    def beside(self, other: Case) -> Case:
        """In one batch, behind `other`."""
        return Case(other.keys + self.keys, other.values + self.values, other.queries + self.queries)


def make_case(
    kv_lens: Sequence[int], q_lens: Sequence[int], heads: int, kv_heads: int, dim: int, value_dim: int
) -> Case:
    rng = np.random.default_rng(sum(kv_lens))

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    return Case(
        [normal(length, kv_heads, dim) for length in kv_lens],
        [normal(length, kv_heads, value_dim) for length in kv_lens],
        [normal(length, heads, dim) for length in q_lens],
    )


@dataclass(frozen=True)
class Paged:
    """The arguments of paged_attention. Pages lie in a random order; what is unused holds NaN."""

    q: mx.array
    k_pool: mx.array
    v_pool: mx.array
    block_tables: mx.array
    q_starts: mx.array
    kv_lens: mx.array
    tails: dict[str, mx.array]

    @property
    def pooled(self) -> tuple[mx.array, ...]:
        return (self.q, self.k_pool, self.v_pool, self.block_tables, self.q_starts, self.kv_lens)


def paged(
    case: Case,
    *,
    page: int = 32,
    placement: int = 0,
    dtype: mx.Dtype = mx.float32,
    kv_bits: int | None = None,
    has_tails: bool = False,
    window: int | None = None,
    extra_rows: int = 0,
) -> Paged:
    """Entries that no row may read are far out of range. With tails open pages lie there."""
    counts = [-(-length // page) for length in case.kv_lens]
    num_pages = sum(counts) + 3
    order = np.random.default_rng(placement).permutation(num_pages)
    tables = np.full((len(counts), max([1, *counts]) + 1), 1 << 20, np.int32)
    fill = 0 if kv_bits else np.nan
    pools = [
        np.full((num_pages, part[0].shape[1], page, part[0].shape[2]), fill, np.float32)
        for part in (case.keys, case.values)
    ]
    taken = 0
    for index, count in enumerate(counts):
        own = order[taken : taken + count]
        taken += count
        for pool, rows in zip(pools, (case.keys[index], case.values[index]), strict=True):
            for position, row in enumerate(rows):
                pool[own[position // page], :, position % page] = row
        first_position = case.kv_lens[index] - len(case.queries[index])
        first = 0 if window is None else max(0, first_position - window + 1) // page
        tables[index, first:count] = own[first:]
    k_pool, v_pool = stored(pools, dtype, kv_bits)
    tails = {}
    if has_tails:
        open_pages = [int(tables[index, count - 1]) for index, count in enumerate(counts)]
        for index, count in enumerate(counts):
            tables[index, count - 1] = -1 - index
        tails = {"k_tail": k_pool[mx.array(open_pages)], "v_tail": v_pool[mx.array(open_pages)]}
        # The pool's own copies are of no use any more.
        spoiled = mx.array(255 if kv_bits else mx.nan).astype(k_pool.dtype)
        k_pool[mx.array(open_pages)] = spoiled
        v_pool[mx.array(open_pages)] = spoiled
    queries = np.concatenate(case.queries)
    more = np.full((extra_rows, *queries.shape[1:]), np.nan, np.float32)
    starts = np.cumsum([0, *map(len, case.queries)]).astype(np.int32)
    return Paged(
        mx.array(np.concatenate([queries, more])),
        k_pool,
        v_pool,
        mx.array(tables),
        mx.array(starts),
        mx.array(case.kv_lens, dtype=mx.int32),
        tails,
    )


def stored(pools: list[np.ndarray], dtype: mx.Dtype, kv_bits: int | None) -> tuple[mx.array, mx.array]:
    """Pools of [P, H, page, D] as paged_attention takes them."""
    if kv_bits is None:
        keys, values = (mx.array(pool).astype(dtype) for pool in pools)
        return mx.contiguous(keys.swapaxes(2, 3)), values
    num_pages, heads, page, _ = pools[0].shape
    rows = [mx.array(pool).swapaxes(1, 2).reshape(-1, heads, pool.shape[3]) for pool in pools]
    sizes = [quantized_pages.head_bytes(pool.shape[3], page, kv_bits) for pool in pools]
    empty = [mx.zeros((num_pages, heads, size), dtype=mx.uint8) for size in sizes]
    slots = mx.arange(num_pages * page).astype(mx.int32)
    return reference.write_pages(*empty, *rows, slots, kv_bits=kv_bits)


def run(host: Host, args: Paged, **kw: Any) -> mx.array:
    """Chunks by both kernels, which must agree bit by bit."""
    kernels = MetalKernels(host.metal_kernel).attention
    options = {"scale": args.q.shape[2] ** -0.5, **args.tails, **kw}
    output = kernels.paged_attention(*args.pooled, **options)
    if args.q.shape[0] != args.kv_lens.shape[0] and host.reports and host.reports[-1].name == "merge_splits":
        kernels.split_below = 0
        other = kernels.paged_attention(*args.pooled, **options)
        assert host.reports[-1].name == "attend_tile"
        np.testing.assert_array_equal(np.array(other.astype(mx.float32)), np.array(output.astype(mx.float32)))
    return output


def expected(case: Case, *, dtype: mx.Dtype, kv_bits: int | None, page: int, **kw: Any) -> mx.array:
    """The reference's, of float32 queries over the very keys and values that are stored."""
    args = paged(case, page=page, dtype=dtype, kv_bits=kv_bits)
    tables = mx.where(args.block_tables < 1 << 20, args.block_tables, 0)
    q, k_pool, v_pool, _, *rest = args.pooled
    if kv_bits is None:
        k_pool, v_pool = k_pool.astype(mx.float32), v_pool.astype(mx.float32)
    return reference.paged_attention(
        q, k_pool, v_pool, tables, *rest, scale=q.shape[2] ** -0.5, kv_bits=kv_bits, **kw
    )


def assert_equals_the_reference(
    host: Host,
    case: Case,
    *,
    page: int = 32,
    dtype: mx.Dtype = mx.float32,
    kv_bits: int | None = None,
    q_dtype: mx.Dtype = mx.float32,
    has_tails: bool = False,
    **kw: Any,
) -> None:
    case = replace(
        case, queries=[np.array(mx.array(q).astype(q_dtype).astype(mx.float32)) for q in case.queries]
    )
    args = paged(case, page=page, dtype=dtype, kv_bits=kv_bits, has_tails=has_tails, window=kw.get("window"))
    got = run(host, replace(args, q=args.q.astype(q_dtype)), kv_bits=kv_bits, **kw)
    want = expected(case, page=page, dtype=dtype, kv_bits=kv_bits, **kw)
    assert got.dtype == q_dtype and got.shape == want.shape
    error = mx.abs(got.astype(mx.float32) - want).max().item()
    assert error <= TOLERANCE[q_dtype] * max(1.0, mx.abs(want).max().item())


DECODE = ([1, 300, 33, 520], [1, 1, 1, 1])
CHUNKS = ([1, 300, 33, 70], [1, 40, 0, 9])
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 100, "softcap": 5.0},
    {"window": 37, "sinks": mx.linspace(-2, 4, 8)},
    {"sinks": mx.zeros((8,))},
]


@pytest.mark.parametrize("lengths", [DECODE, CHUNKS], ids=["decode", "chunks"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_equals_the_reference(
    host: Host, lengths: tuple[list[int], list[int]], options: dict[str, Any]
) -> None:
    assert_equals_the_reference(host, make_case(*lengths, 8, 2, 16, 16), **options)


@pytest.mark.parametrize("lengths", [([40, 270], [1, 1]), ([40, 70], [3, 5])], ids=["decode", "chunks"])
@pytest.mark.parametrize(
    ("dim", "value_dim", "page", "dtype"),
    [
        (64, 64, 16, mx.float16),
        (80, 80, 24, mx.float16),
        (41, 53, 8, mx.bfloat16),
        (96, 128, 64, mx.bfloat16),
        (72, 40, 40, mx.float32),
    ],
    ids=str,
)
def test_sizes_and_dtypes(
    host: Host, lengths: tuple[list[int], list[int]], dim: int, value_dim: int, page: int, dtype: mx.Dtype
) -> None:
    case = make_case(*lengths, 4, 2, dim, value_dim)
    assert_equals_the_reference(host, case, page=page, dtype=dtype, q_dtype=dtype)


@pytest.mark.full
@pytest.mark.parametrize("lengths", [([40, 270], [1, 1]), ([40, 70], [3, 5])], ids=["decode", "chunks"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("page", [8, 16, 32, 48, 64])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 9, 100])
def test_all_sizes_and_dtypes(
    host: Host, lengths: tuple[list[int], list[int]], dim: int, page: int, dtype: mx.Dtype
) -> None:
    case = make_case(*lengths, 4, 2, dim, dim)
    assert_equals_the_reference(host, case, page=page, dtype=dtype, q_dtype=dtype)


@pytest.mark.parametrize("lengths", [([40, 270], [1, 1]), ([40, 70], [3, 5])], ids=["decode", "chunks"])
@pytest.mark.parametrize("kv_bits", [8, 4])
@pytest.mark.parametrize(
    ("dim", "value_dim", "page"),
    [(64, 64, 16), (32, 96, 32), pytest.param(128, 128, 64, marks=pytest.mark.full)],
)
def test_quantized_pools(
    host: Host, lengths: tuple[list[int], list[int]], kv_bits: int, dim: int, value_dim: int, page: int
) -> None:
    """As the float32 values that they hold, with the same bits."""
    case = make_case(*lengths, 4, 2, dim, value_dim)
    assert_equals_the_reference(host, case, page=page, kv_bits=kv_bits)
    args = paged(case, page=page, kv_bits=kv_bits)
    keys = quantized_pages.read_pages(args.k_pool, dim, kv_bits, is_keys=True).swapaxes(2, 3)
    values = quantized_pages.read_pages(args.v_pool, value_dim, kv_bits, is_keys=False)
    wide = replace(args, k_pool=mx.contiguous(keys), v_pool=values)
    assert mx.array_equal(run(host, args, kv_bits=kv_bits), run(host, wide)).item()


@pytest.mark.full
@pytest.mark.parametrize("lengths", [([40, 270], [1, 1]), ([40, 70], [3, 5])], ids=["decode", "chunks"])
@pytest.mark.parametrize("kv_bits", [8, 4])
@pytest.mark.parametrize("page", [16, 32, 48, 64])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 160, 256])
def test_all_quantized_sizes(
    host: Host, lengths: tuple[list[int], list[int]], kv_bits: int, page: int, dim: int
) -> None:
    case = make_case(*lengths, 4, 2, dim, dim)
    assert_equals_the_reference(host, case, page=page, kv_bits=kv_bits)


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (3, 1), (12, 1), (40, 1)])
def test_heads_that_share_a_kv_head(host: Host, heads: int, kv_heads: int) -> None:
    for lengths in (([270, 20], [1, 1]), ([70, 20], [7, 2])):
        assert_equals_the_reference(host, make_case(*lengths, heads, kv_heads, 16, 16))


@pytest.mark.parametrize(
    "lengths", [([40, 270, 64], [1, 1, 1]), ([40, 70], [3, 5])], ids=["decode", "chunks"]
)
@pytest.mark.parametrize(
    ("dtype", "kv_bits"), [(mx.float16, None), (mx.float32, 8), (mx.float32, 4)], ids=str
)
def test_open_pages_in_tails(
    host: Host, lengths: tuple[list[int], list[int]], dtype: mx.Dtype, kv_bits: int | None
) -> None:
    case = make_case(*lengths, 4, 2, 32, 32)
    with_tails = paged(case, dtype=dtype, kv_bits=kv_bits, has_tails=True)
    plain = paged(case, dtype=dtype, kv_bits=kv_bits)
    assert mx.array_equal(run(host, with_tails, kv_bits=kv_bits), run(host, plain, kv_bits=kv_bits)).item()
    assert_equals_the_reference(host, case, dtype=dtype, kv_bits=kv_bits, has_tails=True)


@pytest.mark.parametrize("options", [{}, {"window": 300, "softcap": 20.0}], ids=["plain", "window"])
def test_bits_do_not_depend_on_batch_chunk_page_or_kernel(host: Host, options: dict[str, Any]) -> None:
    lengths = [600, 40]
    case = make_case(lengths, [90, 40], 6, 2, 16, 16)
    whole = np.split(np.array(run(host, paged(case, **window_of(options)), **options)), [90])
    others = make_case([30, 270], [3, 1], 6, 2, 16, 16)
    for index, end, rows in ((0, 600, 1), (0, 600, 7), (0, 530, 17), (0, 513, 2), (1, 33, 20), (1, 1, 1)):
        chunk = case.chunk(index, end, rows)
        last = len(case.queries[index]) - (lengths[index] - end)
        want = whole[index][last - rows : last]
        for args in (
            paged(chunk, **window_of(options)),
            paged(chunk, page=8, placement=9),
            paged(chunk.beside(others), placement=4),
            paged(chunk.beside(others.chunk(0, 30, 1)), placement=5),
        ):
            got = np.array(run(host, args, **options))[-rows:]
            np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize(
    ("dim", "page", "dtype", "kv_bits"),
    [
        (80, 24, mx.float16, None),
        (96, 64, mx.float32, 4),
        pytest.param(160, 32, mx.float32, 8, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_bits_of_chunks_and_single_rows_with_values_in_runs(
    host: Host, dim: int, page: int, dtype: mx.Dtype, kv_bits: int | None
) -> None:
    """Which decode alone reads in runs; an infinity is among the values."""
    case = make_case([300], [30], 4, 2, 32, dim)
    if kv_bits is None:
        case.values[0][290, 1, 40] = np.inf
    whole = np.array(run(host, paged(case, page=page, dtype=dtype, kv_bits=kv_bits), kv_bits=kv_bits))
    for end in (271, 290, 291, 300):
        alone = paged(case.chunk(0, end, 1), page=page, dtype=dtype, kv_bits=kv_bits)
        np.testing.assert_array_equal(np.array(run(host, alone, kv_bits=kv_bits))[0], whole[end - 271])


def window_of(options: dict[str, Any]) -> dict[str, Any]:
    return {"window": options.get("window")}


def test_nan_and_infinity_reach_only_rows_that_see_them(host: Host) -> None:
    case = make_case([200, 50], [60, 50], 4, 2, 16, 16)
    clean = np.array(run(host, paged(case)))
    case.keys[0][170, 1] = np.nan
    case.values[0][180, 0] = np.inf
    got = np.array(run(host, paged(case)))
    np.testing.assert_array_equal(got[:30], clean[:30])
    np.testing.assert_array_equal(got[60:], clean[60:])
    assert np.isnan(got[30:60, 2:]).all()
    np.testing.assert_array_equal(got[30:40, :2], clean[30:40, :2])
    assert (got[40:60, :2] == np.inf).all()
    for end in (171, 181, 200):
        alone = np.array(run(host, paged(case.chunk(0, end, 1))))[0]
        np.testing.assert_array_equal(alone, got[60 - (200 - end) - 1])


def test_infinities_leave_the_window(host: Host) -> None:
    case = make_case([100], [40], 4, 2, 16, 16)
    clean = np.array(run(host, paged(case, window=20), window=20))
    case.values[0][50] = np.nan
    case.values[0][90] = -np.inf
    got = np.array(run(host, paged(case, window=20), window=20))
    np.testing.assert_array_equal(got[10:30], clean[10:30])
    assert np.isnan(got[:10]).all()
    assert (got[30:] == -np.inf).all()


@pytest.mark.parametrize("kv_lens", [[40], [300]])
def test_scores_without_bounds(host: Host, kv_lens: list[int]) -> None:
    """An infinite score: what is -inf counts nothing, what is +inf gives NaN, as softmax has it."""
    case = make_case(kv_lens, [1], 4, 2, 16, 16)
    case.queries[0][:] = np.abs(case.queries[0])
    case.keys[0][3] = -np.inf
    args = paged(case)
    rest = Case([np.delete(case.keys[0], 3, 0)], [np.delete(case.values[0], 3, 0)], case.queries)
    want = expected(rest, page=32, dtype=mx.float32, kv_bits=None)
    assert mx.abs(run(host, args) - want).max().item() <= 2e-6
    case.keys[0][5] = np.inf
    assert bool(mx.all(mx.isnan(run(host, paged(case)))))
    case.keys[0][:] = -np.inf
    assert bool(mx.all(mx.isnan(run(host, paged(case)))))


@pytest.mark.parametrize("lengths", [([300, 40], [1, 1]), ([300, 40], [7, 2])], ids=["decode", "chunks"])
def test_rows_of_no_sequence_are_zero(host: Host, lengths: tuple[list[int], list[int]]) -> None:
    case = make_case(*lengths, 4, 2, 16, 16)
    got = run(host, paged(case, extra_rows=5))
    rows = sum(lengths[1])
    assert bool(mx.all(got[rows:] == 0))
    assert mx.array_equal(got[:rows], run(host, paged(case))).item()


def test_sequences_without_rows_or_tokens(host: Host) -> None:
    """T equals S here, though no sequence has one row: the kernel of single rows is right all the same."""
    case = make_case([0, 300, 20], [0, 3, 0], 4, 2, 16, 16)
    assert_equals_the_reference(host, make_case([300], [3], 4, 2, 16, 16))
    got = run(host, paged(case))
    alone = run(host, paged(Case(case.keys[1:2], case.values[1:2], case.queries[1:2])))
    assert mx.array_equal(got, alone).item()


def test_a_row_without_a_token_is_zero(host: Host) -> None:
    args = paged(make_case([40, 20], [1, 1], 4, 2, 16, 16))
    got = run(host, replace(args, kv_lens=mx.array([0, 20], dtype=mx.int32)))
    assert bool(mx.all(got[0] == 0)) and bool(mx.all(got[1] != 0))


def test_no_sequences_and_no_rows(host: Host) -> None:
    args = paged(make_case([40], [2], 4, 2, 16, 16))
    none = replace(
        args,
        block_tables=mx.zeros((0, 1), dtype=mx.int32),
        q_starts=mx.array([0], dtype=mx.int32),
        kv_lens=mx.zeros((0,), dtype=mx.int32),
    )
    assert bool(mx.all(run(host, none) == 0))
    assert run(host, replace(args, q=args.q[:0])).shape == (0, 4, 16)
    assert not host.reports


def test_strided_arguments(host: Host) -> None:
    args = paged(make_case([70, 30], [9, 2], 4, 2, 16, 16))
    wide = mx.repeat(args.q, 2, axis=2)
    tables = mx.repeat(args.block_tables, 2, axis=1)
    strided = replace(args, q=wide[..., ::2], block_tables=tables[:, ::2])
    assert mx.array_equal(run(host, strided), run(host, args)).item()


@pytest.mark.parametrize("kv_bits", [None, 8, 4])
def test_slices_that_start_where_they_may(cache_dir: Path, kv_bits: int | None) -> None:
    """At 16 bytes of a pool, whatever its elements."""
    settings = Settings(cache_dir=cache_dir, slice_offset=16 if kv_bits else 8)
    run(
        Host(settings),
        paged(make_case([40], [2], 4, 2, 32, 32), dtype=mx.float16, kv_bits=kv_bits),
        kv_bits=kv_bits,
    )


@pytest.mark.parametrize(
    ("dim", "page", "dtype", "kv_bits"),
    [
        (64, 32, mx.float16, None),
        (128, 16, mx.bfloat16, None),
        (256, 64, mx.bfloat16, None),
        (64, 32, mx.float32, 8),
        (128, 16, mx.float32, 8),
        (64, 32, mx.float32, 4),
        (128, 16, mx.float32, 4),
        # Rows of values that end inside a line; keys of 64 bytes a row of a page; more than four groups.
        (80, 32, mx.float16, None),
        (96, 32, mx.float32, 8),
        (96, 64, mx.float32, 4),
        (64, 64, mx.float32, 8),
        (160, 64, mx.float32, 4),
        pytest.param(160, 32, mx.float32, 8, marks=pytest.mark.full),
        pytest.param(256, 32, mx.float32, 4, marks=pytest.mark.full),
        pytest.param(32, 32, mx.float32, 4, marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"window": 320}, marks=pytest.mark.full)], ids=["plain", "window"]
)
def test_decode_asks_for_each_byte_once(
    host: Host, dim: int, page: int, dtype: mx.Dtype, kv_bits: int | None, options: dict[str, Any]
) -> None:
    case = make_case([576, 64], [1, 1], 8, 2, dim, dim)
    args = paged(case, page=page, dtype=dtype, kv_bits=kv_bits, window=options.get("window"))
    run(host, args, kv_bits=kv_bits, **options)
    split, merge = host.reports[-2:]
    assert (split.name, merge.name) == ("attend_split", "merge_splits")
    tokens = sum(min(length, options.get("window", length)) for length in case.kv_lens)
    for name, pool in (("k_pool", args.k_pool), ("v_pool", args.v_pool)):
        cost = split.buffer(name)
        least = pool.nbytes // pool.shape[0] // page * tokens
        assert least <= cost.simd_read <= 1.05 * least
        assert cost.coalescing >= 0.9
    assert merge.buffer("part_sums").simd_read == split.buffer("part_sums").simd_written
    assert split.buffer("part_sums").coalescing >= 0.9 and merge.buffer("part_sums").coalescing >= 0.9


def test_chunks_read_keys_once_a_tile(host: Host) -> None:
    """32 rows are 8 tokens of 4 heads."""
    args = paged(make_case([256], [16], 8, 2, 64, 64), dtype=mx.float16)
    run(host, args)
    report = host.reports[-1]
    assert report.name == "attend_tile"
    assert report.grid == (2 * 128, 16 // 8 + 1 + 1, 1)
    for name, pool in (("k_pool", args.k_pool), ("v_pool", args.v_pool)):
        cost = report.buffer(name)
        assert cost.simd_read <= 2 * 1.05 * pool.nbytes // pool.shape[0] * 8
        assert cost.coalescing >= 0.9


HEADERS = ("attention.h", "attention_pages.h", "attention_splits.h", "attention_kernels.h")
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
FAULTS = [
    # Missing or wrong barriers.
    (f"mask(first);\n    {BARRIER}", "mask(first);", "uninitialised read"),
    (f"{BARRIER}\n        taker", "taker", "uninitialised read"),
    (f"sub);\n        {BARRIER}\n      }}", "sub);\n      }", "race"),
    (f"mask(first);\n    {BARRIER}", "mask(first);\n    threadgroup_barrier(mem_flags::mem_none);", "race"),
    (f"thread_index);\n  {BARRIER}", "thread_index);", "uninitialised read"),
    (
        "exponentiate();\n",
        "if (simdgroup_index > 0) threadgroup_barrier(mem_flags::mem_none);\n    exponentiate();\n",
        "divergent barrier",
    ),
    # Two writers, or none.
    ("maxima[simdgroup_index * rows + row] =", "maxima[row] =", "race"),
    ("if (lane.pair == 0) sums[", "if (lane.row > 0) sums[", "race"),
    ("if (lane.pair == 0) maxima[", "if (lane.lane == 0) maxima[", "uninitialised read"),
    ("if (is_active) {", "if (!is_active) return;\n    {", "uninitialised read"),
    # Beyond an end.
    ("i < rows * Memory::stride; i", "i <= rows * Memory::stride; i", "out of bounds"),
    ("const threadgroup float* at = partial", "const threadgroup float* at = sums", "out of bounds"),
    ("table[key / Page]", "table[key / Page + 1]", "out of bounds"),
    ("from)[n / 4]", "from)[n / 4 + 1024]", "out of bounds"),
    ("if (d < D && has_row(row))", "if (d < D)", "out of bounds"),
    # The wrong place, lane or address space.
    ("page + at * Page + slot, raw[n]", "page + at * Page + slot + 1, raw[n]", "misaligned access"),
    ("simd_shuffle_xor(greatest, 8)", "simd_shuffle(greatest, ushort(lane.lane + 8))", "wrong lane"),
    ("if (is_active) {", "if (is_active && lane.lane < 16) {", "divergent simdgroup function"),
    (
        "threadgroup T* queries;\n  threadgroup float* maxima;",
        "device T* queries;\n  threadgroup float* maxima;",
        "source",
    ),
    # Nothing but a wrong result.
    ("key < end() && key + count > begin()", "key + 1 < end() && key + count > begin()", "result"),
    ("return key <= position && (", "return key < position && (", "result"),
    ("n * 2 + int(lane.row) % 2", "n * 2", "result"),
    ("simd_shuffle_xor(sum, 1)", "simd_shuffle_xor(sum, 2)", "result"),
    ("at[0] + at[rows * 32]", "at[0] + at[0]", "result"),
    ("(index / 4 & 4) + index / 2 % 4", "index / 4", "race"),
]


@pytest.mark.parametrize(
    "lengths", [([40, 270], [1, 1]), ([40, 70], [3, 5])], ids=["attend_split", "attend_tile"]
)
@pytest.mark.parametrize(("old", "new", "kind"), FAULTS, ids=map(str, range(len(FAULTS))))
def test_planted_fault_is_caught(
    host: Host,
    plant: Plant,
    lengths: tuple[list[int], list[int]],
    old: str,
    new: str,
    kind: str,
) -> None:
    assert_is_caught(host, plant, lengths, old, new, kind)


def assert_is_caught(
    host: Host,
    plant: Plant,
    lengths: tuple[list[int], list[int]],
    old: str,
    new: str,
    kind: str,
    kv_bits: int | None = None,
    value_dim: int = 64,
) -> None:
    """By the harness as a fault of that kind, or by comparison."""
    case = make_case(*lengths, 6, 2, 32, value_dim)
    want = expected(case, page=32, dtype=mx.float32, kv_bits=kv_bits)
    plant(HEADERS, old, new)
    args = paged(case, kv_bits=kv_bits)
    if kind == "result":
        assert not mx.abs(run(host, args, kv_bits=kv_bits) - want).max().item() <= 1e-4
        return
    with pytest.raises(MetalHostError) as caught:
        run(host, args, kv_bits=kv_bits)
    assert kind_of(caught.value) == kind, caught.value


@pytest.mark.parametrize("kv_bits", [8, 4])
@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("ushort(lane.pair * 8 + b", "ushort(lane.row * 8 + b", "wrong lane"),
        ("ushort(lane.pair * 8 + b", "ushort(b", "result"),
        ("lane.pair % 2 == 0 ? even : odd", "even", "result"),
        ("2 * b + lane.pair / 2", "lane.pair", "result"),
        ("scales + group * Page", "scales + (group + 4096) * Page", "out of bounds"),
        ("page + slot * (DV / 2) + at * 16", "page + slot * (DV / 2) + at * 16 + 8", "misaligned access"),
        ("? of_scales[g]", "? of_scales[g ^ 1]", "result"),
    ],
    ids=str,
)
def test_planted_fault_of_quantized_pools_is_caught(
    host: Host, plant: Plant, old: str, new: str, kind: str, kv_bits: int
) -> None:
    if "DV / 2" in old and kv_bits == 8:
        old, new = "page + slot * DV + column(block, 0, pair, 0)", "page + slot * DV + 4"
    assert_is_caught(host, plant, ([40, 270], [1, 1]), old, new, kind, kv_bits)


SYNCED = "simdgroup_barrier(mem_flags::mem_threadgroup);\n    "


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (SYNCED + "UNROLLED", "UNROLLED", "uninitialised read"),
        (SYNCED[:-2] + "}", "}", "race"),
        ("all[at] = ", "all[at + rows * 128] = ", "out of bounds"),
        ("+ at % value_groups]", "]", "result"),
        ("from + piece * 16", "from + piece * 16 + 8", "misaligned access"),
        ("from + piece * 16", "from + piece * 65536", "out of bounds"),
        ("uint(piece % 4))", "uint(piece % 4)) + 32", "wrong lane"),
        ("uint(piece % 8 / 4)", "0u", "result"),
        ("n > most", "n >= most", "result"),
        ("key >= first && key < end)", "key >= first && key + 1 < end)", "result"),
    ],
    ids=str,
)
def test_planted_fault_of_runs_is_caught(host: Host, plant: Plant, old: str, new: str, kind: str) -> None:
    """Rows of 160 bytes, five groups."""
    assert_is_caught(host, plant, ([40, 270], [1, 1]), old, new, kind, 8, 160)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("split * split_keys <= rows.position", "(split - 1) * split_keys <= rows.position", "result"),
        ("split_keys <= rows.position", "split_keys + split_keys <= rows.position", "result"),
        ("sub_block % subs, at.x % 32)", "sub_block % subs, at.x % 16)", "race"),
        ("sums[part * columns + at.x]", "sums[part * columns + at.x + 100000]", "out of bounds"),
        ("const device float* stats", "threadgroup float* stats", "source"),
        (
            "  out[row * DV + column] = T(value",
            "  if (at.y > 0) out[row * DV + column] = T(value",
            "unwritten output",
        ),
    ],
    ids=str,
)
def test_planted_fault_of_the_merge_is_caught(
    host: Host, plant: Plant, old: str, new: str, kind: str
) -> None:
    assert_is_caught(host, plant, ([40, 270], [1, 1]), old, new, kind)


def test_wrong_arguments(host: Host) -> None:
    args = paged(make_case([40, 20], [2, 1], 4, 2, 16, 16))
    tables, starts, lengths = args.block_tables, args.q_starts, args.kv_lens
    for wrong, message in (
        ({"q": args.q[:, :3]}, "3 heads do not fit"),
        ({"q": args.q[..., :4]}, "D of at least 8"),
        ({"q": args.q.astype(mx.int32)}, "q must be floats"),
        ({"k_pool": args.k_pool[..., :12], "v_pool": args.v_pool[:, :, :12]}, "a multiple of 8 slots"),
        ({"k_pool": args.k_pool.astype(mx.float16)}, "of one dtype"),
        ({"v_pool": args.v_pool[:, :1]}, "do not fit pools"),
        ({"block_tables": tables[0]}, "are int32"),
        ({"kv_lens": lengths.astype(mx.uint32)}, "are int32"),
        ({"q_starts": starts[:2]}, "different numbers of sequences"),
        ({"block_tables": tables[:, :0]}, "at least one column"),
        ({"tails": {"k_tail": args.k_pool}}, "laid out as k_pool"),
        ({"tails": {"k_tail": args.k_pool, "v_tail": args.v_pool[:, :1]}}, "laid out as k_pool"),
    ):
        with pytest.raises(ValueError, match=message):
            run(host, replace(args, **wrong))
    for options, message in (
        ({"sinks": mx.zeros((3,))}, r"sinks must be \[4\]"),
        ({"window": 0}, "window must be at least 1"),
        ({"kv_bits": 8}, "pools must be uint8"),
        ({"window": -1}, "window must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            run(host, args, **options)
    assert not host.reports
